"""Service in batches: what static batching wastes, and how long its batches keep an arrival waiting.

Source: N. T. J. Bailey, "On queueing processes with bulk service" (1954), for the setting; the forms here are
elementary bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from bstar.errors import SpecError


def static_batch_slot_utilisation(outputs_tokens: Sequence[int]) -> float:
    """Share of slot-steps used when these requests run as one static batch: mean output / longest output.

    20 and 500 tokens in one batch: 0.52.
    """
    if not outputs_tokens or min(outputs_tokens) < 1:
        raise SpecError("outputs: a batch needs at least one request of at least 1 token")
    return sum(outputs_tokens) / (len(outputs_tokens) * max(outputs_tokens))


def bulk_service_wait_s(rate_per_s: float, batch_limit: int, batch_s: float) -> tuple[float, float]:
    """Lower and upper bound of the mean wait when up to `batch_limit` requests are served together in `batch_s`.

    Poisson arrivals, service that takes as long however full the batch is. An arrival waits for what is
    left of the running batch: at least busy share · batch_s/2. It waits no longer than it would if each
    request took batch_s/batch_limit alone and had to wait for one whole batch besides (M/D/1 + batch_s).
    Both are inf where λ·batch_s ≥ batch_limit.
    """
    if batch_limit < 1 or not rate_per_s >= 0 or not batch_s > 0:
        raise SpecError("bulk service: needs a batch of at least 1, a rate of at least 0 and a positive service time")
    rho = rate_per_s * batch_s / batch_limit
    if rho >= 1:
        return float("inf"), float("inf")
    # A batch is never fuller than what arrived: the server is busy at least the share ρ of the time.
    lower = rho * batch_s / 2
    queue = rho * (batch_s / batch_limit) / (2 * (1 - rho))
    return lower, queue + batch_s
