"""Scheduler cases: a request list against step numbers instead of a clock, and the decisions it leads to.

    case     {"engine": {settings}, "requests": [{id, arrival_step, prompt_tokens, output_tokens,
             prefix?: [group, tokens], priority?}]}; other keys are ignored
    steps    [{step, scheduled: [[id, tokens], …], preempted, finished_before, running, waiting, free_blocks}],
             those that scheduled or preempted something

A request arrives before the schedule of its `arrival_step`; idle steps count. Under async_scheduling step k + 1 is
scheduled before the outputs of step k are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from bstar.errors import SpecError
from bstar.sim.blocks import Key
from bstar.sim.scheduler import Plan, Request, Scheduler
from bstar.sim.settings import SchedulerSettings


def replay_schedule(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every decision of the scheduler on `case`, a row per step that scheduled or preempted something.

    Raises SpecError on a case that cannot be read, and on one with a request that can never finish.
    """
    settings = case_settings(case)
    requests = case_requests(case, settings.block_size)
    ids = {r.rank: raw["id"] for r, raw in zip(requests, case["requests"], strict=True)}
    arrivals = deque(
        sorted(zip((raw["arrival_step"] for raw in case["requests"]), requests, strict=True), key=lambda p: p[0])
    )
    scheduler, steps, finished = Scheduler(settings), list[dict[str, Any]](), list[Request]()
    in_flight: Plan | None = None
    step = 0
    while arrivals or scheduler.running or scheduler.waiting:
        while arrivals and arrivals[0][0] <= step:
            scheduler.add(arrivals.popleft()[1])
        plan = scheduler.schedule()
        if plan.tokens or plan.preempted:
            steps.append({
                "step": step,
                "scheduled": [[ids[r.rank], tokens] for r, tokens in plan.tokens.items()],
                "preempted": sorted(ids[r.rank] for r in plan.preempted),
                "finished_before": sorted(ids[r.rank] for r in finished),
                "running": len(scheduler.running), "waiting": len(scheduler.waiting),
                "free_blocks": len(scheduler.pool.free),
            })  # fmt: skip
        elif in_flight is None and not finished:
            if not arrivals:
                raise SpecError(_stuck(scheduler, ids))
            if not scheduler.running and not scheduler.waiting:
                step = max(step, int(arrivals[0][0]) - 1)
        check_progress(scheduler, plan)
        finished = []
        ended = plan
        if settings.async_scheduling:
            ended, in_flight = in_flight or Plan({}, []), plan if plan.tokens else None
        finished = scheduler.update(ended)
        step += 1
    return steps


def check_progress(scheduler: Scheduler, plan: Plan) -> None:
    """Raises SpecError where a request alone outgrows the whole cache: it would be preempted for ever."""
    if plan.preempted and not scheduler.running and len(scheduler.pool.free) + 1 == scheduler.settings.num_blocks:
        tokens = plan.preempted[-1].num_tokens
        room = (scheduler.settings.num_blocks - 1) * scheduler.settings.block_size
        if tokens >= room:
            raise SpecError(
                f"num_blocks: a request of {tokens} tokens outgrows the whole cache ({room} tokens) and never ends; "
                "give the engine more blocks or a smaller max_model_len"
            )


def _stuck(scheduler: Scheduler, ids: Mapping[int, object]) -> str:
    request = (list(scheduler.running) + list(scheduler.waiting))[0]
    return (
        f"request {ids[request.rank]}: {request.num_tokens} tokens can never be scheduled with "
        f"{scheduler.settings.num_blocks} blocks of {scheduler.settings.block_size}, "
        f"{scheduler.settings.token_budget} tokens a step and max_model_len {scheduler.settings.max_model_len}"
    )


def case_requests(case: Mapping[str, Any], block_size: int) -> list[Request]:
    """The requests of a case, in the order of the file. Raises SpecError on one that cannot be read."""
    out = []
    for rank, raw in enumerate(case["requests"]):
        try:
            prompt, output = int(raw["prompt_tokens"]), int(raw["output_tokens"])
            group, shared = raw.get("prefix") or (0, 0)
            if raw["arrival_step"] < 0 or prompt < 1 or output < 1 or not 0 <= shared <= prompt:
                raise ValueError
            raw["id"]
        except (KeyError, TypeError, ValueError):
            raise SpecError(
                f"requests[{rank}]: needs id, arrival_step ≥ 0, prompt_tokens ≥ 1, output_tokens ≥ 1 and, if there "
                f"is one, prefix [group, tokens ≤ prompt_tokens]; is {raw!r}"
            ) from None
        out.append(Request(
            rank=rank, prompt_tokens=prompt, output_tokens=output, priority=int(raw.get("priority") or 0),
            block_key=block_keys(("own", rank), ("group", group), int(shared), block_size),
        ))  # fmt: skip
    return out


def block_keys(own: object, group: object, shared_tokens: int, block_size: int) -> Callable[[int], Key]:
    """Keys of a request whose first `shared_tokens` tokens are those of `group`; all others are its own."""
    shared_blocks = shared_tokens // block_size

    def key(i: int) -> Key:
        return (group if i < shared_blocks else own, i)

    return key


def case_settings(case: Mapping[str, Any]) -> SchedulerSettings:
    """The engine of a case. Raises SpecError on one that cannot be read."""
    if not isinstance(case, Mapping) or not isinstance(case.get("engine"), Mapping):
        raise SpecError("case: must be an object with `engine` and `requests`")
    if not isinstance(case.get("requests"), list):
        raise SpecError("case: `requests` must be a list")
    return SchedulerSettings.from_case(dict(case["engine"]))
