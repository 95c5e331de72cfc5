"""Bytes and FLOPs into seconds: the floor ("speed of light") and the expected time of a step."""

from bstar.latency.times import (
    Curve,
    StepTime,
    decode_curve,
    decode_step_time,
    prefill_time,
    step_time,
    step_times_s,
)

__all__ = ["Curve", "StepTime", "decode_curve", "decode_step_time", "prefill_time", "step_time", "step_times_s"]
