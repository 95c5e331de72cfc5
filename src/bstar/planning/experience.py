"""TTFT, TPOT and E2E of each request draw, given the rate and how many are in flight (see `planning.outcomes`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bstar.planning.arrivals import Stream
from bstar.planning.draws import RequestDraws
from bstar.planning.replica import Replica, full_chunk_s, prompt_budget
from bstar.queueing.general import mg1_wait_quantile_s
from bstar.specs.slo import Slo

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcomes:
    """Per lane (first axis) and request draw (second axis); inf in lanes that are not stable.

    tpot_s is nan for requests of one token: they have none and meet any TPOT limit.
    decoding   mean number of sequences that decode; `in_flight` also counts those that queue or prefill
    """

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    rate_per_s: Floats
    decoding: Floats
    step_s: Floats
    queued_fraction: Floats
    prefill_fraction: Floats
    stable: NDArray[np.bool_]

    @property
    def in_flight(self) -> Floats:
        """Mean number of requests in the system, λ · mean E2E (Little's law): queueing, in prefill or decoding."""
        return np.asarray(self.rate_per_s * self.e2e_s.mean(axis=1))

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prefill:
    """Prefill of each draw (lanes, count) at the mean crowd of a lane, and what all of them do to a step.

    cost        seconds that the draw's own prefill adds to the steps it rides in; in `chunks` of them
    service     seconds that it keeps the prefill queue
    phi         share of a step's time that prefills of others take; `free` the rest
    stall_spread, step_spread   λ·E[c²] of whole prompts, which fall into a request, and of chunks, one a step
    full_chunk  seconds of a chunk that fills the token budget: no step carries more prefill
    """

    cost: Floats
    chunks: Floats
    service: Floats
    phi: Floats
    stall_spread: Floats
    step_spread: Floats
    full_chunk: Floats

    @property
    def free(self) -> Floats:
        return 1.0 - self.phi


def experience(
    replica: Replica, draws: RequestDraws, rate: Floats, mean: Floats, met: Floats, admission: Floats,
    queued_fraction: Floats, stable: NDArray[np.bool_], stream: Stream, cap: Floats | NDArray[np.int64],
    clients: Floats | None = None,
) -> Outcomes:  # fmt: skip
    """TTFT, TPOT and E2E of every draw.

    rate, mean   requests per second and mean number decoding, a lane
    met          how many each draw finds decoding; `admission` seconds it waits for a place, of `cap`
    clients      of a closed loop (None: an open one): nobody waits behind more than the others
    """
    prefill = _prefill(replica, draws, rate, mean, stream, clients)
    here = replica.step_s(np.maximum(met, 1.0))
    wait, own_step = _until_scheduled(replica, draws, prefill, rate, here, met, stream, clients)
    ttft = replica.request_s + admission + wait + prefill.chunks * here + prefill.cost
    pace = _pace_s(replica, draws, mean, met, np.asarray(cap, dtype=np.float64))
    stall = _stall_s(draws, prefill, pace, own_step - here / prefill.free, own_step, finite=clients is not None)
    decode = draws.decode_tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(decode > 0, pace + stall / decode, np.nan)
    lasting = np.where(decode > 0, decode * pace + stall, 0.0)
    e2e = ttft + lasting
    stable = stable & np.isfinite(ttft).all(axis=1)  # the prefill queue too must empty
    lost = ~stable[:, None]
    # Little's law once more: what decodes is what arrives times how long it decodes.
    decoding = np.where(stable, np.minimum(rate * lasting.mean(axis=1), cap), cap)
    return Outcomes(
        ttft_s=np.where(lost, np.inf, ttft), tpot_s=np.where(lost & ~np.isnan(tpot), np.inf, tpot),
        e2e_s=np.where(lost, np.inf, e2e), rate_per_s=rate, decoding=decoding, stable=stable,
        step_s=replica.step_s(np.maximum(mean, 1.0)) / prefill.free[:, 0], queued_fraction=queued_fraction,
        prefill_fraction=prefill.phi[:, 0],
    )  # fmt: skip


def _prefill(
    replica: Replica, draws: RequestDraws, rate: Floats, mean: Floats, stream: Stream, clients: Floats | None
) -> _Prefill:
    new, mean_new = draws.new_tokens, draws.mean_new_tokens
    at = np.maximum(mean, 1.0)[:, None]
    base = replica.step_s(at)
    arrive = rate[:, None] * base
    skew = replica.imbalance(arrive)
    budget = np.maximum(prompt_budget(replica, at) / skew, 1.0)
    pairs = draws.pairs * replica.pair_s * skew
    together = np.minimum(new + arrive * mean_new, budget)
    cost = new * replica.marginal_prefill_s(at, together, arrive) + pairs
    chunks = np.ceil(new / budget)
    held = cost * replica.stalled_fraction
    mean_cost = held.mean(axis=1, keepdims=True)
    # Counts of prompts vary more than Poisson's in a burst: over a step, and over the time that a request decodes.
    stays = base[:, 0] * max(draws.mean_decode_tokens, 1.0)
    burst = (stream.dispersion(stays, rate) - 1.0) * mean_cost**2
    step_burst = (stream.dispersion(base[:, 0], rate) - 1.0) * mean_cost**2
    others = 1.0 if clients is None else np.maximum(1.0 - 1.0 / clients, 0.0)[:, None]
    # Where nothing decodes a step is there for its prompts alone, and those that came in one step share it.
    alone = np.exp(-mean)[:, None]
    sharing = np.clip(1.0 + rate[:, None] * (base + mean_cost), 1.0, np.maximum(budget / mean_new, 1.0))
    return _Prefill(
        cost=cost, chunks=chunks,
        service=cost / replica.pipeline_stages + base * np.maximum(new / budget, alone / sharing),
        phi=np.minimum(rate[:, None] * mean_cost * others, 1.0 - 1e-9),
        stall_spread=rate[:, None] * np.maximum((held * held).mean(axis=1, keepdims=True) + burst, 0.0),
        step_spread=rate[:, None] * np.maximum((held * held / chunks).mean(axis=1, keepdims=True) + step_burst, 0.0),
        full_chunk=full_chunk_s(replica, draws, at, arrive),
    )  # fmt: skip


def _until_scheduled(
    replica: Replica, draws: RequestDraws, prefill: _Prefill, rate: Floats, here: Floats, met: Floats,
    stream: Stream, clients: Floats | None,
) -> tuple[Floats, Floats]:  # fmt: skip
    """(wait until the step with the first chunk begins, length of the own step); admission apart."""
    phi, spread = prefill.phi, prefill.step_spread
    # A step is T and the prompts that came during the one before.
    # A finite number of clients cannot pile up: a prompt in prefill is a client that sends nothing.
    echo = 1.0 if clients is None else 0.0
    extra = phi * here / prefill.free
    extra_variance = spread * (here + extra) / (1.0 - echo * phi * phi)
    running = here + _length_biased_extra_s(here, extra, extra_variance, draws.wait_z)
    lag = replica.prefill_lag_steps
    company = lag * here + _gamma_quantile(
        phi * running + lag * extra, spread * running + lag * extra_variance, draws.company_z
    )
    queue = (stream.prefill_wait_s(draws, rate, prefill.service) if clients is None
             else _closed_wait_s(draws, rate, prefill.service, clients))
    # In a closed loop the next request comes when a step ends: nothing is left of that step.
    joining = company if clients is not None else draws.phase * running + company
    return np.where(met > 0, np.maximum(joining, queue), queue), here + prefill.cost + phi * running


def _stall_s(
    draws: RequestDraws, prefill: _Prefill, pace: Floats, late: Floats, own_step: Floats, *, finite: bool
) -> Floats:
    """Prefills of others that fall into a request's decoding: those that came during its own and those to come.

    A delay busy period; at most a full chunk in each of its steps, which bounds mean and variance too: of all
    variables in [0, most] with mean m none varies more than m·(most − m).
    """
    decode, phi, free = draws.decode_tokens, prefill.phi, prefill.free
    time = decode * pace
    mean = (time + np.maximum(late, 0.0)) * phi / free
    variance = (time + phi * own_step) * prefill.stall_spread / (free if finite else free**3)
    most = decode * prefill.full_chunk
    mean = np.minimum(mean, most)
    variance = np.minimum(variance, mean * (most - mean))
    return np.minimum(_gamma_quantile(mean, variance, draws.stall_z), most)


def _closed_wait_s(draws: RequestDraws, rate: Floats, service: Floats, clients: Floats) -> Floats:
    """Wait behind the prompts of others in a closed loop, by rank.

    Among C clients the queue is at most C − 1 long (Schweitzer's approximation).
    """
    mean = service.mean(axis=1)
    square_cv = service.var(axis=1) / np.maximum(mean, 1e-12) ** 2
    rho, others = rate * mean, np.maximum(clients - 1.0, 0.0)
    busy = rho * others / clients
    wait = mean * busy / np.maximum(1.0 - busy, 1e-9) * (1.0 + square_cv) / 2.0
    wait = np.minimum(wait, others * mean)
    return mg1_wait_quantile_s(np.minimum(rho, 0.999)[:, None], wait[:, None], draws.wait)


def _pace_s(replica: Replica, draws: RequestDraws, mean: Floats, met: Floats, cap: Floats) -> Floats:
    """Mean step that a request sees while it decodes, prefills apart.

    It starts at the crowd it met plus itself, and the crowd returns to its mean with the relaxation time
    τ = D·s/(1 − n·s'/s); the longer a request lives, the more of that it averages out.
    """
    centre = np.maximum(mean, 1.0)
    step = replica.step_s(centre)
    above, below = np.minimum(centre + 1.0, np.maximum(cap, 1.0)), np.maximum(centre - 1.0, 1.0)
    slope = np.maximum(replica.step_s(above) - replica.step_s(below), 0.0) / np.maximum(above - below, 1.0)
    elastic = np.clip(mean * slope / step, 0.0, 0.95)
    relaxation = draws.mean_decode_tokens / (1.0 - elastic)
    life = np.maximum(draws.decode_tokens / np.maximum(relaxation[:, None], 1e-9), 1e-6)
    kept = np.sqrt(np.clip(2.0 / life * (1.0 - (1.0 - np.exp(-life)) / life), 0.0, 1.0))
    own = np.minimum(met + 1.0, cap[:, None])
    seen = centre[:, None] + (own - centre[:, None]) * kept
    return replica.step_s(np.maximum(seen, 1.0))


def _length_biased_extra_s(base: Floats, mean: Floats, variance: Floats, z: Floats) -> Floats:
    """What the prompts add to the step that an arrival falls into: long steps are met more often.

    A step is base + X, X gamma of that mean and variance; weighted by its length, X has the moments
    E[X·(base + X)]/(base + mean) and E[X²·(base + X)]/(base + mean), which a gamma variable is fitted to.
    """
    second = mean * mean + variance
    kappa = variance / np.maximum(mean * mean, 1e-300)
    third = mean * mean * mean * (1.0 + kappa) * (1.0 + 2.0 * kappa)
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
        root = np.maximum(1.0 - 1.0 / (9.0 * shape) + z / (3.0 * np.sqrt(shape)), 0.0)
        # The mean of the cube: 0.763 at shape 0.1, 0.968 at 0.3, 1 from 1 on, linear between.
        correction = 0.6605 + 1.025 * np.minimum(shape, 0.3) + 0.032 / 0.7 * (np.clip(shape, 0.3, 1.0) - 0.3)
        found = mean * (root * root * root) / correction
    return np.where((mean > 0) & (variance > 0), found, mean)
