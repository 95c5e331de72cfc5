"""Closed forms of queueing theory: fast bounds for the planner, and theory that tests the simulator.

Rates are per second, times in seconds, ρ is utilisation. Every function says when it is exact.
"""

from bstar.queueing.batches import bulk_service_wait_s, static_batch_slot_utilisation
from bstar.queueing.general import (
    fifo_waits_s,
    kingman_mean_wait_s,
    md1_mean_wait_s,
    mg1_mean_wait_s,
    mg1_wait_quantile_s,
    mg1_wait_tail,
    residual_mean_s,
)
from bstar.queueing.little import concurrency, rate_of, residence_s
from bstar.queueing.markov import (
    erlang_b,
    erlang_c,
    mm1_mean_residence_s,
    mm1_wait_quantile_s,
    mm1_wait_tail,
    mmc_mean_wait_s,
    mmc_wait_quantile_s,
    mmc_wait_tail,
)
from bstar.queueing.sharing import InFlight, in_flight_distribution, ps_mean_residence_s

__all__ = [
    "InFlight",
    "bulk_service_wait_s",
    "concurrency",
    "erlang_b",
    "erlang_c",
    "fifo_waits_s",
    "in_flight_distribution",
    "kingman_mean_wait_s",
    "md1_mean_wait_s",
    "mg1_mean_wait_s",
    "mg1_wait_quantile_s",
    "mg1_wait_tail",
    "mm1_mean_residence_s",
    "mm1_wait_quantile_s",
    "mm1_wait_tail",
    "mmc_mean_wait_s",
    "mmc_wait_quantile_s",
    "mmc_wait_tail",
    "ps_mean_residence_s",
    "rate_of",
    "residence_s",
    "residual_mean_s",
    "static_batch_slot_utilisation",
]
