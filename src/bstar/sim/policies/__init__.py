"""Other engines' schedulers and other ways to preempt, verify and step, on the core of `bstar.sim.scheduler`."""
