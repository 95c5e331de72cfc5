"""How engines read the values of their flags: whole numbers with a suffix, lengths that may be automatic."""

from __future__ import annotations

import re

from bstar.errors import SpecError
from bstar.units import GIB, KIB, MIB, TIB

# vLLM (utils/argparse_utils.py, 0.32): lower case is decimal and may be fractional, upper case is binary.
_HUMAN = re.compile(r"^\s*(\d+(?:\.\d+)?)([kKmMgGtT])\s*$")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": KIB, "M": MIB, "G": GIB, "T": TIB}

AUTO_LENGTH = -1


def engine_int(text: str, *, field: str = "value") -> int:
    """A whole number as vLLM's flags take it: "8192", "8k" = 8000, "8K" = 8192, "25.6k" = 25600."""
    value = str(text).strip()
    match = _HUMAN.match(value)
    try:
        if match is None:
            return int(value)
        number, suffix = match.groups()
        if suffix in _BINARY:
            return int(number) * _BINARY[suffix]
        whole, _, fraction = number.partition(".")
        scale = _DECIMAL[suffix]
        return int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)
    except ValueError:
        raise SpecError(f"{field}: {value[:60]!r} is not a whole number; write it like 8192, 8k (8000) or 8K (8192)"
                        ) from None


def max_model_len(text: str, *, field: str = "max_model_len") -> int:
    """A context length; -1 for "auto" or "-1": as long as the memory allows."""
    value = str(text).strip().lower()
    return AUTO_LENGTH if value in ("auto", "-1") else engine_int(text, field=field)


def engine_float(text: str, *, field: str = "value") -> float:
    """A plain decimal number."""
    try:
        value = float(str(text).strip())
    except ValueError:
        raise SpecError(f"{field}: {str(text)[:60]!r} is not a number; write it like 0.9") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise SpecError(f"{field}: {str(text)[:60]!r} is not a finite number")
    return value
