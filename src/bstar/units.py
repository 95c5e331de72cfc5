"""The only home of 1024 and 1e9: parsing and printing of sizes, times, rates and counts.

Inside bstar every quantity is in one canonical unit (seconds, bytes, FLOPs, tokens, USD) and its name
carries it. GB (1e9) and GiB (2**30) never mix: a size is parsed by its suffix and printed with one.
"""

from __future__ import annotations

import math
import re

from bstar.errors import UnitError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KILO, MEGA, GIGA, TERA, PETA = 1e3, 1e6, 1e9, 1e12, 1e15
MS, US = 1e-3, 1e-6

_SIZE = {
    "": 1, "b": 1, "kb": KB, "mb": MB, "gb": GB, "tb": TB,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_TIME = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": MS, "us": US, "µs": US, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = {"": 1, "k": 1000, "m": 10**6, "g": 10**9, "b": 10**9, "ki": KIB, "mi": MIB}
_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Zµ/]*)\s*$")


def _split(text: str, field: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.match(str(text))
    if match is None:
        raise UnitError(f"{field}: {text!r} is not {what}; write it like {example}")
    value = float(match.group(1).replace("_", ""))
    if not math.isfinite(value):
        raise UnitError(f"{field}: {text!r} is not a finite number; write it like {example}")
    return value, match.group(2).lower()


def parse_bytes(text: str, *, field: str = "size") -> int:
    """Bytes of "80GiB", "16GB", "512" (bytes). Raises UnitError on anything else."""
    value, unit = _split(text, field, "a size", "80GiB or 16GB")
    if unit not in _SIZE:
        raise UnitError(
            f"{field}: unit {unit!r} is not known; use B, KB, MB, GB, TB (1000) or KiB, MiB, GiB, TiB (1024)"
        )
    return round(value * _SIZE[unit])


def parse_seconds(text: str, *, field: str = "time") -> float:
    """Seconds of "500ms", "1s", "2min", "1.5" (seconds). Raises UnitError on anything else."""
    value, unit = _split(text, field, "a time", "500ms or 1s")
    if unit not in _TIME:
        raise UnitError(f"{field}: unit {unit!r} is not known; use us, ms, s, min, h or d")
    if value < 0:
        raise UnitError(f"{field}: {text!r} is negative; a time is at least 0")
    return value * _TIME[unit]


def parse_rate(text: str, *, field: str = "rate") -> float:
    """Events per second of "10", "10/s", "600/min". Raises UnitError on anything else."""
    value, unit = _split(text, field, "a rate", "10/s or 600/min")
    unit = unit.removeprefix("rps").removeprefix("req").removeprefix("/") if unit else unit
    if unit not in ("", "s", "min", "m", "h", "d"):
        raise UnitError(f"{field}: unit {unit!r} is not known; use /s, /min, /h or /d")
    if value < 0:
        raise UnitError(f"{field}: {text!r} is negative; a rate is at least 0")
    return value / _TIME[unit or "s"]


def parse_count(text: str, *, field: str = "count") -> int:
    """A whole number, "8192", "8k" (8000), "8Ki" (8192). Raises UnitError on anything else."""
    value, unit = _split(text, field, "a whole number", "8192")
    if unit not in _COUNT:
        raise UnitError(f"{field}: unit {unit!r} is not known; use k, M (1000) or Ki, Mi (1024)")
    scaled = value * _COUNT[unit]
    if scaled != int(scaled):
        raise UnitError(f"{field}: {text!r} is not a whole number")
    return int(scaled)


def format_bytes(value: float, *, binary: bool = True, digits: int = 2) -> str:
    """ "14.96 GiB" (binary) or "16.06 GB"."""
    base = 1024.0 if binary else 1000.0
    names = ("B", "KiB", "MiB", "GiB", "TiB", "PiB") if binary else ("B", "KB", "MB", "GB", "TB", "PB")
    amount, index = float(value), 0
    while abs(amount) >= base and index < len(names) - 1:
        amount, index = amount / base, index + 1
    return f"{amount:.0f} {names[index]}" if index == 0 else f"{amount:.{digits}f} {names[index]}"


def format_seconds(value: float | None, *, digits: int = 3) -> str:
    """ "8.04 ms", "1.2 s", "64.8 µs": `digits` significant digits; "–" where there is none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    for scale, name in ((1.0, "s"), (MS, "ms"), (US, "µs")):
        if abs(value) >= scale:
            return f"{_significant(value / scale, digits)} {name}"
    return "0 s" if value == 0 else f"{_significant(value / 1e-9, digits)} ns"


def format_count(value: float | None, *, digits: int = 3) -> str:
    """ "1,024", "8.03 B", "671 B": plain below a million, then M, B, T."""
    if value is None:
        return "–"
    for scale, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{_significant(value / scale, digits)} {name}"
    return f"{value:,.0f}" if float(value).is_integer() else _significant(value, digits)


def format_rate(value: float, unit: str, *, digits: int = 3) -> str:
    """ "3.35 TB/s", "989 TFLOP/s": `unit` without its prefix, scaled by 1000s."""
    for scale, name in ((PETA, "P"), (TERA, "T"), (GIGA, "G"), (MEGA, "M"), (KILO, "k")):
        if abs(value) >= scale:
            return f"{_significant(value / scale, digits)} {name}{unit}"
    return f"{_significant(value, digits)} {unit}"


def format_usd(value: float | None) -> str:
    """ "$2.49" or "–"."""
    return "–" if value is None else (f"${value:,.2f}" if value >= 0.1 else f"${value:.4f}")


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
