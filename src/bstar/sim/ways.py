"""Ways to serve a load on one engine, by name: what `simulate(policy=)`, `--policy` and `--compare` take.

    engine       what the deployment's engine does itself (the default); vLLM with data-parallel attention: lock-step
    continuous   vLLM's scheduler; knobs as options, "continuous:watermark_fraction=0.05,max_num_active_seqs=128"
    unchunked    the same with whole prompts only
    static       static batching
    sglang, trtllm-no-evict, swap, speculative, …   `bstar.sim.policies.registry`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from bstar.errors import SpecError
from bstar.sim.deployed import DeployedEngine, StepFigures, step_figures
from bstar.sim.policies.options import split_policy
from bstar.sim.policies.registry import engine_policy, policy_names, run_of
from bstar.sim.stepwise import EngineRun, Progress, ReferenceEngine
from bstar.traffic.load import Traffic

Implementation = Literal["auto", "kernel", "reference"]

# Fields of SchedulerSettings that "continuous" takes as options.
_KNOBS: Final = {
    "watermark_fraction": float, "max_num_active_seqs": int, "max_num_scheduled_tokens": int,
    "long_prefill_token_threshold": int, "max_num_seqs": int, "max_num_batched_tokens": int,
}  # fmt: skip
_OWN: Final = ("engine", "continuous", "unchunked", "static")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to serve.

    text      as it was asked for, "engine" resolved
    compiled  whether the kernel can do it
    """

    text: str
    name: str
    options: dict[str, str]
    compiled: bool

    @property
    def covers_ranks(self) -> bool:
        """Whether a run covers all ranks of data-parallel attention."""
        return self.name == "lock-step"

    def run(
        self, deployed: DeployedEngine, load: Traffic, *, until_s: float, progress: Progress | None,
        implementation: Implementation,
    ) -> EngineRun:  # fmt: skip
        """Serve `load` on one engine."""
        if self.name == "static":
            from bstar.sim.static import run_static

            return run_static(deployed, load, until_s=until_s, progress=progress)
        if self.name not in ("continuous", "unchunked"):
            return run_of(self.text, implementation)(deployed, load, until_s, progress)
        changed = _with_knobs(deployed, self.options)
        if self.name == "unchunked":
            changed = _unchunked(changed, load)
        if not self.compiled or implementation == "reference":
            engine = ReferenceEngine(changed.settings, load, figures_of(changed))
            return engine.run(until_s=until_s, progress=progress)
        from bstar.sim.kernel_run import run_kernel

        return run_kernel(changed, load, until_s=until_s, progress=progress)


def ways() -> tuple[str, ...]:
    """Every name that `way_of` knows."""
    return (*_OWN, *policy_names())


def way_of(text: str, engine: str = "vllm", attention_dp: int = 1) -> Way:
    """The way called NAME[:key=value,…]; "engine" is what `engine` does. Raises SpecError where it is not known.

    vLLM's ranks of data-parallel attention step together, so that a prompt on one delays all: lock-step.
    """
    name, options = split_policy(text)
    if name == "engine":
        name = engine_policy(engine)
        if name == "continuous" and attention_dp > 1:
            name = "lock-step"
        text = text.replace("engine", name, 1)
    if name not in ways():
        raise SpecError(f"policy: {name!r} is not known; use one of {', '.join(ways())}")
    if name in ("continuous", "unchunked"):
        _knobs(options)
    elif name in _OWN:
        if options:
            raise SpecError(f"policy: {name} has no options; leave {next(iter(options))!r} out")
    else:
        run_of(text)
    return Way(text=text, name=name, options=options, compiled=name in ("continuous", "unchunked"))


def figures_of(deployed: DeployedEngine) -> Callable[..., StepFigures]:
    """Step figures of a deployment's engine."""
    model = deployed.model
    return lambda shape: step_figures(model, shape)


def _knobs(options: dict[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, text in options.items():
        if key not in _KNOBS:
            raise SpecError(f"policy: continuous has no option {key!r}; it has {', '.join(_KNOBS)}")
        try:
            found[key] = _KNOBS[key](text)
        except ValueError:
            raise SpecError(f"policy: {key} must be a number, is {text!r}") from None
    return found


def _with_knobs(deployed: DeployedEngine, options: dict[str, str]) -> DeployedEngine:
    if not options:
        return deployed
    return replace(deployed, settings=replace(deployed.settings, **_knobs(options)))  # type: ignore[arg-type]


def _unchunked(deployed: DeployedEngine, load: Traffic) -> DeployedEngine:
    """Whole prompts only: the token budget has to hold the longest, as vLLM requires (there: max_model_len)."""
    s = deployed.settings
    longest = min(int((load.input_tokens + load.output_tokens).max()), s.max_model_len)
    budget = max(s.max_num_batched_tokens, longest)
    return replace(deployed, settings=replace(s, enable_chunked_prefill=False, max_num_batched_tokens=budget))
