"""Queues with Poisson arrivals and exponential service: M/M/1 and M/M/c, exact.

Source: L. Kleinrock, Queueing Systems, vol. 1 (1975), chapter 3; A. K. Erlang (1917).
An unstable queue (ρ ≥ 1) waits for ever: means and quantiles are inf, tails 1.
"""

from __future__ import annotations

import math

from bstar.errors import SpecError


def mm1_mean_residence_s(rate_per_s: float, service_s: float) -> float:
    """Mean time in an M/M/1 system, S/(1 − ρ)."""
    rho = _load(rate_per_s, service_s)
    return service_s / (1 - rho) if rho < 1 else math.inf


def mm1_wait_tail(rate_per_s: float, service_s: float, wait_s: float) -> float:
    """P(W > t) = ρ·exp(−(1 − ρ)·t/S) of an M/M/1 queue (FCFS)."""
    return mmc_wait_tail(rate_per_s, service_s, 1, wait_s)


def mm1_wait_quantile_s(rate_per_s: float, service_s: float, probability: float) -> float:
    """The wait that a share `probability` of the customers of an M/M/1 queue stays within."""
    return mmc_wait_quantile_s(rate_per_s, service_s, 1, probability)


def erlang_b(servers: int, offered_load: float) -> float:
    """Share of customers that c servers without a queue turn away, by the stable recursion in c.

    `offered_load` is λ·S in erlangs.
    """
    _check(servers, offered_load)
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered_load * blocked / (count + offered_load * blocked)
    return blocked


def erlang_c(servers: int, offered_load: float) -> float:
    """Share of customers that have to wait in an M/M/c queue; 1 where it is unstable."""
    _check(servers, offered_load)
    rho = offered_load / servers
    if rho >= 1:
        return 1.0
    blocked = erlang_b(servers, offered_load)
    return blocked / (1 - rho * (1 - blocked))


def mmc_mean_wait_s(rate_per_s: float, service_s: float, servers: int) -> float:
    """Mean wait in an M/M/c queue, C(c, a)·S/(c − a)."""
    load = _load(rate_per_s, service_s)
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * service_s / (servers - load)


def mmc_wait_tail(rate_per_s: float, service_s: float, servers: int, wait_s: float) -> float:
    """P(W > t) = C(c, a)·exp(−(c − a)·t/S) of an M/M/c queue (FCFS)."""
    load = _load(rate_per_s, service_s)
    if load >= servers:
        return 1.0
    if service_s == 0:
        return 0.0
    return erlang_c(servers, load) * math.exp(-(servers - load) * wait_s / service_s)


def mmc_wait_quantile_s(rate_per_s: float, service_s: float, servers: int, probability: float) -> float:
    """The wait that a share `probability` of the customers of an M/M/c queue stays within; 0 where most do not wait."""
    if not 0 <= probability < 1:
        raise SpecError(f"probability: must be in [0, 1), is {probability}")
    load = _load(rate_per_s, service_s)
    if load >= servers:
        return math.inf
    waiting = erlang_c(servers, load)
    if waiting <= 1 - probability or service_s == 0:
        return 0.0
    return math.log(waiting / (1 - probability)) * service_s / (servers - load)


def _load(rate_per_s: float, service_s: float) -> float:
    if not rate_per_s >= 0 or not service_s >= 0:
        raise SpecError(f"queue: rate and service time must not be negative, are {rate_per_s} and {service_s}")
    return rate_per_s * service_s


def _check(servers: int, offered_load: float) -> None:
    if servers < 1 or not offered_load >= 0:
        raise SpecError(f"queue: needs at least 1 server and a load of at least 0, has {servers} and {offered_load}")
