"""The requests that a harness sent for a latency point.

    load          requests                                            what the row's means are over
    ────────────  ──────────────────────────────────────────────────  ─────────────────────────────────────
    all_at_once   num_prompts at time 0                               all of them
    closed        C clients; num_prompts in all, from a burst         all of them
                  num_prompts not stated: a long steady run           those after every client's first two
    max_load      num_prompts (3,000) at time 0                       throughput from first to last
    rate          evenly spaced (Poisson where the row says so)       all of them
    trace         Poisson at the row's rate, lengths spread           all of them

Lengths are fixed where the row's means are the figures that somebody would type (128, 1000, 2048), a few tokens more
or less from the tokenizer and the chat template; other means are those of conversations, whose lengths are spread.
"""

from __future__ import annotations

import math
import re
from math import ceil, floor
from typing import TYPE_CHECKING, Final

from bstar.calibration.latency_points import LatencyPoint
from bstar.errors import SpecError
from bstar.specs.workload import LengthDistribution
from bstar.traffic.lengths import parse_lengths

if TYPE_CHECKING:
    from bstar.traffic import PrefixGroups, Traffic

# Requests for each client of a closed loop whose number is not stated, and how many of them count for nothing.
_PER_CLIENT: Final = 10
_WARM_UP_PER_CLIENT: Final = 2
# Prompts of a throughput run that does not say.
_BENCH_PROMPTS: Final = 3000
# ShareGPT as the bench clients sample it: prompts and answers of at least 4 tokens, prompts of at most 1,024; answers
# close to exponential, prompts more skewed. Assumed: the tables give means alone.
_PROMPT_CV: Final = 1.3
_SHORTEST, _LONGEST_PROMPT, _LONGEST_ANSWER = 4, 1024, 2048
# How far a mean may lie from a typed figure: chat templates add up to 16 tokens, decoding and encoding again loses 1 %.
_ADDED_TOKENS: Final = 16.0
_LOST_FRACTION: Final = 0.012


def request_load(point: LatencyPoint, *, clients: int | None = None, share: int = 1, period_s: float = 0.0,
                 seed: int = 0) -> Traffic:  # fmt: skip
    """The requests that one of `share` equal engines sees.

    clients    of a closed loop, of this engine (None: all)
    period_s   about the time of one request in a steady run: clients begin spread over it
    Raises SpecError where the row does not say how long requests are.
    """
    from bstar.traffic import closed_loop, constant, poisson

    if point.input_tokens is None or point.output_tokens is None:
        raise SpecError(f"{point.id}: isl or osl is not stated; a load needs both lengths")
    prompts, answers = lengths_of(point)
    if point.load in ("all_at_once", "max_load"):
        count = point.num_prompts or (_BENCH_PROMPTS if math.isinf(point.load_value) else round(point.load_value))
        mine = max(1, round(count / share))
        limit = point.max_concurrency
        together = mine if limit is None else min(mine, max(1, round(limit / share)))
        return closed_loop(together, prompts, answers, mine, seed=seed)
    if point.load == "closed":
        mine = clients if clients is not None else max(1, round(point.load_value / share))
        if point.num_prompts:
            return closed_loop(mine, prompts, answers, max(mine, round(point.num_prompts / share)), seed=seed)
        return closed_loop(mine, prompts, answers, _PER_CLIENT * mine, seed=seed, start="even", start_s=period_s,
                           warmup_requests=_WARM_UP_PER_CLIENT * mine)  # fmt: skip
    rate = point.load_value / share
    count = max(1, round((point.num_prompts or 1000) / share))
    if point.load == "rate" and "poisson" not in point.load_text.lower():
        return constant(rate, prompts, answers, count, prefix=_prefixes(point), seed=seed)
    return poisson(rate, prompts, answers, count, prefix=_prefixes(point), seed=seed)


def lengths_of(point: LatencyPoint) -> tuple[LengthDistribution, LengthDistribution]:
    """The distributions of prompt and answer lengths."""
    assert point.input_tokens is not None and point.output_tokens is not None
    if point.load == "trace" or (point.load != "rate" and not is_typed(point.input_tokens)):
        most_in, most_out = max(_LONGEST_PROMPT, 4 * ceil(point.input_tokens)), max(
            _LONGEST_ANSWER, 4 * ceil(point.output_tokens))
        return (
            parse_lengths(f"lognormal:mean={point.input_tokens},cv={_PROMPT_CV},min={_SHORTEST},max={most_in}"),
            parse_lengths(f"exponential:mean={point.output_tokens},min={_SHORTEST},max={most_out}"),
        )
    return _fixed(point.input_tokens), _fixed(point.output_tokens)


def is_typed(mean: float) -> bool:
    """Whether a mean length is a figure that somebody would ask for, a few tokens more or less.

    Figures: below 100 all; then powers of two, 1.5 times them, one digit and zeros; from 1,000 on all thousands.
    """
    if mean < 100:
        return True
    power = 2.0 ** floor(math.log2(mean))
    figures = [power, 1.5 * power, 2.0 * power]
    if mean < 1000:  # a chat template's tokens are no small part here: only what the tokenizer loses
        figures += [100.0 * digit for digit in range(1, 11)]
        return any(f * (1.0 - _LOST_FRACTION) <= mean <= f * 1.001 for f in figures)
    figures += [1000.0 * floor(mean / 1000.0), 1000.0 * ceil(mean / 1000.0)]
    return any(f * (1.0 - _LOST_FRACTION) <= mean <= f + _ADDED_TOKENS for f in figures)


def _fixed(mean: float) -> LengthDistribution:
    """A fixed length; a mean that is not whole: both whole numbers beside it."""
    low, high = max(1, floor(mean)), max(1, ceil(mean))
    return parse_lengths(f"{low}" if low == high else f"uniform:{low}-{high}", field="tokens")


def _prefixes(point: LatencyPoint) -> PrefixGroups | None:
    """Shared prompts as inference-perf writes them: "shared_prefix 10 sys prompts x10 users, 128+64 -> 64"."""
    from bstar.traffic import PrefixGroups

    found = re.search(r"shared_prefix (\d+) .*?(\d+)\+(\d+)", point.dataset)
    if found is None:
        return None
    return PrefixGroups(count=int(found[1]), tokens=parse_lengths(found[2]))
