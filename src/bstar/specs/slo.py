"""Service-level objectives and the presets for common products."""

from __future__ import annotations

from dataclasses import dataclass

from bstar.errors import SpecError


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
            if value is not None and not value > 0:
                raise SpecError(f"slo {label.removesuffix('_s')}: must be positive, is {value}")
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
