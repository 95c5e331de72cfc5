"""Whether a run is a result of the server, and what a reader of its figures has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bstar.measure.failures import CLIENT_SIDE, meaning

if TYPE_CHECKING:
    from bstar.measure.result import BenchRun

# From intended instead of from sent time makes a difference that is worth a line.
OMISSION_FACTOR, OMISSION_S = 1.1, 0.01
# Prompt tokens found in the prefix cache beyond what the load shares.
WARM_FRACTION: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """valid: the figures are the server's; reasons: why not; notes: what to know."""

    valid: bool
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"valid": self.valid, "reasons": list(self.reasons), "notes": list(self.notes)}


def judge_run(run: BenchRun) -> Verdict:
    """The verdict of a run."""
    reasons: list[str] = []
    notes = list(run.health.strained)
    table = run.table
    failed = int(np.count_nonzero(~table.succeeded & (table.error != "interrupted")))
    counted = int(np.count_nonzero(table.error != "interrupted"))
    if len(table) == 0:
        reasons.append("no request was sent")
    elif len(run.measured) == 0:
        reasons.append("no request is inside the window: warm-up and cool-down leave none")
    elif not table.succeeded.any():
        reasons.append("no request got a whole answer")
    elif failed > run.max_error_fraction * counted:
        reasons.append(f"{failed} of {counted} requests failed, more than {run.max_error_fraction:.0%}")
    if run.refused_in_a_row:
        reasons.append(f"the server refused {run.refused_in_a_row:,} connections in a row: {_unsent(run)}")
    reasons += run.health.limited
    for kind in sorted(set(table.error.tolist()) - {""}):
        count = int(np.count_nonzero(table.error == kind))
        side = " (the client's side)" if kind in CLIENT_SIDE else ""
        notes.append(f"{count} {'request' if count == 1 else 'requests'} {kind}: {meaning(str(kind))}{side}; not in "
                     "the latencies")
    notes += _about_unsent(run)
    notes += _about_tokens(run)
    notes += _about_time(run)
    notes += _about_restarts(run)
    if run.interrupted:
        notes.append("the run was interrupted: figures are of what had happened by then")
    if run.write_error:
        notes.append(f"not everything could be written: {run.write_error}")
    return Verdict(valid=not reasons, reasons=tuple(reasons), notes=tuple(dict.fromkeys(notes)))


def omits(run: BenchRun) -> bool:
    """Whether TTFT from the intended moment is another than from sending: coordinated omission."""
    sent, intended = run.summary.ttft_s.p99, run.from_intended.ttft_s.p99
    return bool(sent and intended and intended > max(OMISSION_FACTOR * sent, sent + OMISSION_S))


def _unsent(run: BenchRun) -> str:
    count = run.traffic.num_requests - len(run.table)
    return f"{count:,} {'request was' if count == 1 else 'requests were'} not sent"


def _about_unsent(run: BenchRun) -> list[str]:
    """Why the rest of the load was not sent, where it is no reason against the run already."""
    if run.traffic.num_requests == len(run.table) or run.interrupted or run.refused_in_a_row or run.health.lost_workers:
        return []
    if run.config.get("stop_after_s") is not None:
        return [f"{_unsent(run)}: --stop-after ended the load"]
    if run.traffic.has_sessions:
        return [f"{_unsent(run)}: their conversations broke off at a turn that failed"]
    return []


def _about_tokens(run: BenchRun) -> list[str]:
    from bstar.measure.result import token_facts

    facts, notes = token_facts(run.measured), []
    by_chunks = facts["counted_by"].get("chunks", 0)
    if by_chunks:
        notes.append(f"{by_chunks} answers came without a count of tokens: chunks with text are counted instead")
    if facts["counted_by"].get("tokenizer"):
        notes.append(f"{facts['counted_by']['tokenizer']} answers are counted by the tokenizer, not by the server")
    if facts["mismatch"]:
        notes.append(f"in {facts['mismatch']} answers the server's count of tokens contradicts its own stream")
    if facts["spread_evenly"]:
        per = facts["per_chunk"]
        notes.append(f"{facts['spread_evenly']} answers have several tokens in a chunk ({per:.2f} on average): tokens "
                     "of one chunk are 0 apart; compare chunk_gap_s with clients that call it ITL")
    if facts["shorter_than_asked"]:
        notes.append(_about_short(facts["shorter_than_asked"], facts["shorter_finish_reasons"]))
    if facts["longer_than_asked"]:
        notes.append(f"{facts['longer_than_asked']} answers are longer than asked")
    if facts["done_missing"]:
        notes.append(f"{facts['done_missing']} streams ended without [DONE]")
    asked, got = facts["mean_asked_input_tokens"], facts["mean_input_tokens"]
    file = run.config.get("dataset") or {}
    guess = ": lengths of the file are guessed without --tokenizer, a token for four characters"
    if facts["input_tokens_off"] and asked and abs(got / asked - 1.0) > 0.01:
        notes.append(f"prompts are {got:,.0f} tokens on average where {asked:,.0f} were asked for"
                     + (guess if file and not file["exact"] else ""))
    if file.get("guessed_answers"):
        notes.append(f"{file['guessed_answers']:,} answers of the file are text: how long an answer is asked for is "
                     "guessed without --tokenizer, a token for four characters")
    return notes


def _about_restarts(run: BenchRun) -> list[str]:
    """Whether the server was another process at the end than at the start."""
    found = next((o.summary for o in run.observations if o.name == "server"), {})
    return [f"the server was restarted between {before:.1f} s and {after:.1f} s of the load: its own counters do not "
            "cover that time" for before, after in found.get("restarts_s") or ()]


def _about_short(count: int, reasons: Mapping[str, int]) -> str:
    """Why answers are shorter than asked, as their finish reasons say."""
    why = {"length": "at a length limit (max_tokens in --extra-body, or the server's max_model_len)",
           "stop": "at the server's end token or a stop text", "none": "without a reason"}
    said = [f"{n:,} ended {why.get(reason, f'with finish reason {reason!r}')}" for reason, n in reasons.items()]
    return f"{count:,} {'answer is' if count == 1 else 'answers are'} shorter than asked: {', '.join(said)}"


def _about_time(run: BenchRun) -> list[str]:
    notes = []
    sent, intended = run.summary.ttft_s.p99, run.from_intended.ttft_s.p99
    if sent and intended and omits(run):
        notes.append(f"p99 TTFT is {intended * 1e3:,.0f} ms from the moment the load asked for, "
                     f"{sent * 1e3:,.0f} ms from sending: requests waited in the client (coordinated omission)")
    found, expected = run.prefix_hit_fraction, run.expected_hit_fraction
    if found is not None and found > expected + WARM_FRACTION:
        notes.append(f"the server's prefix cache was warm: {found:.0%} of the prompt tokens were found in it where the "
                     f"load shares {expected:.0%}; these prompts have been sent before")
    distinct = (run.config.get("prompts") or {}).get("distinct")
    if distinct and len(run.table) > distinct:
        notes.append(f"the file has {distinct:,} different {'prompt' if distinct == 1 else 'prompts'} for "
                     f"{len(run.table):,} requests: they repeat; the load shares {expected:.0%} of its prompt tokens")
    if run.traffic.concurrency is not None and len(run.measured) < 3 * run.traffic.concurrency:
        notes.append(f"{len(run.measured)} requests count for {run.traffic.concurrency} clients: the start and the end "
                     "weigh much; send at least three for each client")
    return notes
