"""SGLang's and TensorRT-LLM's policies and swapping by the compiled kernel: without prefix caching and sessions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError
from bstar.sim.deployed import DeployedEngine
from bstar.sim.kernel.cost import StepCost
from bstar.sim.kernel.policies import advance_policy
from bstar.sim.kernel.policy_state import (
    AT_FAULT,
    CHUNKED,
    EXPECTED,
    FINISHED,
    FREE,
    GAPS,
    MAX_UTILIZATION,
    NEXT,
    NO_EVICT,
    NOW,
    NUM_COUNTS,
    RATIO,
    ROWS,
    SGLANG,
    SWAPPING,
    PolicyState,
    Requests,
    Rules,
)
from bstar.sim.kernel.state import ENDED, ENDLESS, FULL, PAUSED, RUN_SPANS, STUCK
from bstar.sim.kernel_run import run_sliced, step_log
from bstar.sim.policies.sglang import SglangOptions
from bstar.sim.policies.swap import SwapOptions
from bstar.sim.policies.trtllm import TrtllmOptions
from bstar.sim.settings import SchedulerSettings
from bstar.sim.slices import loaded
from bstar.sim.step_cost import step_cost
from bstar.sim.stepwise import EngineRun, Progress
from bstar.traffic.load import Traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
KernelOptions = SglangOptions | TrtllmOptions | SwapOptions


def can_run_fast(settings: SchedulerSettings, traffic: Traffic) -> bool:
    """Whether the kernel takes the decisions of the readable schedulers on this load.

    Where prompts share nothing, a cache of prefixes helps requests that were thrown out alone; the kernel lets
    them compute everything again.
    """
    return settings.policy == "fcfs" and not traffic.has_sessions and not traffic.has_prefixes


@dataclass(slots=True)
class PolicyKernel:
    """A run of the kernel that can be stopped and gone on with."""

    rules: Rules
    requests: Requests
    state: PolicyState
    cost: StepCost
    rows: Floats
    gaps: Floats

    def advance(self, until_s: float = math.inf) -> bool:
        """Go on to `until_s`; True when nothing is left. Raises SpecError for a request that can never be served."""
        while True:
            status = advance_policy(
                self.rules, self.requests, self.state, self.cost, self.rows, self.gaps, until_s)
            if status == FULL:
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
                self.gaps = np.concatenate([self.gaps, np.zeros_like(self.gaps)])
            elif status in (ENDED, PAUSED):
                return status == ENDED
            else:
                raise SpecError(self._fault(status))

    def _fault(self, status: int) -> str:
        r, s = int(self.state.n[AT_FAULT]), self.rules
        if status == ENDLESS:
            return (
                f"num_blocks: a request of {self.state.known[r]} tokens outgrows the whole cache and never ends; "
                "give the engine more blocks or a smaller max_model_len"
            )
        assert status == STUCK
        return (
            f"request {r}: {self.state.known[r]} tokens can never be scheduled with {s.num_blocks} blocks of "
            f"{s.block_size} and {s.budget} tokens a step (max_num_batched_tokens)"
        )

    @property
    def runs(self) -> Floats:
        """The run log so far (columns: `kernel.state.RUN_…`)."""
        return self.rows[: int(self.state.n[ROWS])]

    @property
    def gaps_s(self) -> Floats:
        return self.gaps[: int(self.state.n[GAPS])]

    @property
    def num_finished(self) -> int:
        return int(self.state.n[FINISHED])

    @property
    def now_s(self) -> float:
        return float(self.state.t[NOW])


def policy_kernel(
    settings: SchedulerSettings, options: KernelOptions, traffic: Traffic, cost: StepCost, *,
    keep_runs: bool = True,
) -> PolicyKernel:  # fmt: skip
    """The kernel before its first step."""
    n = traffic.num_requests
    prompt = np.ascontiguousarray(traffic.input_tokens, dtype=np.int64)
    output = np.maximum(np.minimum(traffic.output_tokens, settings.max_model_len - prompt), 1).astype(np.int64)
    requests = Requests(
        arrival_s=np.array(traffic.arrival_s, dtype=np.float64), prompt=prompt, output=output,
        grants=_grants(settings, options, traffic, prompt), think_s=np.ascontiguousarray(traffic.think_s),
    )  # fmt: skip
    rules = _rules(settings, options, clients=traffic.concurrency or 0)
    state = _state(settings, rules, requests, cost, known=int(traffic.num_scheduled))
    spans = 2 * cost.prompt_limit.size + 2 * cost.span_limit.size
    first = max(4 * n, 4096) if keep_runs else 0
    gaps = max(n, 4096, 4 * state.step.size) if keep_runs else 1
    return PolicyKernel(rules, requests, state, cost, np.zeros((first, RUN_SPANS + spans)), np.zeros(gaps))


def run_fast(
    deployed: DeployedEngine, options: KernelOptions, traffic: Traffic, until_s: float,
    progress: Progress | None,
) -> EngineRun:  # fmt: skip
    """Serve `traffic`, to the end, to `until_s` or to an interrupt."""
    settings = deployed.settings
    widest = max(settings.token_budget, settings.max_model_len if _whole_prompts(settings, options) else 0)
    seats = settings.seat_limit
    cost = step_cost(
        deployed.deployment, max_tokens=widest + seats, max_sequences=2 * seats, one_rank=True, model=deployed.model)
    kernel = policy_kernel(settings, options, traffic, cost)
    compile_s = loaded(kernel.advance)
    interrupted = run_sliced(kernel, traffic, until_s, progress)
    s = kernel.state
    begun = ~np.isnan(s.first_s)
    return EngineRun(
        arrival_s=kernel.requests.arrival_s, scheduled_s=s.scheduled_s, first_token_s=s.first_s, finish_s=s.finish_s,
        made_tokens=np.where(begun, s.known - kernel.requests.prompt, 0), preemptions=s.preemptions,
        cached_tokens=np.zeros(traffic.num_requests, dtype=np.int64),
        log=step_log(kernel.runs, kernel.gaps_s, deployed, cost), interrupted=interrupted, implementation="kernel",
        compile_s=compile_s,
    )  # fmt: skip


def _whole_prompts(settings: SchedulerSettings, options: KernelOptions) -> bool:
    return isinstance(options, SglangOptions) and options.chunk(settings) != settings.token_budget


def _grants(
    settings: SchedulerSettings, options: KernelOptions, traffic: Traffic, prompt: Ints
) -> Ints:
    asked = np.ascontiguousarray(traffic.output_tokens, dtype=np.int64)
    if isinstance(options, SwapOptions):
        return asked
    if options.answer_tokens is not None:
        asked = np.maximum(asked, options.answer_tokens)
    if isinstance(options, TrtllmOptions):
        return asked
    longest = min(settings.max_model_len, (settings.num_blocks - 1) * settings.block_size) - 1
    return np.maximum(np.minimum(asked, longest - prompt - 1), 1)


def _rules(settings: SchedulerSettings, options: KernelOptions, *, clients: int) -> Rules:
    sglang = options if isinstance(options, SglangOptions) else SglangOptions()
    trtllm = options if isinstance(options, TrtllmOptions) else TrtllmOptions()
    swap = options if isinstance(options, SwapOptions) else None
    if swap is not None:
        scheme, chunk = SWAPPING, 0
    elif isinstance(options, TrtllmOptions):
        scheme = NO_EVICT if options.capacity == "guaranteed-no-evict" else MAX_UTILIZATION
        chunk = (options.chunk_unit or settings.block_size) if settings.enable_chunked_prefill else 0
    else:
        scheme, chunk = SGLANG, sglang.chunk(settings)
    return Rules(
        scheme=scheme, block_size=settings.block_size, num_blocks=settings.num_blocks, seats=settings.seat_limit,
        budget=settings.token_budget, max_model_len=settings.max_model_len, pipelined=int(settings.async_scheduling),
        chunk=chunk, max_prefill=sglang.max_prefill_tokens, mixed=int(sglang.mixed_chunk),
        recv_interval=sglang.recv_interval, clip=sglang.clip_tokens, retract_steps=sglang.retract_steps,
        first_ratio=sglang.first_ratio, least_ratio=sglang.least_ratio, decay=sglang.decay, clients=clients,
        chunked=int(settings.enable_chunked_prefill), threshold=settings.long_prefill_token_threshold,
        adaptive=int(settings.long_prefill_token_threshold_adaptive), batched_tokens=settings.max_num_batched_tokens,
        reserve=int(settings.scheduler_reserve_full_isl), watermark=settings.watermark_blocks,
        swap=int(swap is not None and swap.host_blocks is None),
        block_s=0.0 if swap is None else swap.block_bytes / swap.link_bytes_per_s,
        latency_s=0.0 if swap is None else swap.latency_s,
        wait_iters=trtllm.wait_iters, wait_tokens=trtllm.wait_ratio * settings.token_budget,
    )  # fmt: skip


def _state(
    settings: SchedulerSettings, rules: Rules, requests: Requests, cost: StepCost, *, known: int
) -> PolicyState:
    n, seats = requests.prompt.size, 2 * settings.seat_limit + 4

    def zeros(size: int = n) -> Ints:
        return np.zeros(size, dtype=np.int64)

    counts, times = zeros(NUM_COUNTS), np.zeros(5)
    counts[FREE], counts[EXPECTED], counts[CHUNKED], counts[NEXT] = settings.num_blocks - 1, known, -1, known
    times[RATIO] = rules.first_ratio
    order = np.arange(n, dtype=np.int64)
    return PolicyState(
        known=requests.prompt.copy(), promised=zeros(), computed=zeros(), target=zeros(), held=zeros(), kept=zeros(),
        gone=zeros(), preemptions=zeros(), scheduled_s=np.full(n, np.nan), first_s=np.full(n, np.nan),
        finish_s=np.full(n, np.nan), last_s=np.full(n, np.nan), queue=zeros(n + 1), order=order, batch=zeros(seats),
        prefilled=zeros(seats), step=zeros(seats), take=zeros(seats), fit=zeros(seats), fit_tokens=zeros(seats),
        victims=zeros(seats), flight=zeros(seats), phases=zeros(settings.block_size), x=np.zeros(cost.linear.size),
        n=counts, t=times,
    )  # fmt: skip
