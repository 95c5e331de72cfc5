"""The simulator: vLLM's scheduler decision for decision, and requests through it in time."""

from bstar.sim.replay import replay_schedule

__all__ = ["replay_schedule"]
