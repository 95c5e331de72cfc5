"""What the requests of a workload experience on one replica: closed forms, evaluated on the request draws.

Open loop at rate λ, D decode tokens a request, T(n) the step of n sequences, c(n) what a prefill adds, φ = λ·c:

    a step with its share of prefill    s(n) = T(n)/(1 − φ)
    steps differ: each holds the prompts that came during the one before:  Var s = λ·s·E[c²]/(1 − φ²)
    number in flight                    π(n) ∝ Π λ·D·s(k)/k          (processor sharing; queueing.sharing)
    most that n in flight can carry     λ(n) = 1/(c(n) + D·T(n)/n)   Little's law at a full batch
    TTFT   = admission (no place free) + what is left of the running step, which is a long one more often than not
             + the own step: its chunks, and the prompts that came in the same step; at least the prefill queue
             (M/G/1, Kingman's factor for bursts)
    TPOT   = T at the crowd that it meets + the prefills of others: those that came during its own, and those that
             come later (a delay busy period: mean D·T·φ/(1 − φ), variance λ·D·T·E[c²]/(1 − φ)³)
    E2E    = TTFT + D·TPOT

Closed loop of C clients: n solves n + in prefill + waiting = C; λ(n) as above.
How far they are from a step-by-step simulation is measured in tests/planning and told in docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.planning.draws import RequestDraws
from bstar.planning.replica import Replica, attention_pairs, mean_prefill_s, prompt_budget
from bstar.queueing.general import kingman_mean_wait_s, mg1_wait_quantile_s
from bstar.queueing.sharing import in_flight_distribution
from bstar.specs.slo import Slo

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcomes:
    """Per lane (first axis) and request draw (second axis); inf in lanes that are not stable.

    tpot_s is nan for requests of one token: they have none and meet any TPOT limit.
    """

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    rate_per_s: Floats
    in_flight: Floats
    step_s: Floats
    queued_fraction: Floats
    prefill_fraction: Floats
    stable: NDArray[np.bool_]

    def meets(self, slo: Slo) -> NDArray[np.bool_]:
        """Which draws meet every limit; shape (lanes, count)."""
        good = np.broadcast_to(self.stable[:, None], self.ttft_s.shape).copy()
        if slo.ttft_s is not None:
            good &= self.ttft_s <= slo.ttft_s
        if slo.tpot_s is not None:
            good &= ~(self.tpot_s > slo.tpot_s)
        if slo.e2e_s is not None:
            good &= self.e2e_s <= slo.e2e_s
        return good

    def attainment(self, slo: Slo) -> Floats:
        """Share of requests that meet every limit jointly; shape (lanes,)."""
        return np.asarray(self.meets(slo).mean(axis=1))


def saturated_rate_per_s(replica: Replica, draws: RequestDraws) -> Floats:
    """λ(n) = 1/(c(n) + D·T(n)/n) for n = 1 … N: the throughput of a replica that is kept at n in flight."""
    decode = draws.mean_decode_tokens
    batch = np.arange(1, replica.largest_batch + 1)
    rate = batch / np.maximum(decode * replica.decode_step_s, 1e-12)
    for _ in range(3):  # c depends a little on the rate: how many prompts share a step
        rate = 1.0 / (mean_prefill_s(replica, draws, rate) + decode * replica.decode_step_s / batch)
    return rate


def open_outcomes(
    replica: Replica, draws: RequestDraws, rate_per_s: Floats, cap: Ints, *, gap_cv_squared: float = 1.0
) -> Outcomes:
    """An open loop: `rate_per_s` (lanes,) requests arrive whatever happens; `cap` (lanes,) places."""
    rate = np.asarray(rate_per_s, dtype=np.float64)
    cost = mean_prefill_s(replica, draws, rate[:, None])
    busy = rate[:, None] * cost
    decode = draws.mean_decode_tokens
    step = _step_with_prefill_s(replica, cost, busy, rate[:, None], decode, _cost_variation(replica, draws))
    crowd = in_flight_distribution(rate * max(decode, 1e-9), step, cap)
    stable = crowd.stable & (np.take_along_axis(busy, cap[:, None] - 1, axis=1)[:, 0] < 1.0)
    mean = np.where(stable, crowd.mean, cap)
    met = _crowd_met(crowd.probability, draws.crowd, cap)
    peaked = (1.0 + gap_cv_squared) / 2.0  # bursts widen the number in flight: Kingman's factor
    met = np.clip(mean[:, None] + (met - mean[:, None]) * np.sqrt(peaked), 0.0, cap[:, None])
    admission = _admission_s(draws, crowd.queued_fraction, rate, cap, step, gap_cv_squared)
    return _experience(replica, draws, rate, mean, met, admission, crowd.queued_fraction, stable, gap_cv_squared)


def _step_with_prefill_s(
    replica: Replica, cost: Floats, busy: Floats, rate: Floats, decode: float, variation: float
) -> Floats:
    """Mean time per token with n in flight, prefills of others included; shape (lanes, N).

    T/(1 − φ), and what comes from beginning right after a long step, the one of the own prefill:
    (own step − mean step)·φ/(1 − φ) spread over D tokens.
    """
    share = np.minimum(busy, 1.0 - 1e-9)
    clustering = share * rate * cost * cost * (1.0 + variation) / (1.0 - share * share)
    late = share / (1.0 - share) * (cost + clustering) / max(decode, 1.0)
    step = replica.decode_step_s / (1.0 - share) + np.minimum(late, 1e6)
    return np.where(busy < 1.0, np.minimum(step, 1e12), 1e12)


def _cost_variation(replica: Replica, draws: RequestDraws) -> float:
    """CV² of the prefill time over requests, linear and attention part."""
    most = min(float(replica.token_budget), replica.token_grid[-1])
    per_token = float(replica.tokens_s(np.array([most]))[0]) / most
    cost = draws.new_tokens * per_token + attention_pairs(draws) * replica.pair_s
    return float(cost.var() / cost.mean() ** 2)


def closed_outcomes(replica: Replica, draws: RequestDraws, clients: Floats, cap: Ints) -> Outcomes:
    """A closed loop: `clients` (lanes,) each send their next request when the last one is done; `cap` places."""
    waiting_for = np.minimum(clients, cap)
    low, high = np.full(clients.shape, 1e-3), waiting_for.astype(np.float64)
    rates = saturated_rate_per_s(replica, draws)
    grid = np.arange(1, replica.largest_batch + 1, dtype=np.float64)
    decode = draws.mean_decode_tokens
    new = float(draws.new_tokens.mean())

    costs = 1.0 / rates - decode * replica.decode_step_s / grid
    others = (waiting_for - 1) / waiting_for  # a client's own prefill stalls nobody but itself

    def cost_at(n: Floats) -> Floats:
        return np.asarray(np.interp(n, grid, np.maximum(costs, 0.0)))

    def rate_at(n: Floats) -> Floats:
        return np.asarray(1.0 / (cost_at(n) * others + decode * replica.step_s(n) / n))

    def in_prefill(n: Floats) -> Floats:
        rate = rate_at(n)
        service = cost_at(n) + replica.step_s(n) * new / prompt_budget(replica, n)
        # Schweitzer's mean value analysis of the prefill queue among that many clients.
        queue = rate * service / np.maximum(1.0 - rate * service * others, 1e-3)
        joining = rate * np.minimum(n, 1.0) * (1.0 + replica.prefill_lag_steps) * replica.step_s(n)
        return np.asarray(queue + joining + rate * replica.request_s)

    for _ in range(50):
        middle = 0.5 * (low + high)
        over = middle + in_prefill(middle) > waiting_for
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    n = 0.5 * (low + high) if decode > 0 else np.zeros_like(low)
    rate = rate_at(n) if decode > 0 else _prefill_only_rate(replica, draws, waiting_for)
    spread = np.sqrt(np.maximum(n * (1.0 - n / waiting_for), 0.0))
    z = draws.crowd_z
    met = np.clip(n[:, None] + z * spread[:, None] - 1.0, 0.0, waiting_for[:, None] - 1.0)
    admission = np.broadcast_to(((clients - waiting_for) / rate)[:, None], met.shape)
    full = np.where(clients > cap, 1.0, 0.0)
    return _experience(replica, draws, rate, n, met, admission, full, np.ones(n.shape, dtype=bool), 1.0, clients)


def _prefill_only_rate(replica: Replica, draws: RequestDraws, clients: Floats) -> Floats:
    """Requests per second of answers of one token: the prompts of all clients share steps."""
    new = float(draws.new_tokens.mean())
    together = np.minimum(clients * new, float(replica.token_budget))
    step = replica.tokens_s(together)
    pairs = float(attention_pairs(draws).mean()) * replica.pair_s
    return 1.0 / (step * new / together + pairs)


def _crowd_met(probability: Floats, rank: Floats, cap: Ints) -> Floats:
    """The number in flight that each draw meets on arrival: the inverse of π's distribution function."""
    cumulative = probability.cumsum(axis=-1)
    met = np.stack([np.searchsorted(lane, rank) for lane in cumulative]).astype(np.float64)
    return np.minimum(met, cap[:, None])


def _admission_s(
    draws: RequestDraws, queued_fraction: Floats, rate: Floats, cap: Ints, step: Floats, gap_cv_squared: float
) -> Floats:
    """Wait for a place: P(W > t) = P(full)·exp(−(μ − λ)·t), Allen–Cunneen's factor for what is not Poisson."""
    decode = draws.mean_decode_tokens
    if decode <= 0:
        return np.zeros((rate.size, draws.crowd.size))
    full_step = np.take_along_axis(step, cap[:, None] - 1, axis=1)[:, 0]
    slack = cap / (decode * full_step) - rate
    variation = (gap_cv_squared + float(draws.decode_tokens.var()) / decode**2) / 2.0
    with np.errstate(divide="ignore", invalid="ignore"):
        depth = np.log(queued_fraction[:, None] / (1.0 - draws.crowd))
        wait = np.maximum(depth, 0.0) / slack[:, None] * variation
    return np.where(slack[:, None] > 0, wait, np.inf)


def _experience(
    replica: Replica, draws: RequestDraws, rate: Floats, mean: Floats, met: Floats, admission: Floats,
    queued_fraction: Floats, stable: NDArray[np.bool_], gap_cv_squared: float, clients: Floats | None = None,
) -> Outcomes:  # fmt: skip
    """TTFT, TPOT and E2E of every draw, given how many are in flight."""
    new, decode = draws.new_tokens, draws.decode_tokens
    at = np.maximum(mean, 1.0)[:, None]
    base = replica.step_s(at)
    arrive = rate[:, None] * base
    skew = replica.imbalance(arrive)
    budget = np.maximum(prompt_budget(replica, at) / skew, 1.0)
    together = np.minimum(new + arrive * float(new.mean()), budget)
    cost = new * replica.marginal_prefill_s(at, together, arrive) + attention_pairs(draws) * replica.pair_s * skew
    held = cost * replica.stalled_fraction
    mean_cost, cost_square = held.mean(axis=1), (held * held).mean(axis=1)
    others = 1.0 if clients is None else np.maximum(1.0 - 1.0 / clients, 0.0)
    prefill_fraction = np.minimum(rate * mean_cost * others, 1.0 - 1e-9)

    phi = prefill_fraction[:, None]
    free = 1.0 - phi
    spread = rate[:, None] * (cost_square + (gap_cv_squared - 1.0) * mean_cost**2)[:, None]
    here = replica.step_s(np.maximum(met, 1.0))
    mean_step = here / free
    # A step is T and the prompts that came during the one before.
    # A finite number of clients cannot pile up: a prompt in prefill is a client that sends nothing.
    echo = 0.0 if clients is not None else 1.0
    extra, extra_variance = phi * mean_step, spread * mean_step / (1.0 - echo * phi * phi)
    running = here + _length_biased_extra_s(here, extra, extra_variance, draws.wait_z)
    lag = replica.prefill_lag_steps
    company = lag * here + _gamma_quantile(
        phi * running + lag * extra, spread * running + lag * extra_variance, draws.company_z
    )
    in_own_step = here + cost + phi * running
    service = cost / replica.pipeline_stages + base * new / budget
    queue = _prefill_wait_s(draws, rate, service, gap_cv_squared, clients)
    # In a closed loop the next request comes when a step ends: nothing is left of that step.
    joining = company if clients is not None else draws.phase * running + company
    wait = np.where(met > 0, np.maximum(joining, queue), queue)
    chunks = np.ceil(new / budget)
    ttft = replica.request_s + admission + wait + chunks * here + cost

    pace = _pace_s(replica, draws, mean, met, prefill_fraction)
    time = decode * pace
    late = np.maximum(in_own_step - mean_step, 0.0)
    stalled = (time + late) * phi / free
    stall = _gamma_quantile(stalled, (time + phi * in_own_step) * spread / free ** (1.0 + 2.0 * echo), draws.stall_z)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(decode > 0, pace + stall / decode, np.nan)
    e2e = ttft + np.where(decode > 0, time + stall, 0.0)
    lost = ~stable[:, None]
    ttft, e2e = np.where(lost, np.inf, ttft), np.where(lost, np.inf, e2e)
    tpot = np.where(lost & ~np.isnan(tpot), np.inf, tpot)
    step = replica.step_s(np.maximum(mean, 1.0)) / free[:, 0]
    return Outcomes(
        ttft_s=ttft, tpot_s=tpot, e2e_s=e2e, rate_per_s=rate, in_flight=mean, step_s=step, stable=stable,
        queued_fraction=queued_fraction, prefill_fraction=prefill_fraction,
    )  # fmt: skip


def _prefill_wait_s(
    draws: RequestDraws, rate: Floats, service: Floats, gap_cv_squared: float, clients: Floats | None
) -> Floats:
    """Wait behind the prompts that came before, by rank."""
    mean = service.mean(axis=1)
    square_cv = service.var(axis=1) / np.maximum(mean, 1e-12) ** 2
    rho = rate * mean
    if clients is not None:
        # Among C clients the queue is at most C − 1 long (Schweitzer's approximation).
        wait = mean * rho / np.maximum(1.0 - rho * (clients - 1) / clients, 1e-3) * (clients - 1) / clients
        wait = np.minimum(wait, (clients - 1) * mean) * (1.0 + square_cv) / 2.0
        rho = np.minimum(rho, 0.999)
    else:
        wait = kingman_mean_wait_s(rate, mean, square_cv, gap_cv_squared)
    return mg1_wait_quantile_s(rho[:, None], wait[:, None], draws.wait)


def _pace_s(
    replica: Replica, draws: RequestDraws, mean: Floats, met: Floats, prefill_fraction: Floats
) -> Floats:
    """Mean step that a request sees while it decodes, prefills apart.

    It starts at the crowd it met plus itself, and the crowd returns to its mean with the relaxation time
    τ = D·s/(1 − n·s'/s); the longer a request lives, the more of that it averages out.
    """
    centre = np.maximum(mean, 1.0)
    step = replica.step_s(centre)
    slope = np.maximum(replica.step_s(centre + 1.0) - replica.step_s(np.maximum(centre - 1.0, 1.0)), 0.0) / np.maximum(
        centre + 1.0 - np.maximum(centre - 1.0, 1.0), 1.0
    )
    elastic = np.clip(mean * slope / step, 0.0, 0.95)
    relaxation = draws.mean_decode_tokens / (1.0 - elastic)
    life = np.maximum(draws.decode_tokens / np.maximum(relaxation[:, None], 1e-9), 1e-6)
    kept = np.sqrt(np.clip(2.0 / life * (1.0 - (1.0 - np.exp(-life)) / life), 0.0, 1.0))
    own = np.minimum(met + 1.0, float(replica.largest_batch))
    seen = centre[:, None] + (own - centre[:, None]) * kept
    return replica.step_s(np.maximum(seen, 1.0))


def _length_biased_extra_s(base: Floats, mean: Floats, variance: Floats, z: Floats) -> Floats:
    """What the prompts add to the step that an arrival falls into: long steps are met more often.

    A step is base + X, X gamma of that mean and variance; weighted by its length, X has the moments
    E[X·(base + X)]/(base + mean) and E[X²·(base + X)]/(base + mean), which a gamma variable is fitted to.
    """
    second = mean * mean + variance
    kappa = variance / np.maximum(mean * mean, 1e-300)
    third = mean**3 * (1.0 + kappa) * (1.0 + 2.0 * kappa)
    length = base + mean
    first_biased = (base * mean + second) / length
    return _gamma_quantile(first_biased, (base * second + third) / length - first_biased**2, z)


def _gamma_quantile(mean: Floats, variance: Floats, z: Floats) -> Floats:
    """Quantile at Φ(z) of a gamma variable of that mean and variance, 0 where the mean is 0.

    Wilson and Hilferty's cube of a normal; below shape 1 its mean is corrected, below 0.1 (fewer than one
    stall in ten requests) the shape is held at 0.1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        shape = np.maximum(mean * mean / variance, 0.1)
        root = 1.0 - 1.0 / (9.0 * shape) + z / (3.0 * np.sqrt(shape))
        found = mean * np.maximum(root, 0.0) ** 3 / np.interp(shape, (0.1, 0.3, 1.0), (0.763, 0.968, 1.0))
    return np.where((mean > 0) & (variance > 0), found, mean)
