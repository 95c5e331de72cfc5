"""Whether a layout can be an answer at all, with the reason and its numbers where it cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bstar.errors import BstarError
from bstar.physics.memory import MemoryBudget, memory_budget
from bstar.planning.draws import RequestDraws
from bstar.planning.outcomes import open_outcomes, saturated_rate_per_s
from bstar.planning.replica import Replica
from bstar.planning.space import SCREENING_SEQS, EngineChoice, Layout, build, token_budgets
from bstar.specs.deployment import Deployment
from bstar.specs.device import DeviceSpec
from bstar.specs.model import ModelSpec
from bstar.specs.slo import Slo
from bstar.units import format_seconds


class NoAnswerError(Exception):
    """A layout is rejected: `kind` groups reasons, the message is one line.

    token_budget   max_num_batched_tokens that the planner chose when it came to that
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.token_budget: int | None = None


def fitting_deployment(
    model: ModelSpec, device: DeviceSpec, layout: Layout, choice: EngineChoice, *, kv_cache_dtype: str,
    max_model_len: int,
) -> tuple[Deployment, MemoryBudget]:
    """A deployment of the layout that the engine would start, with its memory.

    Where the default token budget leaves no room, smaller ones are tried: activations follow it. Raises
    NoAnswerError with the engine's reason for the default.
    """
    seqs = choice.max_num_seqs or min(SCREENING_SEQS, choice.max_num_batched_tokens or SCREENING_SEQS)
    first: NoAnswerError | None = None
    try:
        probe = build(model, device, layout, choice, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len,
                      max_num_seqs=seqs, max_num_batched_tokens=choice.max_num_batched_tokens)  # fmt: skip
    except BstarError as error:
        raise NoAnswerError("layout", str(error)) from None
    for tokens in token_budgets(probe.engine.max_num_batched_tokens, choice.max_num_batched_tokens):
        for places in ((seqs,) if choice.max_num_seqs else (seqs, 64, 8)):
            try:
                engine = replace(probe.engine, max_num_seqs=min(places, tokens), max_num_batched_tokens=tokens)
                deployment = replace(probe, engine=engine)
                budget = memory_budget(deployment)
            except BstarError as error:
                raise NoAnswerError("layout", str(error)) from None
            if budget.fits:
                return deployment, budget
            first = first or NoAnswerError(_kind(budget), budget.reason or "does not fit")
            if "max_num_seqs" not in (budget.reason or ""):
                break
        if first is not None and (first.kind == "layout" or budget.weight_bytes >= budget.usable_bytes):
            break  # smaller steps cannot help
    assert first is not None
    raise first


def _kind(budget: MemoryBudget) -> str:
    reason = budget.reason or ""
    return "layout" if reason.startswith(("tp", "pp", "ep", "dcp")) else "memory"


def room_sequences(deployment: Deployment, context: float, *, shared_tokens: float = 0.0) -> float:
    """Sequences of `context` tokens that the engine's block pool holds, over all data-parallel ranks.

    The engine's own count (blocks, windows, states, padding) for a max_model_len of that context.
    shared_tokens   of them are a prefix that all sequences share: it is stored once a rank
    """
    shared = min(shared_tokens, context - 1.0) if deployment.engine.enable_prefix_caching else 0.0
    own = context - shared
    engine = replace(deployment.engine, max_model_len=max(int(np.ceil(own)), 1))
    budget = memory_budget(replace(deployment, engine=engine))
    return max(budget.max_concurrency - shared / own, 0.0) * max(budget.pools, 1)


def check_floors(
    deployment: Deployment, replica: Replica, draws: RequestDraws, slo: Slo, context: float, budgets: NDArray[np.int64]
) -> None:
    """Raise NoAnswerError where the SLO is out of reach of this layout even for a request that is alone.

    budgets   values of max_num_batched_tokens to try; the reason is that of the one which comes closest
    """
    floor, alone = float(replica.floor_step_s[0]), float(replica.decode_step_s[0])
    at = f"for one sequence at {context:,.0f} tokens"
    if slo.tpot_s is not None and draws.mean_decode_tokens > 0:
        limit = format_seconds(slo.tpot_s)
        if slo.tpot_s < floor:
            raise NoAnswerError("slo", f"TPOT SLO {limit} is below the floor of {format_seconds(floor)} {at}")
        if slo.tpot_s < alone:
            raise NoAnswerError("slo", f"TPOT SLO {limit} is below the {format_seconds(alone)} expected {at}")
    if slo.is_empty:
        return
    few = replace(replica, decode_step_s=replica.decode_step_s[:4], floor_step_s=replica.floor_step_s[:4],
                  token_budget=budgets[:, None])  # fmt: skip
    rate = saturated_rate_per_s(few, draws)[:, 0] * 1e-4
    found = open_outcomes(few, draws, rate, np.full(budgets.size, few.largest_batch))
    attained = found.attainment(slo)
    if float(attained.max()) >= slo.attainment_fraction:
        return
    best = int(np.argmax(attained + 1e-6 * (budgets == deployment.engine.max_num_batched_tokens)))
    share = slo.attainment_fraction
    for name, limit_s, values in (("TTFT", slo.ttft_s, found.ttft_s), ("E2E", slo.e2e_s, found.e2e_s),
                                  ("TPOT", slo.tpot_s, found.tpot_s)):
        if limit_s is None:
            continue
        known = values[best][~np.isnan(values[best])]
        needed = float(np.quantile(known, share, method="higher")) if known.size else 0.0
        if needed > limit_s:
            longest = float(np.quantile(draws.new_tokens, share, method="higher"))
            what = (f"prefill of a prompt of {longest:,.0f} tokens" if name == "TTFT"
                    else f"a request within the first {share:.0%}")
            reason = f"{name} SLO {format_seconds(limit_s)} is below the {format_seconds(needed)} that {what} takes"
            raise NoAnswerError("slo", f"{reason} without any load")
    met = float(attained[best])
    raise NoAnswerError("slo", f"only {met:.1%} of the requests meet every limit without any load")


def needed_model_len(model: ModelSpec, longest_tokens: int, p99_tokens: int) -> tuple[int, str | None]:
    """(max_model_len, note): the longest sequence rounded up to 256 tokens, at most what the model takes.

    Raises NoAnswerError where more than 1 % of the requests would be longer than the model's context.
    """
    most = model.max_context_tokens
    if p99_tokens > most:
        reason = f"1 % of the requests reach {p99_tokens:,} tokens of context, {model.name} takes {most:,}"
        raise NoAnswerError("context", f"{reason}; cut the lengths (\"lognormal:…,max={most // 1000 * 1000}\") "
                            "or choose another model")
    rounded = -(-longest_tokens // 256) * 256
    if rounded > most:
        note = None if longest_tokens <= most else f"the longest requests are cut at the model's {most:,} tokens"
        return most, note
    return rounded, None
