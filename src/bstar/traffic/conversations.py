"""Multi-turn sessions: each turn's prompt is the whole conversation so far and a new message."""

from __future__ import annotations

import numpy as np

from bstar.errors import SpecError
from bstar.traffic import streams
from bstar.traffic.arrivals import Gaps, arrivals
from bstar.traffic.generators import Lengths, Times, as_lengths, check_rate, draw_lengths, starts
from bstar.traffic.joint import JointLengths
from bstar.traffic.lengths import Floats, Ints, sample
from bstar.traffic.load import Traffic
from bstar.traffic.prefixes import PrefixGroups
from bstar.traffic.times import as_times, sample_times


def sessions(
    rate_per_s: float | None = None, turns: Lengths = 4, input_tokens: Lengths | None = None,
    output_tokens: Lengths | None = None, num_sessions: int = 100, *, think_s: Times = "exponential:mean=20s",
    first_input_tokens: Lengths | None = None, concurrency: int | None = None, gaps: Gaps | None = None,
    max_context_tokens: int | None = None, lengths: JointLengths | None = None, prefix: PrefixGroups | None = None,
    seed: int = 0,
) -> Traffic:  # fmt: skip
    """`num_sessions` conversations that start at `rate_per_s` a second, or that `concurrency` users hold in turn.

    turns          messages of a session, an int, a DIST text or a distribution
    input_tokens   tokens that each turn ADDS; its prompt is all earlier messages and answers and these
    first_input_tokens   those of the first turn, where they differ (a document, a system prompt of its own)
    think_s        from an answer to the user's next message
    prefix         text shared between sessions, at the start of the first message
    max_context_tokens   a session ends before the turn whose prompt and answer would exceed it
    lengths        joint (added input, output) lengths instead of input_tokens and output_tokens

    The requests stand turn by turn: all first turns in the order of arrival, then all second turns, and
    so on; `parent` is the turn before. With prefix caching on, a turn finds its parent's text in the cache.
    Raises SpecError or UnitError that names the argument.
    """
    if (rate_per_s is None) == (concurrency is None):
        raise SpecError("rate_per_s: sessions start at a rate or are held by so many users (concurrency); give one")
    if num_sessions < 1:
        raise SpecError(f"num_sessions: must be at least 1, is {num_sessions}")
    counts = sample(as_lengths(turns, "turns"), num_sessions, streams.stream(seed, streams.TURNS))
    first = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)[:-1]))
    total = int(counts.sum())
    added, answer = draw_lengths(input_tokens, output_tokens, lengths, total, seed)
    if first_input_tokens is not None:
        law = as_lengths(first_input_tokens, "first_input_tokens")
        added[first] = sample(law, num_sessions, streams.stream(seed, streams.FIRST_INPUT))
    group = shared = None
    if prefix is not None:
        added[first], group, shared = prefix.draw(added[first], seed)

    session = np.repeat(np.arange(num_sessions), counts)
    turn = np.arange(total) - first[session]
    prompt = _prompts(added, answer, first, session)
    kept = np.arange(total)
    if max_context_tokens is not None:
        kept = kept[prompt + answer <= max_context_tokens]  # contexts grow: what is kept is the start of each session
        if kept.size == 0:
            raise SpecError(f"max_context_tokens: no session's first turn fits into {max_context_tokens} tokens")
    order = kept[np.argsort(turn[kept], kind="stable")]
    place = np.full(total + 1, -1, dtype=np.int64)
    place[order] = np.arange(order.size)
    session, turn = session[order], turn[order]
    think = sample_times(as_times(think_s, field="think time"), total, streams.stream(seed, streams.THINK))
    if think.size > 1:
        think = think[order]
    return Traffic(
        arrival_s=_starts(rate_per_s, concurrency, gaps, num_sessions, session, turn, seed),
        input_tokens=prompt[order], output_tokens=answer[order], session=session, turn=turn,
        parent=np.where(turn > 0, place[order - 1], -1), think_s=np.where(turn > 0, think, 0.0),
        prefix_group=np.full(1, -1) if group is None else group[session],
        prefix_tokens=np.zeros(1, np.int64) if shared is None else shared[session], concurrency=concurrency, seed=seed,
        name=f"{num_sessions} sessions",
    )  # fmt: skip


def _prompts(added: Ints, answer: Ints, first: Ints, session: Ints) -> Ints:
    """Whole prompts: the messages and answers of the session before the turn, and the turn's message."""
    before = np.cumsum(added + answer) - (added + answer)
    return np.asarray(before - before[first][session] + added, dtype=np.int64)


def _starts(
    rate_per_s: float | None, concurrency: int | None, gaps: Gaps | None, num_sessions: int, session: Ints, turn: Ints,
    seed: int,
) -> Floats:  # fmt: skip
    """Arrivals per request: of the sessions' first turns, nan elsewhere."""
    times = np.full(session.size, np.nan)
    roots = int(np.count_nonzero(turn == 0))
    if concurrency is not None:
        clients = min(concurrency, roots)
        times[:clients] = starts(clients, "burst", 0.0, seed)
        return times
    law = gaps if gaps is not None else Gaps()
    rate = check_rate(rate_per_s if rate_per_s is not None else 0.0)
    begun = arrivals(law, rate, streams.stream(seed, streams.ARRIVALS), count=num_sessions)
    times[:roots] = begun[session[:roots]]
    return times
