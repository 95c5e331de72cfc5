"""Loads that no machine holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bstar.errors import SpecError
from bstar.traffic import closed_loop, poisson


@pytest.mark.parametrize("make", [
    lambda: closed_loop(10**9, 8, 8), lambda: closed_loop(2, 8, 8, 10**20), lambda: poisson(5.0, 8, 8, 2 * 10**9),
    lambda: poisson(5.0, 8, 8, duration_s=1e12),
])  # fmt: skip
def test_more_requests_than_memory_holds_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(SpecError, match="do not fit in memory"):
        make()
