"""The compiled simulator: decisions of `bstar.sim.scheduler`, cost that grows with requests and not with steps."""
