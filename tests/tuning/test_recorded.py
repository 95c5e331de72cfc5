"""A recorded run tells the same as the server that it was recorded from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_walls import snapshots

import bstar
from bstar.errors import ConfigError
from bstar.measure.server.scraper import ServerObserver
from bstar.measure.server.snapshot import Snapshot
from bstar.tuning.diagnosis import diagnose, diagnose_evidence
from bstar.tuning.evidence import evidence_of
from bstar.tuning.recorded import _evidence, evidence_in
from bstar.tuning.walls import find_wall


class Played:
    """A metrics source that shows a planted server."""

    timeout_s = 1.0

    def __init__(self, shown: list[Snapshot]) -> None:
        self.shown = list(shown)

    def read(self) -> Snapshot:
        return self.shown.pop(0)


def recorded(shown: list[Snapshot]) -> tuple[dict[str, Any], dict[str, Any]]:
    source: Any = Played(shown)
    observer = ServerObserver(source, interval_s=1e-4)
    observer.start(0.0)
    while source.shown:
        pass
    found = observer.stop()
    return {"server": found.summary}, dict(found.tables)


@pytest.mark.parametrize("planted", [
    {"running": 0.0}, {"preempted": 0.5, "kv": 0.98}, {"waiting": 4.0, "kv": 0.97}, {"waiting": 4.0, "kv": 0.2},
    {"waiting": 4.0, "kv": 0.7, "cache_tokens": 10_000, "input_tokens": 3_000.0}, {"kv": 0.2},
    {"waiting": 4.0, "kv": 0.2, "prompt_per_step": 500.0},
])  # fmt: skip
def test_the_same_wall_as_on_the_running_server(planted: dict[str, Any]) -> None:
    shown = snapshots(**planted)
    seen = _evidence(*recorded(shown), ())
    assert seen is not None
    now = evidence_of(shown)
    assert find_wall(seen) == find_wall(now)
    assert seen.step_s == pytest.approx(now.step_s, nan_ok=True)
    assert seen.kv_total_tokens == now.kv_total_tokens
    assert seen.mean_of("input_tokens") == pytest.approx(now.mean_of("input_tokens"), nan_ok=True)


def test_scrapes_outside_the_load_are_not_of_it() -> None:
    """The first scrape comes before the load, the last one after; requests came from 1 s to 9 s."""
    shown = snapshots(running=4.0, waiting=2.0, latencies=True)
    for i in (0, len(shown) - 1):
        shown[i] = replace(shown[i], gauges={**shown[i].gauges, "running": 0.0, "waiting": 0.0})
    told = recorded(shown)
    seen = _evidence(*told, (), (0.5, 9.5))
    assert seen is not None
    assert seen.running.tolist() == [4.0] * 9
    assert seen.waiting_share == 1.0
    assert seen.duration_s == 9.0
    assert seen.whole
    assert seen.seen.rate("generated_tokens") == pytest.approx(10 * 400 / 9)
    # What the server counted of its requests is more than the gauges were read of.
    assert seen.mean_waiting == pytest.approx(2.0 * 10 / 9)
    killed = _evidence(*told, (), (0.5, 60.0))  # the server was gone after its last scrape
    assert killed is not None
    assert not killed.whole
    assert killed.duration_s == 9.5


@pytest.mark.parametrize("seconds", [2, 10])  # the counters end below and above where they were
def test_the_time_around_a_restart_is_not_counted(seconds: int) -> None:
    """800 tokens a second; at 4 s the server was gone, from 7 s on there is another one that begins at 0."""
    again = [replace(s, time_s=s.time_s + 7.0) for s in snapshots(seconds=seconds)]
    shown = [*snapshots(seconds=4), *again]
    summary, tables = recorded(shown)
    server = summary["server"]
    assert server["restarted"]
    assert server["restarts_s"] == [[4.0, 7.0]]
    assert (server["duration_s"], server["counted_s"]) == (7.0 + seconds, 4.0 + seconds)
    assert server["counters"]["generated_tokens"] == pytest.approx((4 + seconds) * 800)
    assert server["in_flight"] == {"requests": None, "waiting": None}
    rates = tables["server"]["generated_tokens_per_s"]
    assert np.isnan(rates).tolist() == [i in (0, 5) for i in range(len(shown))]
    now = diagnose(shown)
    for load in (None, (0.0, 7.0 + seconds), (0.0, 60.0)):
        seen = _evidence(summary, tables, (), load)
        assert seen is not None
        assert seen.duration_s == now.evidence.duration_s == 4.0 + seconds
        assert seen.seen.rate("generated_tokens") == pytest.approx(800.0)
        assert diagnose_evidence(seen).notes == now.notes
    assert any("restarted in the window" in n for n in now.notes)
    cut = _evidence(summary, tables, (), (0.0, 6.0))  # the load ended before the server was there again
    assert cut is not None
    assert cut.duration_s == 4.0


def test_a_run_of_another_model_is_noted() -> None:
    """By the run's environment, which knows an alias's root too; else by the labels of its metrics."""
    shown = [replace(s, served=("tiny",)) for s in snapshots()]
    deployment = bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb", tp=1)
    for names, noted in (((), True), (("tiny",), True), (("chat", "/srv/Llama-3.1-8B"), False)):
        seen = _evidence(*recorded(shown), (), None, names)
        assert seen is not None
        notes = diagnose_evidence(seen, deployment, simulate=False).notes
        assert any(n.startswith("the server served tiny") for n in notes) == noted


def test_a_run_between_two_scrapes_is_not_idle_and_no_wall() -> None:
    shown = snapshots(running=4.0, latencies=True, output_tokens=50.0, seconds=1)
    shown = [replace(s, gauges={**s.gauges, "running": 0.0}) for s in shown]
    seen = _evidence(*recorded(shown), (), (0.1, 0.9))
    assert seen is not None
    assert seen.scrapes == 0
    assert seen.in_flight > 4.0
    found = find_wall(seen)
    assert found.wall == "unknown"
    assert "no scrape lies inside the load of 800 ms" in found.because[0]


def test_a_limited_client_says_so_before_all_else() -> None:
    seen = _evidence(*recorded(snapshots(preempted=1.0)), ["one in a hundred requests are sent 90 ms late or more"])
    assert seen is not None
    found = find_wall(seen)
    assert found.wall == "client_limited"
    assert "90 ms late" in found.because[0]


def test_what_was_not_scraped_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder of bstar bench"):
        evidence_in(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "requests.parquet").touch()
    with pytest.raises(ConfigError, match=r"holds 1 runs; name one of them \(a\)"):
        evidence_in(tmp_path)
    assert _evidence({}, {}, ()) is None
