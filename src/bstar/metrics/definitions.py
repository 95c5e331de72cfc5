"""The metrics: name, formula, unit, direction of better. Whoever prints or computes one takes it from here.

    sent         when the client sent the request
    first, last  when the client had its first and its last output token
    n_out        output tokens

Some clients call E2E / n_out "TPOT", others call TPOT "ITL"; here a word has one meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bstar.errors import SpecError

Floats = NDArray[np.float64]
Scope = Literal["request", "token", "run"]
Direction = Literal["lower", "higher", "neither"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    name     key in JSON and in tables
    scope    of what there is one value: a request, a gap between tokens, a run
    better   which direction is better; neither: it describes the load
    note     what is easily got wrong
    """

    name: str
    label: str
    formula: str
    unit: str
    scope: Scope
    better: Direction
    note: str = ""


def _table(*metrics: Metric) -> dict[str, Metric]:
    return {m.name: m for m in metrics}


METRICS: Final[dict[str, Metric]] = _table(
    Metric(name="ttft_s", label="TTFT", formula="first - sent", unit="s", scope="request", better="lower",
           note="queueing and prefill"),
    Metric(name="tpot_s", label="TPOT", formula="(last - first) / (n_out - 1)", unit="s", scope="request",
           better="lower", note="none where n_out = 1: never 0, and it meets any limit"),
    Metric(name="itl_s", label="ITL", formula="token[i + 1] - token[i]", unit="s", scope="token", better="lower",
           note="over all gaps of all requests, so long answers weigh more than in TPOT"),
    Metric(name="e2e_s", label="E2E", formula="last - sent = ttft + (n_out - 1) * tpot", unit="s", scope="request",
           better="lower"),
    Metric(name="queue_s", label="queue", formula="first scheduled - sent", unit="s", scope="request",
           better="lower", note="simulated runs only: a client cannot see it"),
    Metric(name="duration_s", label="duration", formula="max(last) - min(sent)", unit="s", scope="run",
           better="neither"),
    Metric(name="requests_per_s", label="requests", formula="finished requests / duration", unit="1/s", scope="run",
           better="higher"),
    Metric(name="output_tokens_per_s", label="output tokens", formula="sum(n_out) / duration", unit="tok/s",
           scope="run", better="higher", note="of the system, not the speed that one user feels (1 / TPOT)"),
    Metric(name="total_tokens_per_s", label="all tokens", formula="sum(n_in + n_out) / duration", unit="tok/s",
           scope="run", better="higher"),
    Metric(name="slo_attainment_fraction", label="SLO attainment", formula="requests that meet every limit / requests",
           unit="", scope="run", better="higher", note="jointly; a request that did not finish meets none"),
    Metric(name="goodput_requests_per_s", label="goodput", formula="requests that meet every limit / duration",
           unit="1/s", scope="run", better="higher"),
    Metric(name="goodput_output_tokens_per_s", label="goodput tokens",
           formula="sum(n_out of requests that meet every limit) / duration", unit="tok/s", scope="run",
           better="higher"),
    Metric(name="num_preemptions", label="preemptions", formula="times a running request lost its cache", unit="",
           scope="run", better="lower"),
    Metric(name="kv_usage", label="KV use", formula="mean over time of used / usable KV blocks", unit="", scope="run",
           better="neither", note="a wall when it reaches 1"),
    Metric(name="mbu", label="MBU", formula="(weights + cache read) / (busy seconds * peak bandwidth)", unit="",
           scope="run", better="higher", note="bytes that must be read once per step; activations do not count"),
    Metric(name="mfu", label="MFU", formula="sum(FLOPs / peak of their dtype) / busy seconds", unit="", scope="run",
           better="higher", note="dense peaks; FLOPs that the model needs, no padding"),
)  # fmt: skip


def metric(name: str) -> Metric:
    """The metric called `name`. Raises SpecError where there is none."""
    found = METRICS.get(name)
    if found is None:
        raise SpecError(f"metric: {name!r} is not defined; use one of {', '.join(METRICS)}")
    return found


def ttft_s(sent_s: ArrayLike, first_token_s: ArrayLike) -> Floats:
    """Time to first token; nan where there was none."""
    found: Floats = np.asarray(first_token_s, dtype=float) - np.asarray(sent_s, dtype=float)
    return found


def tpot_s(first_token_s: ArrayLike, finish_s: ArrayLike, output_tokens: ArrayLike) -> Floats:
    """Time per output token after the first; nan where there is only one."""
    gaps = np.asarray(output_tokens, dtype=float) - 1.0
    spent = np.asarray(finish_s, dtype=float) - np.asarray(first_token_s, dtype=float)
    found: Floats = np.divide(spent, gaps, out=np.full(np.broadcast(spent, gaps).shape, np.nan), where=gaps > 0)
    return found


def e2e_s(sent_s: ArrayLike, finish_s: ArrayLike) -> Floats:
    """Time to the last token; nan where the request did not finish."""
    found: Floats = np.asarray(finish_s, dtype=float) - np.asarray(sent_s, dtype=float)
    return found
