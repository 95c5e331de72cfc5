"""Length distributions: how they are written, their quantiles, their moments, their draws.

One way to look at every kind: `quantile(dist, p)` maps probabilities to token counts. Sampling, moments
of clipped curves and the quadrature points of the planner are all quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bstar.errors import SpecError, UnitError
from bstar.specs.workload import LengthDistribution, LengthKind
from bstar.units import parse_count

FORMS = (
    "512, uniform:100-900, uniform:mean=512,ratio=0.2, normal:mean=512,cv=0.3, lognormal:mean=512,cv=1.2, "
    "exponential:mean=512, zipf:alpha=1.2,max=8192, values:128,512"
)
# Draws are made in pieces of this many, so that ten million lengths need no temporary arrays of their size.
CHUNK = 1 << 18
_LONGEST_ZIPF = 10_000_000
_MOMENT_POINTS = 4096
_LONGEST_TOKENS = 100_000_000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def parse_lengths(text: str, *, field: str = "lengths") -> LengthDistribution:
    """The distribution of "512", "uniform:100-900", "normal:mean=512,cv=0.3" (or std=150),
    "lognormal:mean=512,cv=1.2", "exponential:mean=512", "zipf:alpha=1.2,max=8192", "values:128,512,2048".

    The range ratios of the bench clients: "uniform:mean=512,ratio=0.2" is 409 … 615 (`vllm bench serve
    --random-range-ratio 0.2`), "uniform:max=512,ratio=0.8" is 409 … 512 (SGLang's bench_serving, 0.8).

    normal, lognormal and exponential take `min=` and `max=`: draws are clipped to them, and the stated
    mean and cv describe the curve before clipping; the result's `mean` and `cv` are those after it.
    Raises SpecError or UnitError that names `field`.
    """
    text = str(text).strip()
    if text.lower() == "trace":
        raise SpecError(f"{field}: lengths of a trace come from its file; give it with --trace FILE")
    kind, sign, rest = text.partition(":")
    if not sign:
        return fixed(_tokens(text, field))
    parser = _PARSERS.get(kind.strip().lower())
    if parser is None:
        raise SpecError(f"{field}: {kind!r} is not a distribution; write one of {FORMS}")
    return parser(rest.strip(), field)


def fixed(tokens: int) -> LengthDistribution:
    """Every request has the same length."""
    return LengthDistribution(kind="fixed", mean=float(tokens), low=tokens, high=tokens)


def uniform(low: int, high: int) -> LengthDistribution:
    """Whole numbers low … high, both included, equally likely."""
    if not 0 < low <= high:
        raise SpecError(f"length: uniform needs 1 ≤ low ≤ high, has {low}-{high}")
    mean = (low + high) / 2
    variance = ((high - low + 1) ** 2 - 1) / 12
    return LengthDistribution(kind="uniform", mean=mean, cv=math.sqrt(variance) / mean, low=low, high=high)


def around(mean: int, ratio: float) -> LengthDistribution:
    """Whole numbers ⌊mean·(1 - ratio)⌋ … ⌈mean·(1 + ratio)⌉: a range ratio as vLLM 0.32 defines it.

    Source: `get_sampling_params` in vllm/benchmarks/datasets/utils.py.
    """
    if not 0 <= ratio < 1:
        raise SpecError(f"length: a range ratio about a mean is in [0, 1), is {ratio}")
    return uniform(max(math.floor(mean * (1 - ratio)), 1), max(math.ceil(mean * (1 + ratio)), 1))


def up_to(longest_tokens: int, ratio: float) -> LengthDistribution:
    """Whole numbers ⌊longest·ratio⌋ … longest: a range ratio as SGLang's bench_serving and older vLLM define it."""
    if not 0 <= ratio <= 1:
        raise SpecError(f"length: a range ratio up to a maximum is in [0, 1], is {ratio}")
    return uniform(max(math.floor(longest_tokens * ratio), 1), longest_tokens)


def zipf(alpha: float, high: int, *, low: int = 1) -> LengthDistribution:
    """Whole numbers low … high with P(low + r - 1) ∝ 1/r^alpha for the rank r = 1, 2, …"""
    if not 0 <= alpha < math.inf:
        raise SpecError(f"length: zipf needs an alpha of at least 0, is {alpha}")
    if not 1 <= low <= high or high - low >= _LONGEST_ZIPF:
        raise SpecError(f"length: zipf needs 1 ≤ min ≤ max and at most {_LONGEST_ZIPF:,} lengths, has {low} to {high}")
    values = np.arange(low, high + 1, dtype=np.float64)
    steps = np.diff(_zipf_edges(alpha, high - low + 1), prepend=0.0)
    mean = float(values @ steps)
    return LengthDistribution(
        kind="zipf", mean=mean, cv=math.sqrt(max(float((values - mean) ** 2 @ steps), 0.0)) / mean, low=low, high=high,
        spread=alpha,
    )  # fmt: skip


@lru_cache(maxsize=4)
def _zipf_edges(alpha: float, count: int) -> Floats:
    """P(rank ≤ r) for r = 1 … count."""
    edges = np.cumsum(np.arange(1.0, count + 1.0) ** -alpha)
    edges /= edges[-1]
    return edges


def empirical(values: Sequence[int] | Ints) -> LengthDistribution:
    """The given lengths, equally likely (a trace's marginal)."""
    array = np.sort(np.asarray(values, dtype=np.int64))
    if array.size == 0 or array[0] < 1:
        raise SpecError("length: an empirical distribution needs values of at least 1")
    mean = float(array.mean())
    return LengthDistribution(
        kind="empirical", mean=mean, cv=float(array.std()) / mean, low=int(array[0]), high=int(array[-1]),
        values=tuple(array.tolist()),
    )  # fmt: skip


def curve(kind: LengthKind, mean: float, cv: float, *, low: int = 0, high: int = 0) -> LengthDistribution:
    """A normal, lognormal or exponential of that mean and cv, drawn as whole numbers clipped to [max(low, 1), high]."""
    if not mean > 0 or not cv >= 0:
        raise SpecError(f"length: {kind} needs a positive mean and a cv of at least 0, has mean {mean}, cv {cv}")
    if kind == "lognormal":
        spread = math.sqrt(math.log1p(cv * cv))
        location = math.log(mean) - spread * spread / 2
    else:
        location, spread = mean, mean * cv
    raw = LengthDistribution(kind=kind, mean=mean, cv=cv, low=low, high=high, location=location, spread=spread)
    if low <= 1 and not high and (kind != "normal" or cv <= 0.3):
        return raw  # nothing of weight is clipped: keep the stated moments exactly
    draws = quantile(raw, (np.arange(_MOMENT_POINTS) + 0.5) / _MOMENT_POINTS)
    drawn_mean = float(draws.mean())
    return LengthDistribution(
        kind=kind, mean=drawn_mean, cv=float(draws.std()) / drawn_mean, low=low, high=high,
        location=location, spread=spread,
    )  # fmt: skip


def quantile(dist: LengthDistribution, probability: Floats | float) -> Floats:
    """Whole token counts at the given probabilities in [0, 1]; same shape as `probability`."""
    p = np.asarray(probability, dtype=np.float64)
    if dist.kind == "fixed":
        return np.full(p.shape, dist.mean)
    if dist.kind == "uniform":
        span = dist.high - dist.low + 1
        return np.minimum(np.floor(dist.low + p * span), dist.high)
    if dist.kind == "zipf":
        edges = _zipf_edges(dist.spread, dist.high - dist.low + 1)
        ranks = np.minimum(np.searchsorted(edges, p, side="right"), edges.size - 1)
        return np.asarray(dist.low + ranks, dtype=np.float64)
    if dist.kind == "empirical":
        values = np.asarray(dist.values, dtype=np.float64)
        return values[np.minimum((p * values.size).astype(np.int64), values.size - 1)]
    inside = np.clip(p, 1e-9, 1 - 1e-9)
    if dist.kind == "exponential":
        raw = -dist.location * np.log1p(-inside)
    else:
        z = normal_quantile(inside)
        raw = dist.location + dist.spread * z
        if dist.kind == "lognormal":
            raw = np.exp(raw)
    return np.clip(np.round(raw), max(dist.low, 1), dist.high or _LONGEST_TOKENS)


def longest(dist: LengthDistribution, *, probability: float = 0.999) -> float:
    """The longest length to make room for: the maximum where there is one, else the given quantile."""
    if dist.high:
        return float(dist.high)
    return float(quantile(dist, probability))


def sample(dist: LengthDistribution, count: int, rng: np.random.Generator) -> Ints:
    """`count` independent lengths drawn with `rng`; shape (count,), tokens.

    The first k of a longer draw are those of a shorter one.
    """
    if dist.kind == "fixed":
        return np.full(count, round(dist.mean), dtype=np.int64)
    draw = _drawer(dist)
    lengths = np.empty(count, dtype=np.int64)
    for start in range(0, count, CHUNK):
        part = slice(start, min(start + CHUNK, count))
        lengths[part] = draw(part.stop - part.start, rng)
    return lengths


def _drawer(dist: LengthDistribution) -> Callable[[int, np.random.Generator], Floats | Ints]:
    """How lengths of that kind are drawn fastest."""
    if dist.kind == "uniform":
        return lambda n, rng: rng.integers(dist.low, dist.high, n, endpoint=True)
    if dist.kind == "empirical":
        values = np.asarray(dist.values, dtype=np.int64)
        return lambda n, rng: values[rng.integers(0, values.size, n)]
    if dist.kind in ("normal", "lognormal"):
        return lambda n, rng: from_normal(dist, rng.standard_normal(n))
    return lambda n, rng: quantile(dist, rng.random(n))


_normal_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])


def normal_quantile(probability: Floats) -> Floats:
    """z with Φ(z) = probability, elementwise, for probabilities inside (0, 1)."""
    p = np.asarray(probability, dtype=np.float64)
    return np.asarray(_normal_quantile(p), dtype=np.float64) if p.size else p.copy()


def from_normal(dist: LengthDistribution, z: Floats) -> Floats:
    """The lengths at the probabilities Φ(z), of standard normal draws `z`, which may be overwritten."""
    if dist.kind not in ("normal", "lognormal"):
        return quantile(dist, normal_probability(z))
    z *= dist.spread
    z += dist.location
    if dist.kind == "lognormal":
        np.minimum(z, 700.0, out=z)  # e^700 is still a number; it is clipped below
        np.exp(z, out=z)
    np.rint(z, out=z)
    return np.clip(z, max(dist.low, 1), dist.high or _LONGEST_TOKENS, out=z)


def normal_probability(z: Floats) -> Floats:
    """Φ(z), elementwise."""
    from scipy.special import ndtr

    return np.asarray(ndtr(z), dtype=np.float64)


def _tokens(text: str, field: str) -> int:
    try:
        value = parse_count(text, field=field)
    except UnitError as error:
        raise UnitError(f"{field}: {text!r} is not a length; write one of {FORMS}") from error
    if not 1 <= value <= _LONGEST_TOKENS:
        raise SpecError(f"{field}: a length is between 1 and {_LONGEST_TOKENS:,} tokens, is {text}")
    return value


def _number(text: str, field: str) -> float:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        return float(_tokens(text, field))
    if not math.isfinite(value):
        raise UnitError(f"{field}: {text!r} is not a finite number")
    return value


def _parse_uniform(text: str, field: str) -> LengthDistribution:
    if "ratio" in text:
        return _parse_ratio(text, field)
    if "=" in text:
        given = _settings(text, field, ("min", "max"))
        if len(given) < 2:
            raise SpecError(f"{field}: uniform needs both ends; write uniform:100-900")
        return uniform(round(given["min"]), round(given["max"]))
    low, sign, high = text.replace("..", "-").partition("-")
    if not sign:
        raise SpecError(f"{field}: uniform needs both ends; write uniform:100-900")
    ends = _tokens(low.strip(), field), _tokens(high.strip(), field)
    if ends[0] > ends[1]:
        raise SpecError(f"{field}: uniform:{text} runs backwards; write uniform:{high}-{low}")
    return uniform(*ends)


def _parse_ratio(text: str, field: str) -> LengthDistribution:
    given = _settings(text, field, ("mean", "max", "ratio"))
    if "ratio" not in given or ("mean" in given) == ("max" in given):
        raise SpecError(f"{field}: a range ratio is written uniform:mean=512,ratio=0.2 or uniform:max=512,ratio=0.8")
    centre = given.get("mean", given.get("max", 0.0))
    if not 1 <= centre <= _LONGEST_TOKENS or not centre.is_integer():
        raise SpecError(f"{field}: a length is a whole number between 1 and {_LONGEST_TOKENS:,}, is {centre:g}")
    make = around if "mean" in given else up_to
    return make(round(centre), given["ratio"])


def _parse_zipf(text: str, field: str) -> LengthDistribution:
    given = _settings(text, field, ("alpha", "min", "max"))
    if "alpha" not in given or "max" not in given:
        raise SpecError(f"{field}: zipf needs alpha and max; write zipf:alpha=1.2,max=8192")
    low, high = given.get("min", 1.0), given["max"]
    if not (low.is_integer() and high.is_integer()) or abs(low) > _LONGEST_TOKENS or abs(high) > _LONGEST_TOKENS:
        raise SpecError(f"{field}: min and max are whole numbers of at most {_LONGEST_TOKENS:,}")
    return zipf(given["alpha"], round(high), low=round(low))


def _parse_curve(kind: LengthKind) -> Callable[[str, str], LengthDistribution]:
    def parse(text: str, field: str) -> LengthDistribution:
        keys = ("mean", "min", "max") if kind == "exponential" else ("mean", "cv", "std", "min", "max")
        given = _settings(text, field, keys)
        if "mean" not in given:
            example = f"{kind}:mean=512" + ("" if kind == "exponential" else ",cv=0.5")
            raise SpecError(f"{field}: {kind} needs a mean; write {example}")
        mean = given["mean"]
        if not 1 <= mean <= _LONGEST_TOKENS:
            raise SpecError(f"{field}: a mean length is between 1 and {_LONGEST_TOKENS:,} tokens, is {mean:g}")
        if kind == "exponential":
            cv = 1.0
        elif ("cv" in given) == ("std" in given):
            raise SpecError(f"{field}: {kind} needs either cv or std; write {kind}:mean={mean:g},cv=0.5")
        else:
            cv = given["cv"] if "cv" in given else given["std"] / mean
        if not 0 <= cv <= 100:
            raise SpecError(f"{field}: cv must be in [0, 100], is {cv:g}")
        low, high = round(given.get("min", 0)), round(given.get("max", 0))
        if low < 0 or ("max" in given and high < max(low, 1)):
            raise SpecError(f"{field}: needs 0 ≤ min ≤ max, has min {low}, max {high}")
        return fixed(round(mean)) if cv == 0 else curve(kind, mean, cv, low=low, high=high)

    return parse


def _parse_values(text: str, field: str) -> LengthDistribution:
    return empirical([_tokens(part.strip(), field) for part in text.split(",")])


def _settings(text: str, field: str, allowed: Sequence[str]) -> dict[str, float]:
    """{"mean": 512.0, …} of "mean=512,cv=1.2"."""
    given: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        key = name.strip().lower()
        if not sign or key not in allowed:
            known = ", ".join(f"{k}=…" for k in allowed)
            raise SpecError(f"{field}: {part.strip()!r} is not understood here; use {known}")
        if key in given:
            raise SpecError(f"{field}: {key} is given twice")
        given[key] = _number(value.strip(), field)
    return given


_PARSERS: dict[str, Callable[[str, str], LengthDistribution]] = {
    "fixed": lambda text, field: fixed(_tokens(text, field)),
    "constant": lambda text, field: fixed(_tokens(text, field)),
    "uniform": _parse_uniform,
    "normal": _parse_curve("normal"),
    "lognormal": _parse_curve("lognormal"),
    "exponential": _parse_curve("exponential"),
    "zipf": _parse_zipf,
    "values": _parse_values,
}
