"""Little's law, L = λ·W: exact for every stable system, whatever its order of service.

Source: J. D. C. Little, "A proof for the queuing formula L = λW", Operations Research 9 (1961).
"""

from __future__ import annotations

from bstar.errors import SpecError


def concurrency(rate_per_s: float, residence_s: float) -> float:
    """Mean number in the system, λ·W."""
    return rate_per_s * residence_s


def residence_s(in_system: float, rate_per_s: float) -> float:
    """Mean time in the system, L/λ."""
    _positive("rate", rate_per_s)
    return in_system / rate_per_s


def rate_of(in_system: float, residence_s: float) -> float:
    """Throughput, L/W."""
    _positive("residence", residence_s)
    return in_system / residence_s


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise SpecError(f"{name}: must be positive, is {value}")
