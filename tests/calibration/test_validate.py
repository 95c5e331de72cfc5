"""`bstar validate`: error figures, what counts, the JSON, the tables, the peer, the page and the charts."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from bstar.calibration import heldout
from bstar.calibration.bundled import SERVING, bundled_points
from bstar.calibration.few_points import calibrate
from bstar.calibration.page import HEADINGS, page_text
from bstar.calibration.peer import PeerPrediction, peer_prediction
from bstar.calibration.points import Point, deployment_of, read_points
from bstar.calibration.profile import write_profile
from bstar.calibration.replay import Prediction, replay
from bstar.calibration.summary import AXES, Outcome, error_figures, summaries_by, summary_of
from bstar.calibration.suspects import worst_rows
from bstar.calibration.validation import validate
from bstar.interfaces.cli.heartbeat import heartbeat
from bstar.interfaces.cli.main import cli

ROOT = Path(__file__).parents[2]
HEAD = ("id,harness,engine,engine_version,model,weight_dtype,isl_tokens,osl_tokens,num_gpus,attention_tp,gpu,"
        "concurrency,ttft_ms,tpot_ms,label_note,shade")  # fmt: skip
SAME = "inferencex,vllm,0.18.0,meta-llama/Llama-3.1-70B,fp8,1024,128,4,4"
ROWS = (
    f"a,{SAME},h100_sxm,4,100,12,,red",
    f"b,{SAME},h100_sxm,16,150,15,,red",
    f"c,{SAME},x9000,16,150,15,,red",
    f"d,{SAME},h100_sxm,16,150,1,speculative decoding suspected,",
    f"e,{SAME},h100_sxm,lots,150,1,,",
    f"f,{SAME},h100_sxm,8,,,,",
)


@pytest.fixture
def run() -> Callable[..., Result]:
    def call(*args: str) -> Result:
        result = CliRunner().invoke(cli, ["validate", *args], prog_name="bstar")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "points.csv"
    path.write_text("\n".join((HEAD, *ROWS)) + "\n", encoding="utf-8")
    return path


def outcome(tpot: float | None, measured: float | None, **changes: Any) -> Outcome:
    point = Point(id="x", engine="vllm", model="llama-3.1-8b", gpu="h100", concurrency=4, tpot_s=measured)
    return Outcome(point=replace(point, **changes), prediction=Prediction(tpot_s=tpot))


@given(st.lists(st.floats(0.01, 100.0), min_size=1))
def test_error_figures(ratios: list[float]) -> None:
    found = error_figures(r - 1 for r in ratios)
    assert found.count == len(ratios)
    assert found.mape == pytest.approx(sum(abs(r - 1) for r in ratios) / len(ratios))
    assert found.bias == pytest.approx(sum(r - 1 for r in ratios) / len(ratios), abs=1e-9)
    assert found.mean_abs_log_ratio == pytest.approx(sum(abs(math.log(r)) for r in ratios) / len(ratios), abs=1e-9)
    assert abs(found.bias or 0) <= (found.mape or 0) + 1e-12
    assert (found.median_ape or 0) <= (found.p90_ape or 0)


def test_no_rows_have_no_figures() -> None:
    found = error_figures([])
    assert found.count == 0 and found.mape is None and found.median_ape is None


def test_uncertain_rows_are_answered_and_do_not_count() -> None:
    rows = [
        outcome(1.1, 1.0), outcome(9.0, 1.0, label_note="speculative decoding suspected"), outcome(2.0, None),
        outcome(9.0, 1.0, layout_note="layout uncertain (2 or 4 GPUs)"), outcome(None, 1.0),
        outcome(1.3, 1.0, layout_note="label repaired"),
    ]  # fmt: skip
    found = summary_of(rows)
    assert (found.rows, found.counted) == (6, 3), "a row without an answer is in no error"
    assert found.coverage_fraction == pytest.approx(5 / 6)
    assert found.tpot.count == 2 and found.tpot.mape == pytest.approx(0.2)
    assert found.peer is None


def test_the_peer_is_compared_on_the_rows_that_it_answers() -> None:
    with_peer = replace(outcome(1.1, 1.0), peer=PeerPrediction(ttft_s=None, tpot_s=1.5))
    found = summary_of([with_peer, outcome(3.0, 1.0)])
    assert found.peer is not None
    assert found.peer["tpot"]["peer"].median_ape == pytest.approx(0.5)
    assert found.peer["tpot"]["bstar"].median_ape == pytest.approx(0.1)
    assert found.peer["ttft"]["peer"].count == 0


def test_the_peers_figures_are_those_of_its_table() -> None:
    rows = [p for p in bundled_points(SERVING) if not p.is_disaggregated and p.counts]
    errors = [abs(o.tpot_s / p.tpot_s - 1) for p in rows
              if p.tpot_s and (o := peer_prediction(p)) is not None and o.tpot_s is not None]  # fmt: skip
    assert len(errors) == 968
    assert sorted(errors)[len(errors) // 2] == pytest.approx(0.14, abs=0.005)


def test_a_row_that_is_only_called_alike_has_no_peer() -> None:
    known = next(p for p in bundled_points(SERVING) if peer_prediction(p) is not None)
    assert peer_prediction(replace(known, concurrency=known.concurrency + 1)) is None
    assert peer_prediction(replace(known, id="other")) is None


def test_json_is_the_contract(run: Callable[..., Result], file: Path) -> None:
    result = run("--points", str(file), "--json", "--jobs", "1")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = {row["id"]: row for row in found["rows"]}
    assert list(rows) == list("abcdef")
    for name in "abdf":
        assert rows[name]["predicted_tpot_s"] > 0 and rows[name]["predicted_ttft_s"] > 0
        assert rows[name]["reason"] is None
    assert rows["c"]["predicted_tpot_s"] is None and "x9000" in rows["c"]["reason"]
    assert rows["e"]["predicted_ttft_s"] is None and "concurrency" in rows["e"]["reason"]
    assert rows["a"]["measured_tpot_s"] == 0.012
    assert rows["a"]["tpot_error"] == pytest.approx(rows["a"]["predicted_tpot_s"] / 0.012 - 1)
    summary = found["summary"]
    assert summary["coverage_fraction"] == pytest.approx(4 / 6)
    assert summary["tpot"]["count"] == 2, "rows without a measured figure, or with a label_note, do not count"
    assert {"mape", "median_ape", "bias", "mean_abs_log_ratio"} <= set(summary["tpot"]) & set(summary["ttft"])
    assert set(found["by"]) == {"engine", "gpu", "model", "dtype", "regime"}
    assert found["by"]["engine"]["vllm"]["rows"] == 6


def test_text_has_tables_and_reasons(run: Callable[..., Result], file: Path) -> None:
    result = run("--points", str(file), "--by", "engine,harness", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert "66.7% answered" in result.stdout
    assert "no answer (1): gpu: 'x9000'" in result.stdout
    assert "harness" in result.stdout and "measured" in result.stdout, "few rows are printed one by one"
    many = run("--sample", "40", "--jobs", "1", "--by", "engine", "--worst", "3")
    assert "worst rows" in many.stdout and "suspected" in many.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [(("--by", "colour"), "--by: 'colour' is not known"), (("--points", "none.csv"), "cannot be read"),
     (("--profile", "none.json"), "none.json")],
)  # fmt: skip
def test_bad_input_is_one_line(run: Callable[..., Result], args: tuple[str, ...], said: str) -> None:
    result = run("--sample", "1", "--jobs", "1", *args)
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.count("\n") == 1 and not result.stdout


def test_a_file_without_rows_is_bad_input(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(HEAD + "\n", encoding="utf-8")
    assert run("--points", str(tmp_path / "x.csv")).exit_code == 2


def test_two_runs_are_equal(run: Callable[..., Result]) -> None:
    first, second = (run("--sample", "40", "--json", "--jobs", "1").stdout for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing() -> None:
    points = [p for p in bundled_points(SERVING) if p.concurrency <= 16][::6]
    assert len(points) > 100
    assert validate(points, jobs=2) == validate(points, jobs=1)


def test_axes_cover_every_row() -> None:
    rows = [outcome(1.1, 1.0), outcome(1.1, 1.0, engine="sglang"), outcome(1.1, 1.0, gpu="nothing")]
    for axis in AXES:
        assert sum(s.rows for s in summaries_by(rows, axis).values()) == 3


def test_suspected_reasons() -> None:
    def at(clients: int, error: float, **changes: Any) -> Outcome:
        return outcome(1 + error, 1.0, id=f"{clients}{changes}", concurrency=clients, **changes)

    noisy = [at(8, 0.0), outcome(1.0, 0.5, id="again", concurrency=8)]
    assert "noise" in worst_rows(noisy, 1)[0].reason
    line = [at(c, 0.0) for c in (1, 2, 8, 16)] + [at(4, 1.0)]
    assert "out of line" in worst_rows(line, 1)[0].reason
    group = [at(c, 0.5 + c / 100) for c in (1, 2, 4, 8, 16)]
    assert "all 5 rows" in worst_rows(group, 1)[0].reason
    low = outcome(0.02, 0.001)
    low = replace(low, prediction=replace(low.prediction, floor_s=0.002))
    assert "below the physical floor" in worst_rows([low], 1)[0].reason


def _is_page(text: str) -> None:
    """The form of the page: headings in order, whole tables, charts that are there."""
    assert text.startswith("# Validation\n")
    assert re.search(r"Made on \d{4}-\d\d-\d\d by `bstar validate", text)
    places = [text.find("\n" + heading + "\n") for heading in HEADINGS]
    assert all(p > 0 for p in places) and places == sorted(places)
    table: list[int] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append(len(re.findall(r"(?<!\\)\|", line)))
        elif table:
            assert len(table) >= 2 and len(set(table)) == 1, f"a table's rows differ in width: {table}"
            table = []


def test_the_page_in_docs_is_up_to_date_in_form() -> None:
    page = ROOT / "docs" / "validation.md"
    text = page.read_text(encoding="utf-8")
    _is_page(text)
    rows = re.search(r"([\d,]+) measured rows", text)
    assert rows is not None and int(rows[1].replace(",", "")) == 2112 + 3011, "bstar validate --page docs/validation.md"
    images = re.findall(r"!\[\w+\]\(([^)]+)\)", text)
    assert len(images) == 4
    for image in images:
        assert 0 < (page.parent / image).stat().st_size < 400_000


@pytest.mark.slow
def test_a_page_and_charts_are_written(run: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("altair")
    page = tmp_path / "page.md"
    result = run("--sample", "60", "--jobs", "1", "--page", str(page), "--plots", str(tmp_path / "charts"), "--json")
    assert result.exit_code == 0, result.output
    assert {p.name for p in (tmp_path / "charts").iterdir()} == {"tpot.svg", "ttft.svg", "regimes.svg", "clients.svg"}
    assert (tmp_path / "page" / "tpot.png").read_bytes()[:4] == b"\x89PNG"
    for heading in HEADINGS:
        assert heading in page.read_text(encoding="utf-8")


def test_a_profile_predicts_rows_that_it_holds_for(run: Callable[..., Result], file: Path, tmp_path: Path) -> None:
    points = [p for p in read_points(file) if p.id in "ab"]
    slow = [replace(p, tpot_s=2 * (replay(p).tpot_s or 0.0), ttft_s=None) for p in points]
    write_profile(calibrate(deployment_of(points[0]), slow), tmp_path / "slow.json")
    args = ("--points", str(file), "--json", "--jobs", "1")
    before = {r["id"]: r for r in json.loads(run(*args).stdout)["rows"]}
    after = {r["id"]: r for r in json.loads(run(*args, "--profile", str(tmp_path / "slow.json")).stdout)["rows"]}
    assert after["b"]["predicted_tpot_s"] > 1.2 * before["b"]["predicted_tpot_s"]
    assert after["c"]["predicted_tpot_s"] is None


def test_the_fits_report_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {
        "method": "Groups are left out.", "heldout": [{"rows": "seen", "n": 10, "TPOT median": 0.051}],
        "peer": [{"rows": "peer", "n": 3, "TTFT |log| mean": 0.3}], "noise": {"pairs": 4, "TPOT median": 0.002},
    }  # fmt: skip
    monkeypatch.setattr(heldout, "fit_report", lambda: report)
    text = "\n".join(heldout.heldout_lines())
    assert "| seen | 10 | 5.1% |" in text and "| peer | 3 | 0.30 |" in text and "4 pairs" in text
    monkeypatch.setattr(heldout, "fit_report", lambda: None)
    assert "No report" in heldout.heldout_lines()[0]


def test_a_page_of_few_rows_has_no_empty_section() -> None:
    text = page_text([outcome(1.1, 1.0)], images={}, command="bstar validate --points x.csv")
    assert "## Aggregated serving" in text and "## Disaggregated serving" not in text


def test_rows_of_one_id_and_empty_axes_are_said(run: Callable[..., Result], file: Path) -> None:
    file.write_text("\n".join((HEAD, ROWS[2], ROWS[2])) + "\n", encoding="utf-8")
    found = run("--points", str(file), "--jobs", "1", "--worst", "1k")
    assert "note: --points: 1 ids stand in several rows ('c' first)" in found.stderr and found.exit_code == 0
    assert run("--points", str(file), "--by", "engine,,gpu").exit_code == 2


def test_help_names_every_column_that_is_read(run: Callable[..., Result]) -> None:
    text = run("--help").stdout
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    for name in ("prefill_", "decode_", "num_workers", "tp_size", "mode", "load_kind", "static_batch", "n_gpus",
                 "attention_dp_size", "ttft_s", "max_load"):  # fmt: skip
        assert name in text and name in page


def test_long_work_shows_that_it_lives(capsys: pytest.CaptureFixture[str]) -> None:
    with heartbeat("points", first_s=0.02, every_s=0.02) as report:
        time.sleep(0.05)
        report(3, 7)
        time.sleep(0.1)
    with heartbeat("points", first_s=5.0) as report:
        report(7, 7)
    said = capsys.readouterr().err
    assert "compiling" in said and "3 of 7 points after" in said and "7 of 7" not in said
