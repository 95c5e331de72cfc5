"""Hypothesis for all tests: the same examples every time, no deadlines; HYPOTHESIS_PROFILE=explore draws new ones."""

from __future__ import annotations

import os
import signal
import threading

from hypothesis import HealthCheck, settings

# These machines are shared and noisy: how long an example takes says nothing about the code.
settings.register_profile("repeat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

# A suite that a script starts in the background inherits an ignored Ctrl-C: its tests of Ctrl-C would wait for ever.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
