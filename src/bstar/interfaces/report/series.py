"""What a chart is drawn from: one frozen series per model, device and context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from bstar.errors import SpecError

# The order in which landmarks are drawn and named, and how a chart writes them.
LANDMARK_LABELS: Mapping[str, str] = MappingProxyType(
    {"b_star": "B*", "b_gemm": "B_gemm", "b_compute": "B_c", "b_mem": "B_mem", "b_slo": "B_slo", "b_tok": "B_tok"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSeries:
    """The batch curve and the roofline of one deployment at one context; everything is per GPU of a replica.

    label            short text that tells this series from the others ("70B · 4 × H100 · 8,192 tokens")
    model, device    names for titles and facets; `device` with its count where there are several ("4 × H100 SXM")
    context_tokens   context that every decoded sequence holds
    batch            decode sequences per step, ascending, at least two
    step_floor_s     the bandwidth and compute floor of one step, per batch
    step_expected_s  the expected time of one step, per batch
    landmarks        b_star, b_gemm, b_compute, b_mem, b_slo, b_tok: a batch, or None where it does not exist
    step_flops, step_bytes  work of one step on one GPU, per batch: the operating points of the roofline
                     (empty: no roofline)
    peak_flops_per_s, bandwidth_bytes_per_s  the roof: dense peak of the dtype the GEMMs compute in
    compute_dtype    that dtype ("bf16")
    recommended      recommended max_num_seqs, or None
    tpot_slo_s       the TPOT limit to draw, or None
    note             what else a reader must know ("fp8 weights, vLLM 0.32")
    """

    label: str
    model: str
    device: str
    context_tokens: int
    batch: tuple[float, ...]
    step_floor_s: tuple[float, ...]
    step_expected_s: tuple[float, ...]
    landmarks: Mapping[str, float | None]
    step_flops: tuple[float, ...] = ()
    step_bytes: tuple[float, ...] = ()
    peak_flops_per_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    compute_dtype: str = ""
    recommended: int | None = None
    tpot_slo_s: float | None = None
    note: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "landmarks", MappingProxyType(dict(self.landmarks)))
        count = len(self.batch)
        if count < 2 or any(b <= a for a, b in zip(self.batch, self.batch[1:], strict=False)) or self.batch[0] <= 0:
            raise SpecError(f"curve {self.label!r}: batch needs at least two positive values in ascending order")
        for name in ("step_floor_s", "step_expected_s", "step_flops", "step_bytes"):
            values: tuple[float, ...] = getattr(self, name)
            optional = name in ("step_flops", "step_bytes") and not values
            if not optional and (len(values) != count or any(not v > 0 for v in values)):
                raise SpecError(f"curve {self.label!r}: {name} needs {count} positive values, one for each batch")
        unknown = set(self.landmarks) - set(LANDMARK_LABELS)
        if unknown:
            raise SpecError(f"curve {self.label!r}: landmarks {sorted(unknown)} are not known")

    @property
    def ridge_point(self) -> float | None:
        """FLOP per byte at which the two roofs meet."""
        if self.peak_flops_per_s is None or self.bandwidth_bytes_per_s is None:
            return None
        return self.peak_flops_per_s / self.bandwidth_bytes_per_s

    @property
    def has_roofline(self) -> bool:
        return bool(self.step_flops and self.step_bytes) and self.ridge_point is not None

    def amortized_s(self, step_s: tuple[float, ...]) -> tuple[float, ...]:
        """Amortized time per output token, step time over batch: one over output throughput, not a user's TPOT."""
        return tuple(s / b for s, b in zip(step_s, self.batch, strict=True))

    def landmark(self, name: str) -> float | None:
        return self.landmarks.get(name)
