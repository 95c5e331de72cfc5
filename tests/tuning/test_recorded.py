"""A recorded run tells the same as the server that it was recorded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_walls import snapshots

from bstar.errors import ConfigError
from bstar.measure.server.scraper import ServerObserver
from bstar.measure.server.snapshot import Snapshot
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
