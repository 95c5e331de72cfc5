"""The loop on the shared real vLLM, by the commands that a user types: bench, compare, calibrate, tune, diagnose.

Structure and laws exactly, figures within 25 %: this machine is shared. The figures themselves come from benchmarks/.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import ROOT, Server

pytest.importorskip("httptools")

import bstar
from bstar.calibration.profile import calibrated, read_profile
from bstar.calibration.sources import figures_in
from bstar.measure import read_run
from bstar.measure.server.scraper import MetricsSource

pytestmark = pytest.mark.vllm

LENGTHS = ("--input", "uniform:8-96", "--output", "uniform:8-32")
BAR = 0.25
ATTEMPTS, TRIES = 3, 6
SEATS = 8  # max_num_seqs of the shared server
INTERRUPTED = 130
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}


def call(*words: str) -> str:
    """What `bstar …` prints; it must end well."""
    done = subprocess.run([sys.executable, "-m", "bstar", *words], capture_output=True, text=True, timeout=300,
                          env=ENVIRONMENT, check=False)
    assert done.returncode == 0, f"{words}\n{done.stderr}"
    return done.stdout


def measured(server: Server, out: Path, clients: int, count: int, seed: int, *more: str) -> Path:
    """The folder of a run; measured again where this machine's two processors left the client none."""
    for attempt in range(TRIES):
        place = out.with_name(f"{out.name}-{attempt}")
        call("bench", "--url", server.url, *LENGTHS, "--concurrency", str(clients), "--num-requests", str(count),
             "--seed", str(seed), "--out", str(place), "--allow-client-limited", *more)
        if json.loads((place / "summary.json").read_text())["verdict"]["valid"]:
            break
    return place


def flags_of(server: Server) -> list[str]:
    """The server's flags as those of a deployment."""
    return [word for flag in server.settings.items() for word in flag] + [
        "--model", str(server.model), "--gpu", "cpu", "--enforce-eager", "--num-gpu-blocks-override", "512"]


def test_two_loads_calibrate_a_third(server, tmp_path):
    """The unseen load is measured again where others disturbed it: figures of a shared machine."""
    measured(server, tmp_path / "warm", 8, 16, 0)
    low, high = measured(server, tmp_path / "low", 1, 12, 1), measured(server, tmp_path / "high", 8, 64, 2)
    profile = tmp_path / "mine.json"
    shown = call("calibrate", str(low), str(high), *flags_of(server), "--out", str(profile))
    assert "1 clients" in shown
    assert "8 clients" in shown
    kept = read_profile(profile)
    assert len(kept.points) == 2
    deployment = bstar.deployment(
        model=str(server.model), gpu="cpu", max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=2048,
        enforce_eager=True, num_gpu_blocks_override=512)
    errors = []
    for attempt in range(ATTEMPTS):
        seen = read_run(measured(server, tmp_path / f"unseen-{attempt}", 3, 36, 3 + attempt))
        found, real = bstar.simulate(calibrated(deployment, kept), seen.traffic).summary, figures_in(seen.summary)
        errors.append((found.output_tokens_per_s / real["output_tokens_per_s"] - 1.0,
                       (found.tpot_s.mean or 0.0) / real["tpot_s"] - 1.0))
    throughput, tpot = np.abs(np.median(np.array(errors), axis=0))
    assert throughput < BAR, errors
    assert tpot < BAR, errors


def test_a_run_and_its_prediction_side_by_side(server, tmp_path):
    """The simulation takes the options of the bench; both hold the same tokens."""
    run, predicted = measured(server, tmp_path / "run", 4, 24, 5), tmp_path / "predicted.json"
    words = [w for w in flags_of(server) if w not in ("--model", str(server.model))]
    predicted.write_text(call("simulate", str(server.model), *words, *LENGTHS, "--concurrency", "4", "--num-requests",
                              "24", "--seed", "5", "--json"))
    found = json.loads(call("compare", str(run), str(predicted), "--json"))
    assert [one["kind"] for one in found["runs"]] == ["measured", "simulated"]
    assert not any(note.startswith("the load") for note in found["notes"])
    assert all(len(figure["values"]) == 2 for figure in found["figures"].values())
    summaries = [json.loads(place.read_text()) for place in (run / "summary.json", predicted)]
    assert summaries[0]["output_tokens"] == summaries[1]["output_tokens"]


def test_a_running_server_is_tuned_by_its_clients(server, tmp_path):
    """Eight seats: 16 clients wait, 8 do not. What was measured is not measured again."""
    words = ("tune", "--url", server.url, "--clients", "1,2,4,8,16", "--input", "30", "--output", "40",
             "--num-requests", "48", "--no-refine", "--allow-client-limited", "--json", "--out",
             str(tmp_path / "tuned"))
    found: dict[str, Any] = json.loads(call(*words))
    assert [p["value"] for p in found["points"]] == [1, 2, 4, 8, 16]
    assert (found["waiting"]["low"], found["waiting"]["high"]) == (8.0, 16.0)
    assert found["preemption"]["load"] is None
    assert found["recommended"]["value"] <= 8
    running = [p["server"]["running_max"] for p in found["points"]]
    assert all(most <= min(p["value"], 8) for most, p in zip(running, found["points"], strict=True))
    assert all(p["amortized_s"] == pytest.approx(1.0 / p["throughput_per_s"]) for p in found["points"])
    again: dict[str, Any] = json.loads(call(*words))
    assert again["points"] == found["points"]
    # Its folder is a sweep: every load is a point of a calibration and a column of a comparison.
    compared = json.loads(call("compare", str(tmp_path / "tuned"), "--json"))
    assert [one["facts"]["load"] for one in compared["runs"]] == [
        "1 client", *(f"{n} clients" for n in (2, 4, 8, 16))]


@contextmanager
def under_load(server: Server, out: Path) -> Iterator[None]:
    """Three clients for each of the eight seats, for as long as the block needs; ended by Ctrl-C."""
    words = ("bench", "--url", server.url, *LENGTHS, "--concurrency", "24", "--num-requests", "100000", "--out",
             str(out), "--allow-client-limited")
    metrics = MetricsSource(url=server.url)
    load = subprocess.Popen([sys.executable, "-m", "bstar", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                            env=ENVIRONMENT, text=True)
    try:
        until = time.monotonic() + 120.0
        while metrics.read().gauge("running") < SEATS:
            assert load.poll() is None, load.communicate()[1]
            assert time.monotonic() < until, "the load did not fill the server"
            time.sleep(0.2)
        yield
    finally:
        load.send_signal(signal.SIGINT)
        said = load.communicate(timeout=120)[1]
    assert load.returncode == INTERRUPTED, said


def test_a_window_of_a_running_server(server, tmp_path):
    """Diagnosed and calibrated from two scrapes, without a request of our own."""
    profile = tmp_path / "passive.json"
    with under_load(server, tmp_path / "load"):
        found = json.loads(call("diagnose", "--url", server.url, "--window", "6s", "--interval", "0.5s", "--json"))
        call("calibrate", "--url", server.url, "--window", "6s", *flags_of(server), "--out", str(profile))
    assert found["wall"] == "max_num_seqs", found
    assert read_profile(profile).points[0].load == "rate_per_s"
    after = json.loads(call("diagnose", "--run", str(tmp_path / "load"), "--json"))
    assert after["wall"] in ("max_num_seqs", "client_limited"), after
    assert after["evidence"]["running"]["max"] == SEATS
