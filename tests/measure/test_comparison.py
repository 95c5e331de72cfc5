"""Runs side by side: measured, imported, simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fake_server import FakeServer, good

from bstar.calibration.sources import observations_in
from bstar.errors import ConfigError, SpecError
from bstar.interfaces.cli.main import cli
from bstar.measure import RunOptions, bench, parse_endpoint, prepare
from bstar.measure.comparison import RATES, ComparedRun, compare_runs, figures_of, read_compared
from bstar.metrics import RequestRecords, TokenGaps, summarize
from bstar.specs.slo import Slo
from bstar.traffic import closed_loop

IMPORTS = Path(__file__).parent / "data" / "imports"


def run_of(tpot_s: float, *, noise: float = 0.01, name: str = "run", requests: int = 400, seed: int = 0) -> ComparedRun:
    random = np.random.default_rng(seed)
    tpots = tpot_s * random.normal(1.0, noise, requests)
    sent = np.arange(requests) * 0.1
    records = RequestRecords(
        sent_s=sent, first_token_s=sent + 0.05, finish_s=sent + 0.05 + tpots * 9,
        input_tokens=np.full(requests, 100), output_tokens=np.full(requests, 10),
    )  # fmt: skip
    return ComparedRun(name=name, kind="measured", source="bstar bench", records=records,
                       figures={"tpot_s.mean": float(tpots.mean()), "output_tokens_per_s": 1.0 / tpot_s})


def bench_run(folder: Path, clients: int, *, valid: bool = True, **more: Any) -> None:
    """A run of bstar bench, as it would be with this verdict."""
    with FakeServer(partial(good, gap_s=0.01)) as server:
        ready = prepare(parse_endpoint(server.url, model="fake"))
        bench(ready, closed_loop(clients, 8, 4, 20), RunOptions(workers=0, allow_client_limited=True), out=folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["verdict"] |= {"valid": valid, "reasons": [] if valid else ["the client was late"]}
    summary |= more
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_difference_beyond_the_intervals_is_seen() -> None:
    found = compare_runs([run_of(0.010), run_of(0.010, seed=1, noise=0.02), run_of(0.011, seed=2)])
    tpot = found.figures[0]
    assert tpot.name == "tpot_s.mean"
    assert tpot.ratios[2] == pytest.approx(1.1, rel=0.01)
    assert tpot.apart == (None, False, True)


def test_too_few_requests_have_no_interval() -> None:
    assert run_of(0.01, requests=39).interval("tpot_s.mean") is None
    assert run_of(0.01, requests=40).interval("tpot_s.mean") is not None
    assert run_of(0.01, requests=100).interval("tpot_s.p99") is None
    assert run_of(0.01).interval("tpot_s.p99") is not None
    assert run_of(0.01).interval("itl_s.mean") is None


def test_one_run_is_no_comparison() -> None:
    with pytest.raises(SpecError, match="two or more runs"):
        compare_runs([run_of(0.01)])


def test_other_loads_and_invalid_runs_are_said() -> None:
    one = run_of(0.01, name="one")
    other = ComparedRun(name="two", kind="measured", source="bstar bench", figures=one.figures,
                        facts={"load": "4 clients"}, invalid=("the client was the limit",))
    base = ComparedRun(name="three", kind="measured", source="bstar bench", figures=one.figures,
                       facts={"load": "8 clients"})
    notes = compare_runs([base, other]).notes
    assert any("client was the limit" in n for n in notes)
    assert any("4 clients; 8 clients" in n for n in notes)


def test_imports_and_simulations_from_the_command_line(tmp_path: Path) -> None:
    runner = CliRunner()
    shape = ["--gpu", "h100-sxm-80gb", "--input", "8", "--output", "20", "--concurrency", "4", "--num-requests", "64"]
    simulated = runner.invoke(cli, ["simulate", "llama-3.1-8b", *shape, "--json"])
    assert simulated.exit_code == 0, simulated.output
    (tmp_path / "simulated.json").write_text(simulated.stdout)
    for suffix in ("parquet", "csv", "jsonl"):
        done = runner.invoke(cli, ["simulate", "llama-3.1-8b", *shape, "--requests-out", str(tmp_path / f"r.{suffix}")])
        assert done.exit_code == 0, done.output
    paths = [IMPORTS / "vllm_detailed.json", tmp_path / "simulated.json",
             *(tmp_path / f"r.{s}" for s in ("parquet", "csv", "jsonl"))]
    result = runner.invoke(cli, ["compare", *map(str, paths), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [r["kind"] for r in found["runs"]] == ["imported", *["simulated"] * 4]
    values = found["figures"]["tpot_s.mean"]["values"]
    # The summary leaves the same requests out as the table of requests does.
    assert values[2:] == pytest.approx([values[1]] * 3, rel=1e-9)
    text = runner.invoke(cli, ["compare", *map(str, paths[:2])])
    assert text.exit_code == 0
    assert "TPOT mean" in text.stdout


@pytest.mark.parametrize(("name", "content"), [
    ("missing.json", None), ("x.json", "{}"), ("x.json", "{"), ("x.txt", "hello"), ("x.csv", "a,b\n1,2\n"),
    ("x.parquet", "no parquet"), ("x.jsonl", "{"),
])  # fmt: skip
def test_what_is_no_run_is_one_line(tmp_path: Path, name: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=r"compare: .*") as error:
        read_compared(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_sweeps_folder_is_its_runs(tmp_path: Path) -> None:
    """Compared in the order of their loads; each a point of a calibration, which refuses those of several servers."""
    for clients in (10, 2):
        bench_run(tmp_path / "s" / f"concurrency-{clients}", clients)
    (tmp_path / "s" / "concurrency-4.partial").mkdir()
    found = read_compared(tmp_path / "s")
    assert [r.name for r in found] == ["s/concurrency-2", "s/concurrency-10"]
    assert [r.facts["load"] for r in found] == ["2 clients", "10 clients"]
    assert [one.concurrency for one in observations_in(tmp_path / "s")] == [2, 10]
    (tmp_path / "s" / "tune.json").write_text(json.dumps({"settings": {"serve": "vllm serve"}}))
    with pytest.raises(ConfigError, match=r"max_num_seqs; name one of its runs \(concurrency-2, concurrency-10"):
        observations_in(tmp_path / "s")


def test_one_model_by_two_names_is_no_difference() -> None:
    one, other = (ComparedRun(name=name, kind="measured", source="bstar bench", figures={"ttft_s.mean": 1.0},
                              facts={"model": model})
                  for name, model in (("a", "meta-llama/Llama-3.1-8B"), ("b", "llama-3.1-8b")))
    assert not compare_runs([one, other]).notes


def test_what_a_calibration_leaves_out_is_said(tmp_path: Path) -> None:
    """Runs of a sweep that are no result of the server, and a model that is not the deployment's: in text and JSON."""
    full = {"waiting_share": 0.9, "gauges": {"running": {"max": 3.0}, "kv_usage_fraction": {"max": 0.1}}}
    for clients in (1, 2, 4):
        bench_run(tmp_path / "sw" / f"concurrency-{clients}", clients, valid=clients > 1,
                  server=full if clients == 4 else {})
    (tmp_path / "sw" / "concurrency-8.partial").mkdir()
    (tmp_path / "sw" / "concurrency-8.partial" / "requests.journal").touch()
    deploy = ["--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb"]
    ask = ["calibrate", str(tmp_path / "sw"), *deploy]
    runner = CliRunner()
    found = json.loads(runner.invoke(cli, [*ask, "--json"]).stdout)
    assert [p["id"] for p in found["points"]] == ["concurrency-2", "concurrency-4"]
    assert [note for note in found["notes"] if "left out" in note] == [
        "concurrency-1 is left out: it is no result of the server (the client was late)",
        "concurrency-8.partial is left out: it broke off"]
    assert found["notes"][0].startswith("concurrency-2 served fake, the deployment is llama-3.1-8b")
    assert found["notes"][2].startswith("concurrency-4 never ran more than 3 requests while others waited")
    text = " ".join(runner.invoke(cli, ask).stdout.split())
    assert "note: concurrency-1 is left out: it is no result of the server (the client was late)" in text
    assert "off: calibrated prediction / measured − 1" in text
    bench_run(tmp_path / "none" / "concurrency-1", 1, valid=False)
    refused = runner.invoke(cli, ["calibrate", str(tmp_path / "none"), *deploy])
    assert refused.exit_code == 2
    assert "none of its 1 runs is a result of the server (concurrency-1: the client was late)" in refused.stderr


def test_percentiles_of_few_requests_have_intervals_inside_the_data() -> None:
    run = run_of(0.01, requests=40)
    assert run.records is not None
    found = run.interval("e2e_s.p50")
    assert found is not None and found.ends is not None
    assert run.records.e2e_s.min() <= found.ends[0] < found.ends[1] <= run.records.e2e_s.max()
    assert run.interval("e2e_s.p95") is None


def served_at(e2e_s: float, *, name: str, seed: int, requests: int = 320) -> ComparedRun:
    """A closed loop of 8 clients, as compare reads it: with the figures of its requests and their SLO."""
    slo = Slo(e2e_s=1.1)
    took = e2e_s * np.random.default_rng(seed).normal(1.0, 0.1, (requests // 8, 8))
    ends = np.cumsum(took, axis=0)
    records = RequestRecords(
        sent_s=(ends - took).ravel(), first_token_s=(ends - 0.9 * took).ravel(), finish_s=ends.ravel(),
        input_tokens=np.full(requests, 100), output_tokens=np.full(requests, 10),
    )  # fmt: skip
    summary = summarize(records, TokenGaps.of_samples(np.zeros(0)), slo)
    return ComparedRun(name=name, kind="measured", source="bstar bench", records=records, slo=slo,
                       figures=figures_of(summary.to_dict()))


def test_rates_have_intervals_and_stars() -> None:
    found = compare_runs([served_at(1.0, name="a", seed=1), served_at(1.0, name="b", seed=2),
                          served_at(1.1, name="c", seed=3)])
    rates = {f.name: f for f in found.figures if f.name in RATES}
    assert set(rates) == set(RATES)
    for name, figure in rates.items():
        assert figure.apart == (None, False, True), name
        for interval, value in zip(figure.intervals, figure.values, strict=True):
            assert interval is not None and interval.relative_half_width is not None
            assert interval.mean == value
            assert interval.relative_half_width < 0.25, name
    assert served_at(1.0, name="few", seed=1, requests=32).interval("requests_per_s") is None
    assert replace(served_at(1.0, name="a", seed=1), slo=None).interval("goodput_requests_per_s") is None


def test_a_run_that_is_no_result_is_marked_in_its_column(tmp_path: Path) -> None:
    for clients in (1, 2):
        bench_run(tmp_path / "s" / f"concurrency-{clients}", clients, valid=clients > 1)
    shown = CliRunner().invoke(cli, ["compare", str(tmp_path / "s")]).stdout
    (row,) = (line for line in shown.splitlines() if "no result" in line and "note" not in line)
    assert row.split() == ["no", "result"]
    heads = shown.splitlines()[0]
    assert row.rindex("t") == heads.index("s/concurrency-1") + len("s/concurrency-1") - 1
    assert "1 client " in shown
    assert "note: s/concurrency-1 is no result of the server" in shown
    other = CliRunner().invoke(cli, ["compare", *[str(tmp_path / "s" / "concurrency-2")] * 2]).stdout
    assert "no result" not in other


def test_a_load_that_was_measured_again_counts_once(tmp_path: Path) -> None:
    """As after an interrupted sweep that went on: its file says which runs its points are."""
    for name in ("concurrency-1", "concurrency-1-again-2", "concurrency-2"):
        bench_run(tmp_path / name, 1, interrupted=name == "concurrency-1")
    points = [{"load": 1, "folder": "concurrency-1-again-2"}, {"load": 2, "folder": "concurrency-2"}]
    (tmp_path / "sweep.json").write_text(json.dumps({"points": points}))
    names = ["concurrency-1-again-2", "concurrency-2"]
    assert [run.name.partition("/")[2] for run in read_compared(tmp_path)] == names
    assert [one.id for one in observations_in(tmp_path)] == names
    for said in ({"points": []}, {"points": "none"}, {}):  # a file that names none leaves all
        (tmp_path / "sweep.json").write_text(json.dumps(said))
        assert len(read_compared(tmp_path)) == 3


def test_a_run_that_broke_off_says_so(tmp_path: Path) -> None:
    """Named itself it is taken as far as it came; among others of a sweep it is left out."""
    for name, broken in (("concurrency-1", True), ("concurrency-2", False)):
        bench_run(tmp_path / "s" / name, 2, interrupted=broken)
    said = "broke off: 20 of 20 requests were answered"
    broken = tmp_path / "s" / "concurrency-1"
    (one,) = observations_in(broken)
    assert one.notes == (f"concurrency-1 {said}",)
    assert read_compared(broken)[0].notes == (said,)
    (kept,) = observations_in(tmp_path / "s")
    assert (kept.id, kept.notes) == ("concurrency-2", (f"concurrency-1 is left out: it {said}",))
    summary = tmp_path / "s" / "concurrency-2" / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "interrupted": True}))
    assert [found.id for found in observations_in(tmp_path / "s")] == ["concurrency-1", "concurrency-2"]


def test_a_summary_that_is_none_is_named(tmp_path: Path) -> None:
    bench_run(tmp_path / "run", 1)
    whole = json.loads((tmp_path / "run" / "summary.json").read_text())
    for key in ("load", "window", "verdict"):
        (tmp_path / "run" / "summary.json").write_text(json.dumps({**whole, key: 1}))
        with pytest.raises(ConfigError, match=rf"summary\.json' is no summary of bstar bench \(it has no {key}\)"):
            read_compared(tmp_path / "run")
        with pytest.raises(ConfigError, match="is no summary of bstar bench"):
            observations_in(tmp_path / "run")
