"""Service-level objectives, the presets for common products, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bstar.errors import SpecError, UnitError
from bstar.units import parse_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that a request must meet jointly; `attainment_fraction` of the requests must.

    A limit that is None is not asked for.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    attainment_fraction: float = 0.99
    name: str = ""

    def __post_init__(self) -> None:
        for label in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, label)
            if value is not None and not 0 < value < float("inf"):
                raise SpecError(f"slo {label.removesuffix('_s')}: must be positive and finite, is {value}")
        if not 0 < self.attainment_fraction <= 1:
            raise SpecError(f"attainment: must be in (0, 1], is {self.attainment_fraction}")

    @property
    def is_empty(self) -> bool:
        return self.ttft_s is None and self.tpot_s is None and self.e2e_s is None


# Which metric matters depends on the product: interactive work feels TTFT first; a stream has to keep up
# with reading speed (10-15 tokens/s) and no more; an agent waits for the whole answer; a batch job for none.
SLO_PRESETS: dict[str, Slo] = {
    "chat": Slo(name="chat", ttft_s=0.5, tpot_s=0.05),
    "autocomplete": Slo(name="autocomplete", ttft_s=0.15, tpot_s=0.02),
    "streaming": Slo(name="streaming", ttft_s=2.0, tpot_s=1 / 12),
    "agent": Slo(name="agent", e2e_s=10.0),
    "batch": Slo(name="batch"),
}

_PRESET_ALIASES = {
    "interactive": "chat", "interactive-chat": "chat", "completion": "autocomplete", "stream": "streaming",
    "api": "agent", "agent-step": "agent", "offline": "batch", "offline-batch": "batch", "throughput": "batch",
    "none": "batch",
}  # fmt: skip
_EXAMPLE = "ttft=500ms,tpot=50ms,e2e=10s"


def as_slo(slo: Slo | str | None) -> Slo | None:
    """The SLO itself, or that of a text (`parse_slo`). Raises SpecError."""
    return parse_slo(slo) if isinstance(slo, str) else slo


def parse_slo(text: str, *, attainment_fraction: float | None = None) -> Slo:
    """The SLO of "ttft=500ms,tpot=50ms,e2e=10s", of a preset name, or of a preset with changes ("chat,tpot=30ms").

    A number without a unit is refused: 50 could be seconds or milliseconds.
    `attainment_fraction` replaces the default share of requests that must meet every limit.
    Raises SpecError or UnitError naming the part that does not parse.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise SpecError(f"slo: is empty; write it like {_EXAMPLE}, or a preset: {', '.join(SLO_PRESETS)}")
    slo = Slo()
    limits: dict[str, float] = {}
    for position, part in enumerate(parts):
        name, sign, value = part.partition("=")
        key = name.strip().lower().replace("_", "-")
        if not sign:
            preset = SLO_PRESETS.get(_PRESET_ALIASES.get(key, key))
            if preset is None or position > 0:
                raise SpecError(f"slo: {part!r} is no preset ({', '.join(SLO_PRESETS)}); write limits like {_EXAMPLE}")
            slo = preset
            continue
        if key not in ("ttft", "tpot", "e2e"):
            raise SpecError(f"slo: {name.strip()!r} is not a limit; use ttft, tpot and e2e, like {_EXAMPLE}")
        if f"{key}_s" in limits:
            raise SpecError(f"slo: {key} is given twice")
        limits[f"{key}_s"] = _limit(key, value.strip())
    if limits:
        slo = replace(slo, name="" if slo.name == "" else f"{slo.name}, changed", **limits)
    return slo if attainment_fraction is None else replace(slo, attainment_fraction=attainment_fraction)


def _limit(key: str, text: str) -> float:
    if text and text[-1].isdigit():
        raise UnitError(f"slo {key}: {text!r} has no unit; write {text}ms or {text}s")
    return parse_seconds(text, field=f"slo {key}")
