"""Hypothesis for all tests: the same examples every time, no deadlines; HYPOTHESIS_PROFILE=explore draws new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# These machines are shared and noisy: how long an example takes says nothing about the code.
settings.register_profile("repeat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
