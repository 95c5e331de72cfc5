"""Values of constants from the data files: which entry holds for an engine, a version and a GPU generation."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from bstar.errors import SpecError
from bstar.specs.device import Provenance
from bstar.units import US

# Classes whose multipliers accumulate in FP32.
_FLOAT_CLASSES: Final = ("bf16", "fp8", "fp8_block", "weight_only")
# Traffic with inline ECC over traffic without: 1/16 of the memory, and of what moves, is check bits.
_ECC_TRAFFIC: Final = 16.0 / 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantKey:
    """What constants depend on. version: of the engine, () where it is not a dotted number; device: its id."""

    engine: str
    version: tuple[int, ...]
    compute_capability: int | None
    half_rate_accumulation: bool = False
    inline_ecc: bool = False
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value and where it is known from."""

    value: float
    provenance: Provenance
    source: str = ""
    standard_error: float | None = None


@lru_cache(maxsize=8)
def _file(name: str) -> dict[str, Any]:
    found = files("bstar.latency").joinpath(f"data/{name}")
    return tomllib.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}


def generation_name(compute_capability: int | None) -> str:
    """The name that data files give the GPU generation; "not measured" where no kernel was."""
    return str(_generation(compute_capability)["name"])


def _generation(compute_capability: int | None) -> dict[str, Any]:
    data = _file("kernels.toml")
    found: dict[str, Any] = next(
        (g for g in data["generation"] if compute_capability in g["compute_capabilities"]), data["default"])
    return found


def resolved_values(key: ConstantKey, *, without: tuple[str, ...] = ()) -> dict[str, Value]:
    """Every constant's value for `key`. Raises SpecError for an engine that no file knows.

    without   fitted files to leave out: what a fit that writes them starts from
    """
    engines = _file("engines.toml")
    if key.engine not in engines:
        known = ", ".join(sorted(name for name in engines if name != "shared"))
        raise SpecError(f"engine: {key.engine!r} has no overhead profile; use one of {known}")
    out = _kernel_values(key)
    for part in ("shared", key.engine):
        raw = engines[part]
        for name, value in _flat({k: v for k, v in raw.items() if k != "provenance"}):
            out[name] = Value(value=value, provenance=raw["provenance"], source=f"engines.toml [{part}]")
    out.update(_fitted(key, without))
    return out


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """(dotted name, SI value) of a nested table; names in _us become seconds."""
    out: list[tuple[str, float]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            out += _flat(value, f"{prefix}{name}.")
        elif name.endswith("_us"):
            out.append((f"{prefix}{name.removesuffix('_us')}_s", float(value) * US))
        else:
            out.append((f"{prefix}{name}", float(value)))
    return out


def _kernel_values(key: ConstantKey) -> dict[str, Value]:
    """Kernels of the generation, those of the engine where it has its own; [default] for what was not measured.

    A card differs from the one its generation was measured on in two ways. half_rate_accumulation: power, not the
    halved rate, is what holds a full-rate sibling below its peak: the same FLOP/s are a larger share of half the peak,
    up to what any kernel reaches. inline_ecc: a generation that was measured with inline ECC gives a card without it
    the check bits' share of the bandwidth.
    """
    data, found = _file("kernels.toml"), _generation(key.compute_capability)
    default = data["default"]
    of_generation = {k: v for k, v in found.items() if isinstance(v, dict) and k != "engine"}
    own = found.get("engine", {}).get(key.engine, {})
    out: dict[str, Value] = {}
    shared = {k: data[k] for k in ("elementwise", "state", "collective", "host_bus")}
    layers = [
        (shared, "assumed", "kernels.toml"),
        ({k: v for k, v in default.items() if isinstance(v, dict)}, default["provenance"], default["source"]),
        (of_generation, found["provenance"], found["source"]),
        (own, found["provenance"], f"{found['source']} ({key.engine})"),
    ]
    for table, provenance, source in layers:
        for family, entries in table.items():
            if not isinstance(entries, dict):
                continue
            weight = entries.get("provenance", provenance)
            for name, value in _flat({family: {k: v for k, v in entries.items() if k != "provenance"}}):
                out[name] = Value(value=value, provenance=weight, source=source)
    out["smoothing"] = Value(value=data["smoothing"], provenance="assumed", source="kernels.toml")
    largest = float(data["largest_fraction"])
    more_memory = _ECC_TRAFFIC if found.get("inline_ecc", False) and not key.inline_ecc else 1.0
    more_compute = 2.0 if key.half_rate_accumulation else 1.0
    for name, one in out.items():
        family, _, field = name.rpartition(".")
        if family.split(".")[0] not in ("gemm", "attention_decode", "attention_prefill"):
            continue
        floats = not family.startswith("gemm") or family.removeprefix("gemm.") in _FLOAT_CLASSES
        factor = more_memory if field == "memory" else more_compute if field == "compute" and floats else 1.0
        if factor > 1.0:
            out[name] = replace(one, value=min(one.value * factor, largest))
    return out


@lru_cache(maxsize=1)
def _fits() -> tuple[dict[str, Any], ...]:
    """The entries of every data/fitted*.toml, files in the order of their names, each with its file."""
    folder = files("bstar.latency").joinpath("data")
    names = sorted(f.name for f in folder.iterdir() if f.name.startswith("fitted") and f.name.endswith(".toml"))
    return tuple({"source": name} | raw for name in names for raw in _file(name).get("value", []))


def _fitted(key: ConstantKey, without: tuple[str, ...] = ()) -> dict[str, Value]:
    """Entries of data/fitted*.toml that hold for `key`; of one name, the one with most conditions.

    [[value]] name, value, standard_error, rows; conditions: engine, since and until (engine versions, from and
    before; they need engine), generation, device (a device's id).
    """
    best: dict[str, tuple[tuple[int, tuple[int, ...]], Value]] = {}
    for raw in _fits():
        if raw["source"] in without or not _holds(raw, key):
            continue
        conditions = [name in raw for name in ("engine", "generation", "device")] + ["since" in raw or "until" in raw]
        rank = sum(conditions), _version(raw.get("since", ""))
        one = Value(value=float(raw["value"]), provenance="fitted", source=raw["source"],
                    standard_error=raw.get("standard_error"))
        if raw["name"] not in best or rank >= best[raw["name"]][0]:
            best[raw["name"]] = (rank, one)
    return {name: one for name, (_, one) in best.items()}


def _holds(raw: Mapping[str, Any], key: ConstantKey) -> bool:
    """Whether every condition of an entry is met."""
    known = {"engine": key.engine, "generation": generation_name(key.compute_capability), "device": key.device}
    if any(raw.get(name, value) != value for name, value in known.items()):
        return False
    since, until = _version(raw.get("since", "")), _version(raw.get("until", ""))
    if since and key.version < since:
        return False
    return not until or (bool(key.version) and key.version < until)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in str(text).split(".")) if text != "" else ()
