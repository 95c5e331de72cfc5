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

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bstar.planning.arrivals import Stream
from bstar.planning.draws import RequestDraws
from bstar.planning.experience import Outcomes, experience
from bstar.planning.replica import (
    Replica,
    full_chunk_s,
    mean_prefill_s,
    prefill_of_a_request_s,
    prompt_budget,
)
from bstar.queueing.sharing import in_flight_distribution

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_LITTLE_ROUNDS = 40
_LITTLE_TOLERANCE = 0.002
_LITTLE_OFF = 0.05


def saturated_rate_per_s(replica: Replica, draws: RequestDraws) -> Floats:
    """λ(n) = 1/(c(n) + D·T(n)/n) for n = 1 … N: the throughput of a replica that is kept at n in flight.

    At most what prompts get through beside n decodes: one takes c(n), and steps of T(n) until the token budget has let
    all of it in. Shape (N,), or (lanes, N) where the token budget is one a lane.
    """
    decode = draws.mean_decode_tokens
    batch = np.arange(1, replica.largest_batch + 1)
    rate: Floats = batch / np.maximum(decode * replica.decode_step_s, 1e-12)
    cost = mean_prefill_s(replica, draws, rate)
    for _ in range(3):  # c depends a little on the rate: how many prompts share a step
        rate = 1.0 / (cost + decode * replica.decode_step_s / batch)
        cost = mean_prefill_s(replica, draws, rate)
    steps = draws.mean_new_tokens / prompt_budget(replica, batch.astype(np.float64))
    rate = np.minimum(rate, 1.0 / (cost + replica.decode_step_s * steps))
    # Little: a place is taken for all of a request's own prefill and its decoding, whatever overlaps with others.
    own = cost / replica.stalled_fraction + decode * replica.decode_step_s
    return np.minimum(rate, batch / np.maximum(own, 1e-12))


def open_outcomes(
    replica: Replica, draws: RequestDraws, rate_per_s: Floats, cap: Ints, *, stream: Stream | None = None
) -> Outcomes:
    """An open loop: `rate_per_s` (lanes,) requests arrive whatever happens; `cap` (lanes,) places.

    stream   how they come; None: Poisson
    """
    stream = stream or Stream()
    rate = np.asarray(rate_per_s, dtype=np.float64)
    cost = mean_prefill_s(replica, draws, rate[:, None])
    busy = rate[:, None] * cost
    decode = draws.mean_decode_tokens
    step = _step_with_prefill_s(replica, draws, cost, busy, rate[:, None], decode)
    crowd = in_flight_distribution(rate * max(decode, 1e-9), step, cap)
    stable = crowd.stable & (np.take_along_axis(busy, cap[:, None] - 1, axis=1)[:, 0] < 1.0)
    mean = np.where(stable, crowd.mean, cap)
    met = _crowd_met(crowd.probability, draws.crowd, cap)
    # Bursts widen the number in flight, over the time that a request stays.
    stays = mean / np.maximum(rate, 1e-12)
    met = np.clip(mean[:, None] + (met - mean[:, None]) * np.sqrt(stream.peakedness(stays, rate)), 0.0, cap[:, None])
    admission = _admission_s(draws, crowd.queued_fraction, rate, cap, step, stream.dispersion(stays, rate))
    return experience(replica, draws, rate, mean, met, admission, crowd.queued_fraction, stable, stream, cap)


def _step_with_prefill_s(
    replica: Replica, draws: RequestDraws, cost: Floats, busy: Floats, rate: Floats, decode: float
) -> Floats:
    """Mean time per token with n in flight, prefills of others included; shape (lanes, N).

    T/(1 − φ), and what comes from beginning right after a long step, the one of the own prefill:
    (own step − mean step)·φ/(1 − φ) spread over D tokens. No step holds more prompts than the token budget.
    """
    batch = np.arange(1, replica.largest_batch + 1, dtype=np.float64)
    fullest = replica.decode_step_s + full_chunk_s(replica, draws, batch, rate * replica.decode_step_s)
    share = np.minimum(busy, 1.0 - 1e-9)
    clustering = share * rate * cost * cost * (1.0 + _cost_variation(replica, draws)) / (1.0 - share * share)
    late = share / (1.0 - share) * (cost + clustering) / max(decode, 1.0)
    step = replica.decode_step_s / (1.0 - share) + np.minimum(late, 1e6)
    return np.where(busy < 1.0, np.minimum(step, fullest), 1e12)


def _cost_variation(replica: Replica, draws: RequestDraws) -> Floats:
    """CV² of the prefill time over requests, linear and attention part; (1, 1) or (lanes, 1)."""
    most = np.atleast_2d(np.minimum(replica.token_budget, replica.token_grid[-1]))
    cost = draws.new_tokens * (replica.tokens_s(most) / most) + draws.pairs * replica.pair_s
    return np.asarray(cost.var(axis=1, keepdims=True) / cost.mean(axis=1, keepdims=True) ** 2)


def _crowd_met(probability: Floats, rank: Floats, cap: Ints) -> Floats:
    """The number in flight that each draw meets on arrival: the inverse of π's distribution function."""
    cumulative = probability.cumsum(axis=-1)
    met = np.stack([np.searchsorted(lane, rank) for lane in cumulative]).astype(np.float64)
    return np.minimum(met, cap[:, None])


def _admission_s(
    draws: RequestDraws, queued_fraction: Floats, rate: Floats, cap: Ints, step: Floats, dispersion: Floats
) -> Floats:
    """Wait for a place: P(W > t) = P(full)·exp(−(μ − λ)·t), Allen–Cunneen's factor for what is not Poisson."""
    decode = draws.mean_decode_tokens
    if decode <= 0:
        return np.zeros((rate.size, draws.crowd.size))
    full_step = np.take_along_axis(step, cap[:, None] - 1, axis=1)[:, 0]
    slack = cap / (decode * full_step) - rate
    variation = (dispersion + float(draws.decode_tokens.var()) / decode**2) / 2.0
    with np.errstate(divide="ignore", invalid="ignore"):
        depth = np.log(queued_fraction[:, None] / (1.0 - draws.crowd))
        wait = np.maximum(depth, 0.0) / slack[:, None] * variation
    return np.where(slack[:, None] > 0, wait, np.inf)


def closed_outcomes(replica: Replica, draws: RequestDraws, clients: Floats, cap: Ints) -> Outcomes:
    """A closed loop: `clients` (lanes,) each send their next request when the last one is done; `cap` places.

    Found is the number n that decode at which Little's law holds, λ(n) · mean E2E = C; where answers have one
    token the rate itself is.
    """
    places = np.minimum(clients, cap)
    decodes = draws.mean_decode_tokens > 0
    # In logs; at `low` fewer than the places are taken, at `high` more would be.
    # (n may come out a little above the places: the crowd that each draw meets is an estimate too.)
    high = np.log(places) + 0.2 if decodes else np.log(_prefill_only_rate(replica, draws, places)) + 1.0
    low, trial = high - 40.0, high - (0.25 if decodes else 1.5)
    for number in range(_LITTLE_ROUNDS):
        unknown = np.exp(trial)
        decoding = unknown if decodes else np.zeros_like(unknown)
        rate = _rate_of(replica, draws, unknown, places) if decodes else unknown
        found = _closed_at(replica, draws, rate, decoding, clients, places)
        inside = found.in_flight - (clients - places)  # those behind the door
        excess = np.log(np.maximum(inside, 1e-12) / places)
        if np.all(np.abs(excess) < _LITTLE_TOLERANCE):
            break
        low, high = np.where(excess < 0, trial, low), np.where(excess < 0, high, trial)
        step = trial - excess
        bracketed = (step > low) & (step < high) & (number % 3 < 2)
        trial = np.where(bracketed, step, 0.5 * (np.maximum(low, high - 8.0) + high))
    return _with_all_clients(found, clients)


def _with_all_clients(found: Outcomes, clients: Floats) -> Outcomes:
    """Little's law for every lane, also where no number of decoding sequences fulfils it: prompts alone hold it up.

    What is missing from the clients' cycle is wait before the first token; where it holds too much, that wait is less,
    and where the rest alone is too long, the rate.
    """
    lasting = (found.e2e_s - found.ttft_s).mean(axis=1)
    mean, least = found.ttft_s.mean(axis=1), found.ttft_s.min(axis=1)
    wanted = np.maximum(clients / found.rate_per_s - lasting, least)
    cycle = clients / found.rate_per_s
    off = found.stable & (np.abs(cycle - lasting - mean) > _LITTLE_OFF * cycle)
    shrunk = np.where(wanted < mean, (wanted - least) / np.maximum(mean - least, 1e-12), 1.0)[:, None]
    moved = least[:, None] + (found.ttft_s - least[:, None]) * shrunk + np.maximum(wanted - mean, 0.0)[:, None]
    ttft = np.where(off[:, None], moved, found.ttft_s)
    rate = np.where(off, clients / (wanted + lasting), found.rate_per_s)
    return replace(found, ttft_s=ttft, e2e_s=found.e2e_s - found.ttft_s + ttft, rate_per_s=rate)


def _rate_of(replica: Replica, draws: RequestDraws, decoding: Floats, places: Floats) -> Floats:
    """λ(n) = 1/(c·(C − 1)/C + D·T(n)/n): a client's own prefill stalls nobody but itself."""
    busy = np.maximum(decoding, 1.0)
    step = replica.step_s(busy)
    own = draws.mean_decode_tokens * step / decoding
    others = np.maximum(1.0 - 1.0 / places, 0.0)
    rate = 1.0 / own
    for _ in range(3):  # c depends a little on the rate: how many prompts share a step
        prefill = prefill_of_a_request_s(replica, draws, busy[:, None], (rate * step)[:, None])[:, 0]
        rate = 1.0 / (own + others * prefill)
    return np.asarray(rate)


def _prefill_only_rate(replica: Replica, draws: RequestDraws, places: Floats) -> Floats:
    """Requests per second where the prompts of all places share steps and nothing decodes."""
    budget = np.atleast_2d(replica.token_budget)[:, 0] * float(replica.attention_dp)
    together = np.minimum(places * draws.mean_new_tokens, budget)
    step = replica.tokens_s(together)
    return np.asarray(1.0 / (step * draws.mean_new_tokens / together + draws.mean_pairs * replica.pair_s))


def _closed_at(
    replica: Replica, draws: RequestDraws, rate: Floats, decoding: Floats, clients: Floats, places: Floats
) -> Outcomes:
    """The outcomes of a closed loop if that many decoded at that rate."""
    decoding = np.minimum(decoding, places)
    spread = np.sqrt(np.maximum(decoding * (1.0 - decoding / places), 0.0))
    met = np.clip(decoding[:, None] + draws.crowd_z * spread[:, None] - 1.0, 0.0, places[:, None] - 1.0)
    admission = np.broadcast_to(((clients - places) / rate)[:, None], met.shape)
    full = np.where(clients > places, 1.0, 0.0)
    return experience(
        replica, draws, rate, decoding, met, admission, full, np.ones(rate.shape, dtype=bool), Stream(), places,
        clients=places,
    )
