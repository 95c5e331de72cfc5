"""What is fitted: which constants, where they may differ, how far they may move from their prior.

A constant's value for an engine on a GPU generation is its prior there (kernels.toml, engines.toml) moved by the sum s
of the terms that hold: for all, for the engine, for the generation, for both together. Times become prior + s,
fractions of a peak or a bandwidth prior / (1 + s): seconds are linear in s. Each term is pulled to its centre (0, but
where one is given: where the prior is no measurement) by its `width`. A term may hold for an engine before a version
alone ("era").
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bstar.latency.constants import Constants, constant_specs
from bstar.units import US

# Without a unit, but no fraction that divides a peak.
_PLAIN = ("expert_skew", "graph_fraction")
LEVELS = ("all", "engine", "generation", "both", "era")
Cell = tuple[str, str, str]  # engine, GPU generation, era: "" or the version that the engine is older than
# Releases that changed how an engine computes something, and that older rows are there of.
ERAS = {"vllm": "0.14"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A constant `name` that is fitted.

    widths   of its terms, by level
    centers  of terms, by place
    only     engines whose rows can tell it; (): all
    elsewhere   whether the value is believed on GPU generations without points
    """

    name: str
    widths: dict[str, float]
    centers: dict[tuple[str, ...], float] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    elsewhere: bool = False

    @property
    def is_fraction(self) -> bool:
        """Fractions move by factors, all else by what it is measured in."""
        return constant_specs()[self.name].unit == "1" and self.name not in _PLAIN

    def moved(self, prior: float, by: float) -> float:
        """The prior moved by the sum of its terms, within the range of the constant."""
        spec = constant_specs()[self.name]
        value = prior / max(1.0 + by, 0.1) if self.is_fraction else prior + by
        return min(max(value, spec.low), spec.high)

    def lowest(self, prior: float) -> float:
        """The least shift that leaves the constant within its range."""
        spec = constant_specs()[self.name]
        return prior / spec.high - 1.0 if self.is_fraction else spec.low - prior


def _time(
    name: str, centers_us: dict[str, float] | None = None, *, only: tuple[str, ...] = (), elsewhere: bool = False,
    **widths_us: float,
) -> Parameter:  # fmt: skip
    """centers_us: by engine."""
    return Parameter(name=name, widths={level: w * US for level, w in widths_us.items()}, only=only,
                     elsewhere=elsewhere,
                     centers={(engine,): c * US for engine, c in (centers_us or {}).items()})  # fmt: skip


def _factor(name: str, **widths: float) -> Parameter:
    return Parameter(name=name, widths=widths)


# Chosen by what removing or adding each costs on held-out points (see the ablation in the report).
PARAMETERS: tuple[Parameter, ...] = (
    _time("step_s", both=75),
    # TensorRT-LLM's rows here cannot tell its value; its throughput at batches of 1,000 holds it at the prior.
    _time("sequence_s", engine=6, only=("sglang", "vllm")),
    _time("eager_layer_s", engine=200, both=150),
    _time("eager_moe_layer_s", {"vllm": 900, "trtllm": 600, "sglang": 500}, engine=400, both=300, elsewhere=True),
    _time("eager_latent_layer_s", all=300, elsewhere=True),
    _time("request_s", {"vllm": -13_000, "trtllm": -22_000}, engine=5_000, elsewhere=True),
    _time("gemm.fp8.t0_s", both=2.5),
    _time("moe_gemm.fp8_block.t0_s", all=5, engine=3),
    _factor("scale.gemm_memory", all=0.12),
    _factor("elementwise.memory", all=0.12),
    _factor("gemm.fp8.memory", all=0.12),
    _factor("gemm.fp8.compute", both=0.06),
    _factor("moe_gemm.fp8_block.compute", all=0.12),
    _factor("moe_gemm.fp8_block.memory", era=0.5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One number that is fitted: the part of a parameter that holds at `where` of a level."""

    parameter: Parameter
    level: str
    where: tuple[str, ...]

    @property
    def width(self) -> float:
        return self.parameter.widths[self.level]

    @property
    def center(self) -> float:
        return self.parameter.centers.get(self.where, 0.0)

    def holds(self, cell: Cell) -> bool:
        return self.where == place(self.level, cell)


def place(level: str, cell: Cell) -> tuple[str, ...] | None:
    """What terms of a level are told apart by; None: the cell has no such term."""
    engine, generation, era = cell
    if level == "era":
        return (engine, era) if era else None
    return {"all": (), "engine": (engine,), "generation": (generation,), "both": (engine, generation)}[level]


def terms_of(parameters: tuple[Parameter, ...], cells: set[Cell]) -> list[Term]:
    """Every term that some cell has."""
    out: dict[tuple[str, str, tuple[str, ...]], Term] = {}
    for parameter in parameters:
        for level in LEVELS:
            if level in parameter.widths:
                for cell in sorted(cells):
                    where = place(level, cell)
                    if where is not None and (not parameter.only or cell[0] in parameter.only):
                        out[parameter.name, level, where] = Term(parameter=parameter, level=level, where=where)
    return list(out.values())


def moved(base: Constants, parameters: tuple[Parameter, ...], shifts: dict[str, float]) -> Constants:
    """`base` with each parameter moved by its shift."""
    return base.replace({p.name: p.moved(base[p.name], shifts.get(p.name, 0.0)) for p in parameters})
