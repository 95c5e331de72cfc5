"""Runs of decode steps in closed form."""

from __future__ import annotations

import numpy as np

from bstar.sim.kernel.compiled import part
from bstar.sim.kernel.state import Ints


@part
def zero() -> int:
    """0 as a plain whole number: a literal 0 as an argument would compile the callee once more."""
    return int(np.int64(0))


@part
def run_s(base_s: float, slope_s: float, steps: int) -> float:
    """Seconds of `steps` decode steps: step j takes base_s + slope_s · j."""
    return steps * base_s + slope_s * (0.5 * steps * (steps + 1.0))


@part
def steps_to_reach(base_s: float, slope_s: float, wait_s: float, most: int) -> int:
    """Fewest whole steps whose seconds are at least wait_s (at most `most`)."""
    if wait_s <= 0.0:
        return 0
    linear = base_s + 0.5 * slope_s
    guess = 2.0 * wait_s / (linear + np.sqrt(linear * linear + 2.0 * slope_s * wait_s))
    if guess > most:
        return most
    steps = int(np.ceil(guess))
    while steps > 0 and run_s(base_s, slope_s, steps - 1) >= wait_s:
        steps -= 1
    while steps < most and run_s(base_s, slope_s, steps) < wait_s:
        steps += 1
    return steps


@part
def steps_with_blocks(phases: Ints, phase: int, count: int, free: int, most: int) -> tuple[int, int]:
    """(steps, blocks they take): decode steps of `count` slots before a step finds too few free blocks.

    phases[p] slots take a new block in the steps with steps mod block_size = p; `phase` is that of the first step.
    """
    size = phases.size
    cycles = most // size
    if count * (cycles + 1) > free:
        cycles = min(cycles, free // count)
    steps, taken = cycles * size, cycles * count
    while steps < most:
        need = phases[phase]
        if taken + need > free:
            break
        taken += need
        steps += 1
        phase += 1
        if phase == size:
            phase = 0
    return steps, taken


@part
def blocks_of(tokens: int, size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return (tokens + size - 1) // size


@part
def span_reach(limit: int, restarts: int, context: int) -> int:
    """Tokens that one decoded token at `context` (itself included) sees."""
    if limit == 0:
        return context
    if restarts:
        return (context - 1) % limit + 1
    return min(context, limit)
