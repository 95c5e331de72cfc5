"""Policies by name, as `simulate(policy=)` and `--policy` take them.

    sglang, sglang-mixed                       SGLang: prompts first, or prompts with decodes riding along
    trtllm-no-evict, trtllm-max-utilization    TensorRT-LLM's in-flight batching
    swap                                       vLLM's scheduler; preempted requests go to host memory and come back
    speculative                                vLLM's scheduler; drafts are verified k at a time (draft_model=NAME: what
                                               drafting takes on the same devices)
    lock-step                                  one of vLLM's schedulers per rank of data-parallel attention

vLLM's own scheduler and its knobs are `continuous`, static batching is `static` (`bstar.sim.run`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from bstar.catalog.engines import engine_scheduling
from bstar.codec.build import build_deployment
from bstar.errors import SpecError
from bstar.latency.step_model import step_model
from bstar.physics.batch import BatchShape
from bstar.physics.kv_cache import kv_bytes_per_token
from bstar.sim.deployed import DeployedEngine, StepFigures, step_figures
from bstar.sim.policies.fast import KernelOptions, can_run_fast, run_fast
from bstar.sim.policies.lockstep import LockStepScheduler, lock_step_figures
from bstar.sim.policies.options import options_from, split_policy
from bstar.sim.policies.sglang import SglangOptions, SglangScheduler
from bstar.sim.policies.speculative import DraftSeconds, SpeculationOptions, SpeculativeScheduler
from bstar.sim.policies.swap import SwapOptions, SwapScheduler
from bstar.sim.policies.trtllm import TrtllmOptions, TrtllmScheduler, check_prompts
from bstar.sim.scheduler import Scheduler
from bstar.sim.settings import SchedulerSettings
from bstar.sim.stepwise import EngineRun, Figures, Progress, ReferenceEngine
from bstar.traffic.load import Traffic

Options = dict[str, str]
PolicyRun = Callable[[DeployedEngine, Traffic, float, Progress | None], EngineRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStepOptions:
    """ranks of data-parallel attention; 0: the deployment's."""

    ranks: int = 0


@dataclass(frozen=True, slots=True)
class _Built:
    settings: SchedulerSettings
    make: Callable[[], tuple[Scheduler, Figures | None]]  # the readable scheduler; its blocks are many
    fast: KernelOptions | None = None  # the compiled kernel knows it
    alone: PolicyRun | None = None  # it has a compiled form of its own, for any load


def policy_names() -> tuple[str, ...]:
    """Names that `run_of` knows."""
    return tuple(_BUILDERS)


def engine_policy(engine: str) -> str:
    """The policy that schedules as `engine` does; "continuous" is vLLM's own."""
    return engine_scheduling(engine)


def run_of(text: str, implementation: str = "auto") -> PolicyRun:
    """A function that runs a load under policy NAME[:key=value,…].

    implementation   "reference" (readable, step by step), "kernel" (compiled), "auto": the kernel where it can;
                     an option of each policy too: engine=reference
    Raises SpecError for a name or an option that is not known (an option's value is read when the run starts).
    """
    name, given = split_policy(text)
    engine_choice = given.pop("engine", implementation)
    if engine_choice not in ("auto", "reference", "kernel"):
        raise SpecError(f"policy: engine must be auto, reference or kernel, is {engine_choice!r}")
    if name not in _BUILDERS:
        raise SpecError(f"policy: {name!r} is not known; use one of {', '.join(_BUILDERS)}")

    def run(deployed: DeployedEngine, load: Traffic, until_s: float, progress: Progress | None) -> EngineRun:
        built = _BUILDERS[name](deployed, given)
        if isinstance(built.fast, TrtllmOptions):
            check_prompts(built.settings, load)
        fast = built.fast
        if fast is not None and engine_choice != "reference" and can_run_fast(built.settings, load):
            return run_fast(deployed, fast, load, until_s, progress)
        if built.alone is not None and engine_choice != "reference":
            return built.alone(deployed, load, until_s, progress)
        if engine_choice == "kernel":
            raise SpecError(f"policy: {name} has no compiled version for this load; use engine=reference")
        scheduler, figures = built.make()
        engine = ReferenceEngine(built.settings, load, figures or _figures_of(deployed), scheduler=scheduler)
        return engine.run(until_s=until_s, progress=progress)

    return run


def _figures_of(deployed: DeployedEngine) -> Figures:
    def figures(shape: BatchShape) -> StepFigures:
        return step_figures(deployed.model, shape)

    return figures


def _sglang(deployed: DeployedEngine, given: Options, *, mixed: bool = False) -> _Built:
    options = options_from(SglangOptions, given, policy="sglang", **_sglang_flags(deployed, mixed=mixed))
    return _Built(deployed.settings, lambda: (SglangScheduler(deployed.settings, options), None), fast=options)


def _sglang_flags(deployed: DeployedEngine, *, mixed: bool) -> dict[str, object]:
    """The options that the deployment's own flags say."""
    engine = deployed.deployment.engine
    if engine.name != "sglang":
        return {"mixed_chunk": mixed}
    flags: dict[str, object] = {
        "mixed_chunk": mixed or engine.enable_mixed_chunk, "recv_interval": engine.scheduler_recv_interval,
        "conservativeness": engine.schedule_conservativeness,
    }  # fmt: skip
    return flags if engine.max_prefill_tokens is None else flags | {"max_prefill_tokens": engine.max_prefill_tokens}


def _trtllm_flags(deployed: DeployedEngine) -> dict[str, object]:
    engine = deployed.deployment.engine
    return {"wait_iters": engine.batch_wait_timeout_iters, "wait_ratio": engine.batch_wait_max_tokens_ratio}


def _sglang_mixed(deployed: DeployedEngine, given: Options) -> _Built:
    return _sglang(deployed, given, mixed=True)


def _no_evict(deployed: DeployedEngine, given: Options) -> _Built:
    options = options_from(TrtllmOptions, given, policy="trtllm-no-evict", **_trtllm_flags(deployed))
    return _Built(deployed.settings, lambda: (TrtllmScheduler(deployed.settings, options), None), fast=options)


def _max_utilization(deployed: DeployedEngine, given: Options) -> _Built:
    options = options_from(TrtllmOptions, given, policy="trtllm-max-utilization", capacity="max-utilization",
                           **_trtllm_flags(deployed))
    return _Built(deployed.settings, lambda: (TrtllmScheduler(deployed.settings, options), None), fast=options)


def _swap(deployed: DeployedEngine, given: Options) -> _Built:
    deployment = deployed.deployment
    per_token = kv_bytes_per_token(deployment.model, deployment.kv_format, deployment.parallel)
    known = {"block_bytes": per_token * deployed.settings.block_size}
    link = deployment.device.pcie
    if link is not None:
        known |= {"link_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s}
    options = options_from(SwapOptions, given, policy="swap", **known)
    fast = options if options.host_blocks is None else None
    return _Built(deployed.settings, lambda: (SwapScheduler(deployed.settings, options), None), fast=fast)


def _speculative(deployed: DeployedEngine, given: Options) -> _Built:
    others = {key: value for key, value in given.items() if key != "draft_model"}
    options = options_from(SpeculationOptions, others, policy="speculative")
    settings = replace(deployed.settings, async_scheduling=False)
    draft = _draft_seconds(deployed, given["draft_model"]) if "draft_model" in given else None
    return _Built(settings, lambda: (SpeculativeScheduler(settings, options, draft), None))


def _draft_seconds(deployed: DeployedEngine, name: str) -> DraftSeconds:
    """Decode steps of a draft model on the same devices, without what the engine does once a step."""
    d = deployed.deployment
    engine = f"{d.engine.name}@{d.engine.version}"
    small = step_model(build_deployment(name, d.device, tp=d.parallel.tp, engine=engine))

    def seconds(sequences: int, context: float) -> float:
        whole = step_figures(small, BatchShape.decode(sequences, context)).seconds
        return max(whole - small.per_step_s - sequences * small.per_sequence_s, 0.0)

    return seconds


def _lock_step(deployed: DeployedEngine, given: Options) -> _Built:
    ranks = options_from(LockStepOptions, given, policy="lock-step").ranks or deployed.deployment.parallel.attention_dp
    if ranks != deployed.deployment.parallel.attention_dp:
        raise SpecError(f"policy: lock-step:ranks={ranks} is not the deployment's attention_dp; set --attention-dp")
    one = deployed.settings
    together = replace(one, num_blocks=one.num_blocks * ranks)

    def make() -> tuple[Scheduler, Figures | None]:
        scheduler = LockStepScheduler(one, ranks)
        return scheduler, lock_step_figures(deployed.model, scheduler)

    return _Built(together, make, alone=_compiled_lock_step)


def _compiled_lock_step(
    deployed: DeployedEngine, load: Traffic, until_s: float, progress: Progress | None
) -> EngineRun:
    from bstar.sim.policies.lockstep_fast import run_lock_step

    return run_lock_step(deployed, load, until_s, progress)


_BUILDERS: Final[dict[str, Callable[[DeployedEngine, Options], _Built]]] = {
    "sglang": _sglang, "sglang-mixed": _sglang_mixed, "trtllm-no-evict": _no_evict,
    "trtllm-max-utilization": _max_utilization, "swap": _swap, "speculative": _speculative, "lock-step": _lock_step,
}  # fmt: skip
