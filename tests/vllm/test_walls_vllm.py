"""`bstar diagnose` on real vLLM: situations made on purpose, each of which has one right answer.

Servers are small and on the CPU; what differs is their flags, their model, and the load. Margins are wide: a situation
is planted so that no hiccup of the machine makes it another one.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from servers import HERE, environment, free_port, stop, wait_until_ready

pytest.importorskip("httptools")

import bstar
from bstar.catalog.probe import Probe, device_of
from bstar.measure import RunOptions, bench, parse_endpoint, prepare
from bstar.measure.server.scraper import MetricsSource, ServerObserver
from bstar.specs.deployment import Deployment
from bstar.traffic import Traffic, closed_loop, poisson
from bstar.tuning.diagnosis import Diagnosis, diagnose, diagnose_evidence, watch
from bstar.tuning.recorded import evidence_in

pytestmark = [pytest.mark.vllm, pytest.mark.full]

LOADED_S, SETTLED_S, SEEN_S = 60.0, 3.0, 6.0


@contextmanager
def serving(python: Path, model: Path, log: Path, *flags: str) -> Iterator[str]:
    """A server with such flags; its URL."""
    port = free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny",
        "--load-format", "dummy", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *flags,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(), start_new_session=True)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def model_folder(python: Path, folder: Path, **changes: int) -> Path:
    words = [f"{key}={value}" for key, value in changes.items()]
    subprocess.run([python, HERE / "make_tiny_model.py", folder, *words], check=True, timeout=120)
    return folder


def seen_under(
    url: str, load: Traffic | None, deployment: Deployment | None = None, *, seen_s: float = SEEN_S, **settings: object
) -> Diagnosis:
    """The diagnosis of a window in the middle of a load (None: no load)."""
    stopped = threading.Event()

    def send() -> None:
        assert load is not None
        ready = prepare(parse_endpoint(url))
        while not stopped.is_set():
            bench(ready, load, RunOptions(workers=0))

    thread = threading.Thread(target=send, daemon=True)
    if load is not None:
        thread.start()
        time.sleep(SETTLED_S)
    try:
        snapshots = watch(MetricsSource(url=url), window_s=seen_s, interval_s=0.25)
    finally:
        stopped.set()
    if load is not None:
        thread.join(LOADED_S)
    return diagnose(snapshots, deployment, simulate=False, **settings)  # type: ignore[arg-type]


def on_cpu(model: Path, **flags: object) -> Deployment:
    """A model folder on a nominal, slow CPU: a busy machine must not change what a step is made of."""
    slow = Probe(processor="nominal", logical_cpus=2, memory_bytes=16_000_000_000, read_bytes_per_s=8e9,
                 copy_bytes_per_s=8e9, fp32_flops_per_s=80e9, measured_at="2026-11-30")  # fmt: skip
    return bstar.deployment(model=str(model / "config.json"), gpu=device_of(slow), **flags)  # type: ignore[arg-type]


# Eight seats, room for far more.


def test_idle(server):
    assert seen_under(server.url, None).finding.wall == "idle"


@pytest.mark.parametrize("told", [8, None])
def test_every_seat_taken_and_requests_waiting(server, told):
    """Also where nobody says how many seats there are."""
    found = seen_under(server.url, closed_loop(24, 30, 40, 96), max_num_seqs=told)
    assert found.finding.wall == "max_num_seqs", found.to_dict()
    assert found.evidence.mean_running > 6


def test_seats_that_are_told_nowhere_are_seen(server):
    """vLLM exports no max_num_seqs, and the deployment's default says 128: eight run while others wait."""
    found = seen_under(server.url, closed_loop(16, 128, 64, 96), on_cpu(server.model))
    assert found.finding.wall == "max_num_seqs", found.to_dict()
    assert found.finding.seats == 8
    assert any("8 seats seem to be set, the deployment assumes 128" in note for note in found.notes)


@pytest.mark.parametrize("told", [1024, None])
def test_a_few_long_prompts_that_run_are_no_seats(server, told):
    """Three or four prompts of 1,500 fill steps of 1,024: that no more run is the budget's doing."""
    found = seen_under(server.url, closed_loop(8, 1500, 4, 24), seen_s=12.0, max_num_batched_tokens=told)
    assert found.finding.wall != "max_num_seqs", found.to_dict()
    if told is not None or found.finding.wall != "unknown":
        assert found.finding.wall == "token_budget", found.to_dict()
    else:  # nothing tells it from three seats
        assert "give --max-num-seqs and --max-num-batched-tokens" in found.finding.because[-1]


@contextmanager
def throttled(share: float, period_s: float = 0.4) -> Iterator[None]:
    """The workers of a bench in this process run for so small a share of the time, as under a CPU quota."""
    ended = threading.Event()

    def is_worker(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # it may have ended since it was listed
            return "bstar.measure.worker" in " ".join(process.cmdline())
        return False

    def hold() -> None:
        while not ended.is_set():
            workers = [p for p in psutil.Process().children() if is_worker(p)]
            for how, seconds in (("suspend", (1.0 - share) * period_s), ("resume", share * period_s)):
                for worker in workers:
                    with suppress(psutil.NoSuchProcess):
                        getattr(worker, how)()
                time.sleep(seconds)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10.0)


def test_a_client_at_its_limit_is_no_server(server, tmp_path):
    """The same load from a client with more time is not nearly as late (on a machine whose processors vLLM takes)."""
    ready, load = prepare(parse_endpoint(server.url)), poisson(4, 30, 8, 40)
    for name, share in (("limited", 0.1), ("free", None)):
        with throttled(share) if share is not None else nullcontext():
            observer = ServerObserver(MetricsSource(url=server.url), interval_s=0.25)
            bench(ready, load, RunOptions(workers=1, observers=(observer,)), out=tmp_path / name)
    found = diagnose_evidence(evidence_in(tmp_path / "limited"))
    assert found.finding.wall == "client_limited", found.to_dict()
    assert found.evidence.client_limited
    late = {name: json.loads((tmp_path / name / "summary.json").read_text())["health"]["dispatch_delay_s"]["p99"]
            for name in ("limited", "free")}
    assert late["limited"] > 2.0 * late["free"], late


def test_few_clients_are_no_wall_of_the_server(server):
    found = seen_under(server.url, closed_loop(3, 30, 40, 24), max_num_seqs=8)
    assert found.finding.wall == "client_limited", found.to_dict()
    assert any("the load that comes" in reason for reason in found.finding.because)


@pytest.fixture(scope="module")
def small_cache(vllm_python, tiny_model, tmp_path_factory) -> Iterator[str]:
    """Nineteen blocks of 128 tokens, seats for 64."""
    log = tmp_path_factory.mktemp("cache") / "server.log"
    with serving(vllm_python, tiny_model, log, "--max-model-len", "2048", "--max-num-seqs", "64",
                 "--num-gpu-blocks-override", "20", "--no-enable-prefix-caching") as url:  # fmt: skip
        yield url


def test_answers_grow_out_of_the_cache(small_cache):
    found = seen_under(small_cache, closed_loop(16, 100, 300, 32), max_num_seqs=64)
    assert found.finding.wall == "kv_capacity", found.to_dict()
    assert found.evidence.preemptions > 0


def test_prompts_wait_for_room(small_cache):
    """Four blocks each from the start, and no growth: nothing is preempted."""
    found = seen_under(small_cache, closed_loop(16, 390, 120, 48), max_num_seqs=64)
    assert found.finding.wall == "kv_capacity", found.to_dict()
    assert found.evidence.preemptions == 0


def test_prompts_fill_the_steps(vllm_python, tiny_model, tmp_path):
    """128 tokens a step, seats and cache for all."""
    with serving(vllm_python, tiny_model, tmp_path / "server.log", "--max-model-len", "2048", "--max-num-seqs", "64",
                 "--max-num-batched-tokens", "128", "--no-enable-prefix-caching") as url:  # fmt: skip
        found = seen_under(url, closed_loop(16, 1000, 4, 64), max_num_seqs=64, max_num_batched_tokens=128)
    assert found.finding.wall == "token_budget", found.to_dict()


def test_a_step_is_overhead(vllm_python, tmp_path):
    """A model of half a megabyte: a step is the engine's own work."""
    model = model_folder(vllm_python, tmp_path / "model", hidden_size=128, intermediate_size=128,
                         num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    with serving(vllm_python, model, tmp_path / "server.log", "--max-model-len", "2048", "--max-num-seqs", "64") as url:
        found = seen_under(url, closed_loop(2, 30, 100, 40), on_cpu(model, max_num_seqs=64))
    assert found.finding.wall == "overhead_bound", found.to_dict()


@pytest.fixture(scope="module")
def heavy(vllm_python, tmp_path_factory) -> Iterator[tuple[str, Deployment]]:
    """A gigabyte and a half of weights, more than any cache."""
    folder = tmp_path_factory.mktemp("weights")
    model = model_folder(vllm_python, folder / "model", hidden_size=2048, intermediate_size=6144,
                         num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8)  # fmt: skip
    with serving(vllm_python, model, folder / "server.log", "--max-model-len", "1024", "--max-num-seqs", "64",
                 "--max-num-batched-tokens", "2048", "--no-enable-prefix-caching") as url:  # fmt: skip
        yield url, on_cpu(model, max_num_seqs=64, max_num_batched_tokens=2048)


def test_one_request_reads_all_weights(heavy):
    url, deployment = heavy
    found = seen_under(url, closed_loop(1, 16, 64, 2), deployment)
    assert found.finding.wall == "weight_bound", found.to_dict()


def test_a_large_batch_computes(heavy):
    url, deployment = heavy
    found = seen_under(url, closed_loop(32, 16, 32, 64), deployment, seen_s=15.0)
    assert found.finding.wall == "compute_bound", found.to_dict()
