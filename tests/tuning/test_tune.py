"""What a sweep shows, and servers that are started for each value."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bstar.errors import ConfigError, InfeasibleError, SpecError
from bstar.interfaces.cli.main import cli
from bstar.tuning.advice import Reading, onset, read_sweep
from bstar.tuning.decode_fit import fit_decode
from bstar.tuning.points import TunePoint, decode_steps
from bstar.tuning.serve import _lives, command_for, default_command, served, url_of
from bstar.tuning.state import open_state
from bstar.tuning.tune import parse_values


def point(
    value: int, throughput: float, *, width: float = 0.01, budget: int | None = None, **server: float
) -> TunePoint:
    attained = server.pop("attained", 1.0)
    return TunePoint(value=value, throughput_per_s=throughput, half_width=width * throughput, figures={},
                     attainment_fraction=attained, goodput_per_s=attained * throughput / 100, server=server,
                     budget=budget)


def affine(values: list[int], a: float, b: float, **kw: Any) -> list[TunePoint]:
    """Throughput of a batch whose step is a + b·B."""
    return [point(v, v / (a + b * v), **kw) for v in values]


DOUBLINGS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


@given(st.floats(1e-3, 1e-1), st.floats(4.0, 300.0), st.integers(0, 5))
def test_b_star_is_found_from_noisy_decode_steps(a: float, b_star: float, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(1.0, 0.01, len(DOUBLINGS))
    rows = tuple((float(v), float((a + a / b_star * v) * n), 100) for v, n in zip(DOUBLINGS, noise, strict=True))
    fit = fit_decode([TunePoint(value=1, throughput_per_s=1.0, half_width=None, figures={}, attainment_fraction=1.0,
                                goodput_per_s=1.0, decode=rows)])
    assert fit is not None
    assert fit.b_star == pytest.approx(b_star, rel=0.15)
    assert fit.low <= fit.b_star <= fit.high
    assert fit.error < 0.03


def test_one_slow_batch_size_does_not_tilt_the_fit() -> None:
    rows = [(float(v), 0.01 + 0.0001 * v, 100) for v in DOUBLINGS]
    rows[3] = (8.0, 0.05, 100)
    fit = fit_decode([TunePoint(value=1, throughput_per_s=1.0, half_width=None, figures={}, attainment_fraction=1.0,
                                goodput_per_s=1.0, decode=tuple(rows))])
    assert fit is not None
    assert fit.b_star == pytest.approx(100.0, rel=0.1)


def test_the_knee_of_an_affine_step_is_another_number_than_b_star() -> None:
    """Throughput B/(a + b·B) gains less than 5 % by doubling from 9.5 B* on (mission 7)."""
    reading = read_sweep(affine(DOUBLINGS, 0.01, 0.001), target_fraction=None, decode=None)
    assert reading.knee.load == pytest.approx(95.0, rel=0.15)
    assert reading.knee_90 is not None
    assert reading.knee_90[0] <= reading.knee.load * 1.01
    assert reading.advice is not None
    assert reading.advice.rule == "knee"


def test_the_first_wall_binds() -> None:
    points = affine(DOUBLINGS, 0.01, 0.0001)  # B* = 100: no knee below 512
    walled = [point(p.value, p.throughput_per_s, preemptions=float(p.value >= 64), waiting_share=float(p.value >= 128))
              for p in points]  # fmt: skip
    reading = read_sweep(walled, target_fraction=None, decode=None)
    assert (reading.preemption.low, reading.preemption.high) == (32.0, 64.0)
    assert reading.advice is not None
    assert (reading.advice.value, reading.advice.rule) == (32, "preemption")
    slow = [point(p.value, p.throughput_per_s, attained=1.0 if p.value <= 8 else 0.5) for p in points]
    bound = read_sweep(slow, target_fraction=0.99, decode=None).advice
    assert bound is not None
    assert (bound.value, bound.rule) == (8, "slo")


def test_waiting_for_a_seat_is_no_wall_where_seats_are_swept() -> None:
    points = [point(v, v / (0.01 + 0.001 * v), waiting_share=1.0) for v in DOUBLINGS]
    swept = read_sweep(points, target_fraction=None, decode=None, seats_swept=True).advice
    assert swept is not None
    assert swept.rule == "knee"


def test_nothing_reached_is_said() -> None:
    advice = read_sweep(affine([1, 2, 4], 0.01, 1e-6), target_fraction=None, decode=None).advice
    assert advice is not None
    assert (advice.value, advice.rule, advice.sure) == (4, "largest_measured", "open")


def test_a_knee_below_what_was_measured_is_open() -> None:
    advice = read_sweep([point(v, 100.0) for v in (2, 4, 8)], target_fraction=None, decode=None).advice
    assert advice is not None
    assert (advice.value, advice.low, advice.sure) == (2, 0.0, "open")
    assert "measure smaller" in advice.reason


def test_no_surer_than_the_throughputs() -> None:
    clear = affine([1, 2, 4, 8, 16, 32, 64, 80, 96, 112, 128, 256, 512], 0.01, 0.001, width=1e-4)
    noisy = [point(p.value, p.throughput_per_s, width=0.3) for p in clear]
    found = [read_sweep(points, target_fraction=None, decode=None).advice for points in (clear, noisy)]
    assert [a.sure for a in found if a is not None] == ["sure", "open"]


def test_a_sweep_that_reached_nothing_is_written(tmp_path: Path) -> None:
    state = open_state(tmp_path / "t", {})
    state.save({"result": read_sweep([*affine([1, 2], 0.01, 1e-6), point(4, 0.0)], target_fraction=None,
                                     decode=None).to_dict()})  # fmt: skip
    state.save({"result": read_sweep(affine([1, 2, 4], 0.01, 1e-6), target_fraction=None, decode=None).to_dict()})
    assert json.loads((tmp_path / "t" / "tune.json").read_text())["result"]["recommended"]["between"] == [4.0, None]


def test_one_disturbance_is_no_onset() -> None:
    points = [point(v, 1.0, preemptions=p) for v, p in ((1, 0.0), (2, 3.0), (4, 0.0), (8, 0.0), (16, 5.0), (32, 9.0))]
    assert onset(points, lambda p: p.server["preemptions"] > 0).load == 16.0


def test_points_survive_a_file(tmp_path: Path) -> None:
    state = open_state(tmp_path / "t", {"url": "x"})
    state.add(TunePoint(value=4, throughput_per_s=2.0, half_width=None, figures={"ttft_s.mean": 0.1},
                        attainment_fraction=1.0, goodput_per_s=1.0, decode=((1.0, 0.01, 9),), server={"steps": 3.0}))
    again = open_state(tmp_path / "t", {"url": "x"})
    assert again.points == state.points
    with pytest.raises(SpecError, match="another url"):
        open_state(tmp_path / "t", {"url": "y"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(SpecError, match="not empty"):
        open_state(tmp_path / "full", {})
    (tmp_path / "t" / "tune.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_state(tmp_path / "t", {"url": "x"})


def test_commands() -> None:
    template = ("X=1 vllm serve m --max-num-seqs {max_num_seqs} --port 9 "
                "--max-num-batched-tokens={max_num_batched_tokens}")
    words = command_for(template, {"max_num_seqs": 8, "max_num_batched_tokens": 512})
    assert words[4:6] == ["--max-num-seqs", "8"]
    assert words[-1] == "--max-num-batched-tokens=512"
    assert default_command(template) == ["X=1", "vllm", "serve", "m", "--port", "9"]
    assert url_of(template) == "http://127.0.0.1:9"
    assert url_of("python -m sglang.launch_server") == "http://127.0.0.1:30000"
    with pytest.raises(SpecError, match="needs --budgets"):
        command_for(template, {"max_num_seqs": 8})


def test_values() -> None:
    assert parse_values("8..64,3") == (3, 8, 16, 32, 64)
    for bad in ("", "a", "0", "4..x", "8..4"):
        with pytest.raises(SpecError, match="--values"):
            parse_values(bad)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_runs_while_the_block_does(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "health").write_text("ok")
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    url = f"http://127.0.0.1:{port}"
    with served(words, url, tmp_path / "log", ready_s=30.0):
        with pytest.raises(ConfigError, match="answers at"), served(words, url, tmp_path / "log2", ready_s=1.0):
            pass
        with socket.create_connection(("127.0.0.1", port)):
            pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    words = [sys.executable, "-c", "import sys; print('ValueError: no room'); sys.exit(3)"]
    with pytest.raises(InfeasibleError, match=r"ended with 3.*ValueError: no room"), \
            served(words, url, tmp_path / "log", ready_s=30.0):
        pass
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(InfeasibleError, match="not ready after"), \
            served(sleeping, url, tmp_path / "log", ready_s=0.3):
        pass
    with pytest.raises(ConfigError, match="cannot run"), \
            served(["/no/such/program"], url, tmp_path / "log", ready_s=1.0):
        pass


@pytest.mark.parametrize(("log", "why"), [
    ("1 validation error for SchedulerConfig\n  Value error, max_num_batched_tokens (512) is too small [type=value]\n"
     "    For further information visit https://errors.pydantic.dev/2/v/value_error\n", "max_num_batched_tokens (512)"),
    ("(EngineCore pid=7) ERROR 11-30 [core.py:780] ValueError: No available memory for the cache blocks.\nTraceback\n"
     "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n", "No available"),
    ("INFO started\nINFO going\n", "going"), ("", "nothing"),
])  # fmt: skip
def test_the_telling_line_of_a_log(log: str, why: str, tmp_path: Path) -> None:
    from bstar.tuning.serve import _said

    (tmp_path / "log").write_text(log)
    assert why in _said(tmp_path / "log")


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "--url"), (["--url", "http://127.0.0.1:9"], "--input"),
    (["--url", "http://127.0.0.1:9", "--input", "0", "--output", "8"], "--input: "),
    (["--serve", "x {max_num_seqs}", "--input", "8", "--output", "y", "--rate", "1"], "--output: "),
    (["--serve", "vllm serve m", "--input", "8", "--output", "8"], "needs {max_num_seqs}"),
    (["--url", "http://127.0.0.1:9", "--values", "8", "--input", "8", "--output", "8"], "--values"),
    (["--serve", "x {max_num_seqs}", "--rate", "1", "--concurrency", "2", "--input", "8", "--output", "8"],
     "two loads"),
    (["--serve", "x {max_num_seqs} {max_num_batched_tokens}", "--input", "8", "--output", "8"], "--budgets"),
    (["--serve", "x {max_num_seqs}", "--budgets", "512", "--input", "8", "--output", "8"], "--budgets"),
    (["--url", "http://127.0.0.1:9", "--input", "8", "--output", "8", "--gpu", "h100"], "MODEL: --gpu"),
    (["--serve", "./mine.sh {max_num_seqs}", "--input", "8", "--output", "8", "--gpu", "h100"], "MODEL: --gpu"),
    (["--url", "http://127.0.0.1:9", "--input", "8", "--output", "8", "--layers", "4"], "MODEL: --layers"),
    (["--url", "http://127.0.0.1:9", "--input", "8", "--output", "8", "--header", "no colon"], "--header"),
])  # fmt: skip
def test_bad_options_are_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["tune", *arguments, "--out", str(tmp_path / "t")])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "--url: give a running server, or --run"), (["--url", "x", "--run", "y"], "one of the two"),
    (["--url", "http://127.0.0.1:9", "--gpu", "h100"], "MODEL: --gpu"),
    (["--url", "http://127.0.0.1:9", "--window", "5s", "--interval", "5s"], "--interval: 5.00 s"),
    (["--run", "none", "--watch"], "--watch"), (["--run", "none"], "'none'"),
])  # fmt: skip
def test_bad_options_of_diagnose_are_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["diagnose", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


SECRET = "top-secret-42"


@pytest.mark.parametrize(("command", "shown"), [
    ("vllm serve M --api-key K1 K2 --max-num-seqs {max_num_seqs}", "vllm serve M --api-key *** *** --max-num-seqs"),
    ("vllm serve M --api-key=abc --port 8", "vllm serve M --api-key=*** --port 8"),
    ("HF_TOKEN=abcd MY_KEY=x N=1 serve --hf-token 'a b' m", "HF_TOKEN=*** MY_KEY=*** N=1 serve --hf-token *** m"),
    ("docker run -e AWS_SECRET_ACCESS_KEY=abc img --admin-api-key abc",
     "docker run -e AWS_SECRET_ACCESS_KEY=*** img --admin-api-key ***"),
    ("bash -c 'vllm serve M --api-key \"a b\" --max-num-seqs {max_num_seqs}'",
     "bash -c 'vllm serve M --api-key *** --max-num-seqs {max_num_seqs}'"),
    ("""vllm serve M --extra '{"password": "abc"}'""", """--extra '{"password": "***"}'"""),
    ("vllm serve M --tokenizer t --max-num-seqs {max_num_seqs}", "vllm serve M --tokenizer t --max-num-seqs {max_"),
])  # fmt: skip
def test_a_command_is_shown_without_its_secrets(command: str, shown: str) -> None:
    from bstar.codec.masking import masked_command

    assert shown in masked_command(command)
    assert masked_command(masked_command(command)) == masked_command(command)


def test_a_server_that_says_its_key_is_quoted_without_it(tmp_path: Path) -> None:
    """In words of its own, and although nothing there looks like a key."""
    says = f"import sys; print('ValueError: {SECRET} is no key'); sys.exit(3)"
    words = [sys.executable, "-c", says, "--api-key", SECRET]
    with pytest.raises(InfeasibleError, match=r"ValueError: \*\*\* is no key"), \
            served(words, f"http://127.0.0.1:{free_port()}", tmp_path / "log", ready_s=30.0):
        pass


def test_settings_are_kept_and_compared_without_their_secrets(tmp_path: Path) -> None:
    command = "vllm serve M --api-key {} --max-num-seqs {{max_num_seqs}} --port {}"
    state = open_state(tmp_path / "t", {"serve": command.format(SECRET, 81)})
    state.add(point(4, 1.0))
    assert SECRET not in (tmp_path / "t" / "tune.json").read_text()
    assert open_state(tmp_path / "t", {"serve": command.format("another", 81)}).points
    with pytest.raises(SpecError, match="another serve"):
        open_state(tmp_path / "t", {"serve": command.format(SECRET, 82)})


def test_a_tuning_that_measured_nothing_takes_other_settings(tmp_path: Path) -> None:
    open_state(tmp_path / "t", {"serve": "a {max_num_seqs}"})
    (tmp_path / "t" / "seqs-4.log").write_text("error: no such flag")
    again = open_state(tmp_path / "t", {"serve": "b {max_num_seqs}"})
    assert not again.drop_if_empty()
    (tmp_path / "t" / "seqs-4.log").write_text("")
    assert again.drop_if_empty()
    assert not (tmp_path / "t").exists()


def tuning(server: str, out: Path, *more: str) -> subprocess.Popen[str]:
    """`bstar tune --serve` of a Python text, with a key among its arguments."""
    command = f"TOKEN={SECRET} {sys.executable} {server} {{max_num_seqs}} --api-key {SECRET}"
    return subprocess.Popen(
        [sys.executable, "-m", "bstar.interfaces.cli", "tune", "--serve", command, "--url",
         f"http://127.0.0.1:{free_port()}", "--input", "8", "--output", "8", "--values", "4", "--out", str(out), *more],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "NO_COLOR": "1"})


@pytest.mark.slow
def test_ctrl_c_while_the_first_server_starts_can_be_gone_on_with(tmp_path: Path) -> None:
    """One line at once, a folder that the same command takes, and the key in none of it."""
    script, out = tmp_path / "server.py", tmp_path / "t"
    script.write_text("import time; print('starting', flush=True); time.sleep(60)")
    process = tuning(str(script), out)
    log = out / "seqs-4.log"
    while not (log.is_file() and log.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    said = err.strip().splitlines()
    assert said[-2].startswith("stopping the server")
    assert said[-1].startswith("error: interrupted: no value is measured yet; go on with the same options and --out")
    assert json.loads((out / "tune.json").read_text())["points"] == []
    script.write_text(f"import sys; print('ValueError: no room for {SECRET}'); sys.exit(1)")
    process = tuning(str(script), out)
    _, more = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no room for ***" in more
    written = "".join(f.read_text() for f in out.iterdir() if f.suffix != ".log")  # the log is the server's own
    assert SECRET not in err + more + written


def test_a_second_ctrl_c_kills_the_server(tmp_path: Path) -> None:
    """A server that takes no Ctrl-C: the first begins to wait for it, the second ends it at once."""
    script = tmp_path / "server.py"
    script.write_text("import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                      "print(os.getpid(), flush=True); time.sleep(60)")
    process, log = tuning(str(script), tmp_path / "t"), tmp_path / "t" / "seqs-4.log"
    while not (log.is_file() and log.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping the server" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode == 130
    end = time.monotonic() + 10
    while _lives(int(log.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_slip_in_the_command_leaves_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["tune", "--serve", "no-such-program {max_num_seqs}", "--url",
                                      f"http://127.0.0.1:{free_port()}", "--input", "8", "--output", "8", "--out",
                                      str(tmp_path / "t")])  # fmt: skip
    assert result.exit_code == 2
    assert "cannot run 'no-such-program'" in result.stderr
    assert not (tmp_path / "t").exists()


def test_what_lies_beyond_the_measured_values_is_said_so() -> None:
    from bstar.interfaces.cli.tune import _facts

    reading = read_sweep(affine([1, 2, 4], 0.01, 1e-6), target_fraction=0.9, decode=None)
    assert ("SLO met up to", "at least 4", "the largest measured") in _facts(reading, None, "clients")
    assert reading.advice is not None
    assert reading.advice.range_text == "4 or more"
    missed = read_sweep([point(v, 1.0, attained=0.1) for v in (1, 2)], target_fraction=0.9, decode=None)
    assert ("SLO met up to", "–", "not even at the smallest measured") in _facts(missed, None, "clients")
    between = read_sweep([point(v, v, attained=float(v < 3)) for v in (1, 2, 4)], target_fraction=0.9, decode=None)
    assert ("SLO met up to", "2", "not at 4") in _facts(between, None, "clients")
    below = read_sweep([point(v, 100.0) for v in (2, 4, 8)], target_fraction=None, decode=None).advice
    assert below is not None
    assert below.range_text == "2 or less"


def test_what_is_served_is_what_the_command_starts() -> None:
    """With --serve a GPU is enough for a prediction."""
    from bstar.interfaces.cli.tune import _take_served

    options: dict[str, Any] = {}
    _take_served("X=1 vllm serve Qwen/Qwen3-8B --max-num-seqs {max_num_seqs} --port 81", options)
    assert options == {"from_command": "X=1 vllm serve Qwen/Qwen3-8B --port 81"}
    _take_served("vllm serve other --max-num-seqs {max_num_seqs}", options)
    assert "Qwen3-8B" in options["from_command"]
    mine: dict[str, Any] = {}
    _take_served("./start.sh {max_num_seqs}", mine)
    assert mine == {}


def test_what_never_began_leaves_nothing(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(cli, ["tune", "--url", url, "--input", "8", "--output", "8", "--out",
                                      str(tmp_path / "t")])  # fmt: skip
    assert result.exit_code == 2
    assert "nothing answers" in result.stderr
    assert not (tmp_path / "t").exists()


def test_budgets_are_compared_by_what_they_give(tmp_path: Path) -> None:
    from bstar.tuning.tune import _best_reading

    points = [*affine(DOUBLINGS, 0.02, 0.001, budget=512), *affine(DOUBLINGS, 0.01, 0.0005, budget=2048)]
    assert _best_reading(points, None).points[0].budget == 2048
    assert json.dumps(_best_reading(points, None).to_dict(), default=str)


def test_the_interval_of_the_recommended_value_is_narrowed() -> None:
    """A step of 10 ms + 1 ms B; above 11 it preempts: between 8 and 16 are 11 and 13, and 11 is within a quarter."""
    from bstar.tuning.tune import _refined, value_between

    def seen(value: int) -> TunePoint:
        return affine([value], 0.01, 0.001, preemptions=float(value > 11))[0]

    points = [seen(v) for v in (2, 4, 8, 16, 32)]

    def read() -> Reading:
        return read_sweep(points, target_fraction=None, decode=None, seats_swept=True)

    asked: list[int] = []

    def measure(_: Reading, value: int) -> None:
        asked.append(value)
        points.append(seen(value))

    reading = _refined(read, measure)
    assert asked == [11, 13]
    assert reading.advice is not None
    assert (reading.advice.value, reading.advice.sure) == (11, "sure")
    assert value_between(reading) is None
    points[:] = [p for p in points if p.value in (2, 4, 8, 16)]
    failing: list[int] = []
    _refined(read, lambda _, value: failing.append(value))
    assert failing == [11], "a value for which no server starts is tried once"
    assert value_between(read_sweep(affine([1, 2, 4], 0.1, 0.0001), target_fraction=None, decode=None)) is None


def test_decode_steps_are_seen_although_others_queue_for_a_seat() -> None:
    """Two seats, six requests sent at once, answers of 21 tokens 10 ms apart: who queues is not being prefilled."""
    first = np.repeat([0.01, 0.22, 0.43], 2)
    chunks = first[:, None] + 0.01 * np.arange(21.0)
    table: Any = SimpleNamespace(
        succeeded=np.ones(6, bool), sent_s=np.zeros(6), first_token_s=first, last_token_s=chunks[:, -1],
        chunks_of=lambda i: (chunks[i], np.ones(21, np.int64)),
    )  # fmt: skip
    assert [(b, n) for b, _, n in decode_steps(table)] == [(2.0, 40)]  # only the last two ran with nobody waiting
    (batch, gap, seen), = decode_steps(table, seats=2)
    assert (batch, gap) == (2.0, pytest.approx(0.01))
    # All gaps but those that end while the next two are let in.
    assert seen >= 116


def test_points_with_preemptions_are_not_fitted() -> None:
    rows = tuple((float(v), 0.01 + 0.0001 * v, 100) for v in DOUBLINGS)
    made = TunePoint(value=1, throughput_per_s=1.0, half_width=None, figures={}, attainment_fraction=1.0,
                     goodput_per_s=1.0, decode=rows, server={"preemptions": 2.0})
    assert fit_decode([made]) is None
    assert fit_decode([replace(made, server={"preemptions": 0.0})]) is not None


def test_no_point_is_no_advice() -> None:
    reading = read_sweep([replace(point(4, 1.0), valid=False)], target_fraction=0.9, decode=None)
    assert reading.advice is None
    assert json.dumps(reading.to_dict())


def test_a_machine_that_changed_is_said() -> None:
    """Measured again, the recommended value gives what the sweep shows within its interval, or it is told."""
    from bstar.interfaces.cli.tune import drift

    reading = read_sweep(affine(DOUBLINGS, 0.01, 0.001), target_fraction=None, decode=None)
    there = 96 / (0.01 + 0.001 * 96)
    assert drift(reading, point(96, 1.005 * there)) is None
    assert drift(reading, point(96, 0.5 * there)) == pytest.approx(0.5, rel=0.02)
    assert drift(reading, point(4096, 1.0)) is None
    assert drift(reading, None) is None
