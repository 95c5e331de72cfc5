"""`bstar simulate`: the contract of its JSON, its text, its files, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

BASE = ("simulate", "llama-3.1-8b", "--gpu", "h100-sxm-80gb")
LOAD = ("--input", "512", "--output", "uniform:1-200", "--rate", "8", "--num-requests", "400")
KEYS = {
    "num_requests", "input_tokens", "output_tokens", "ttft_s", "tpot_s", "itl_s", "e2e_s", "output_tokens_per_s",
    "requests_per_s", "goodput_requests_per_s", "num_preemptions", "kv_usage", "mbu", "mfu", "steady_state", "timing",
}  # fmt: skip


def test_the_contract(bstar_json: Run) -> None:
    sheet = bstar_json(*BASE, *LOAD, "--slo", "ttft=500ms,tpot=20ms")
    assert set(sheet) >= KEYS
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(sheet[name]) >= {"mean", "p50", "p95", "p99"}
        assert 0 < sheet[name]["p50"] <= sheet[name]["p95"] <= sheet[name]["p99"]
    assert set(sheet["timing"]) == {"compile_s", "simulate_s", "total_s"}
    assert sheet["num_requests"] == 400
    assert sheet["input_tokens"] == 400 * 512
    assert sheet["steady_state"] is True
    assert sheet["tpot_s"]["count"] < 400  # some answers have one token: they have no TPOT
    assert sheet["goodput_requests_per_s"] <= sheet["requests_per_s"]
    for fraction in ("kv_usage", "mbu", "mfu", "slo_attainment_fraction"):
        assert 0 <= sheet[fraction] <= 1
    assert sheet["deployment"]["max_num_seqs"] == 1024


def test_the_library_gives_the_same_numbers(bstar_json: Run) -> None:
    import bstar

    sheet = bstar_json(*BASE, *LOAD, "--seed", "7")
    load = bstar.traffic.poisson(rate_per_s=8, input_tokens=512, output_tokens="uniform:1-200", num_requests=400,
                                 seed=7)
    result = bstar.simulate(bstar.deployment(model="llama-3.1-8b", gpu="h100-sxm-80gb"), load, seed=0)
    for array in ("arrival_s", "first_token_s", "finish_s", "input_tokens", "output_tokens", "num_preemptions"):
        assert getattr(result, array).shape == (400,)
    assert sheet["ttft_s"]["p99"] == result.summary.ttft_s.p99
    assert sheet["output_tokens"] == int(result.output_tokens.sum())


def test_closed_loop_prefix_and_sessions_of_options(bstar_json: Run) -> None:
    plain = bstar_json(*BASE, "--input", "2000", "--output", "50", "--concurrency", "8")
    assert plain["num_requests"] == 80
    assert plain["load"]["concurrency"] == 8
    cached = bstar_json(*BASE, "--input", "2000", "--output", "50", "--concurrency", "8", "--prefix", "1600")
    assert cached["cached_tokens"] >= 70 * 1600
    assert cached["ttft_s"]["mean"] < plain["ttft_s"]["mean"]
    thinking = bstar_json(*BASE, "--input", "200", "--output", "50", "--concurrency", "8", "--think", "2s")
    assert thinking["mean_in_flight"] < 5


def test_overload_is_named(bstar: Run, bstar_json: Run) -> None:
    load = ("--input", "900", "--output", "200", "--rate", "60", "--num-requests", "2000", "--max-num-seqs", "64")
    sheet = bstar_json(*BASE, *load)
    assert sheet["steady_state"] is False
    assert "no steady state: arrivals exceed capacity by" in sheet["steady"]["message"]
    assert "no steady state: arrivals exceed capacity by" in bstar(*BASE, *load).stdout


def test_text_fits_one_screen(bstar: Run) -> None:
    text = bstar(*BASE, *LOAD, "--slo", "chat", "--replications", "3").stdout
    lines = text.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 120 for line in lines)
    for word in ("TTFT", "TPOT", "ITL", "E2E", "tok/s", "goodput", "KV cache", "running"):
        assert word in text


def test_files(bstar: Run, tmp_path: Path) -> None:
    requests, trace = tmp_path / "r.csv", tmp_path / "t.json"
    done = bstar(*BASE, *LOAD, "--requests-out", str(requests), "--trace-out", str(trace), "--json")
    assert done.exit_code == 0
    json.loads(done.stdout)
    assert len(requests.read_text().splitlines()) == 401
    assert json.loads(trace.read_text())["traceEvents"]


def test_compare(bstar: Run, bstar_json: Run) -> None:
    load = ("--input", "300", "--output", "uniform:10-300", "--rate", "5", "--num-requests", "150")
    sheet = bstar_json(*BASE, *load, "--compare", "static,continuous")
    assert sheet["gain"]["continuous"]["e2e_s.mean"] > 1
    assert set(sheet["runs"]["static"]) >= KEYS
    assert "better" in bstar(*BASE, *load, "--compare", "static,continuous").stdout


def test_series_and_replications(bstar_json: Run) -> None:
    sheet = bstar_json(*BASE, *LOAD, "--series-points", "20", "--replications", "2")
    assert len(sheet["series"]["time_s"]) == len(sheet["series"]["kv_usage"]) == 20
    assert sheet["replications"]["count"] == 2
    assert sheet["replications"]["confidence"]["ttft_s.mean"]["half_width"] > 0


def test_a_trace_is_replayed(bstar_json: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i * 0.5},{100 + i},{5 + i % 7}\n"
                                                                      for i in range(60)))
    sheet = bstar_json(*BASE, "--trace", str(path))
    assert sheet["num_requests"] == 60
    assert sheet["input_tokens"] == sum(100 + i for i in range(60))
    fast = bstar_json(*BASE, "--trace", str(path), "--rate", "20")
    assert fast["duration_s"] < 0.2 * sheet["duration_s"]


@pytest.mark.parametrize(("args", "says"), [
    (("--input", "10", "--output", "10"), "--rate R, --concurrency C or --trace FILE"),
    (("--input", "10", "--rate", "1"), "--output"),
    (("--input", "10", "--output", "10", "--rate", "1", "--concurrency", "2"), "contradict"),
    ((*LOAD, "--policy", "magic"), "policy"),
    ((*LOAD, "--compare", "static"), "two or more"),
    ((*LOAD, "--requests-out", "r.xls"), "must end with"),
    ((*LOAD, "--trace-out", "/no/such/folder/t.json"), "folder"),
    (("--input", "10", "--output", "10", "--rate", "1", "--think", "1s"), "--think"),
    (("--input", "10", "--output", "10", "--concurrency", "1", "--duration", "1s"), "--duration"),
])  # fmt: skip
def test_bad_input_is_one_line(bstar: Run, args: tuple[str, ...], says: str) -> None:
    done = bstar(*BASE, *args)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_does_not_fit_is_exit_code_1(bstar: Run) -> None:
    done = bstar("simulate", "llama-3.1-70b", "--gpu", "h100-sxm-80gb", *LOAD)
    assert done.exit_code == 1
    assert "does not fit" in done.stderr


def test_several_engines(bstar_json: Run) -> None:
    load = ("--input", "400", "--output", "100", "--rate", "30", "--num-requests", "300")
    alone = bstar_json(*BASE, *load)
    four = bstar_json(*BASE, *load, "--replicas", "4", "--router", "least-outstanding")
    assert set(four) >= KEYS
    assert four["tpot_s"]["mean"] < alone["tpot_s"]["mean"]
    assert four["cluster"]["router"] == "least-outstanding"
    assert sum(four["cluster"]["requests_by_replica"].values()) == 300
    pools = bstar_json(*BASE, *load, "--prefill-replicas", "1", "--decode-replicas", "2")
    assert pools["output_tokens"] == 300 * 100
    assert pools["cluster"]["moved_bytes"] > 300 * 400 * 100_000
    gain = bstar_json(*BASE, *load, "--compare", "mixed,disaggregated")["gain"]["disaggregated"]
    assert gain["tpot_s.mean"] > 0
    timed = bstar_json(*BASE, *load, "--replicas", "2", "--fail", "0@2s+500ms", "--startup", "1s", "--drain", "1@6s")
    assert timed["num_finished"] == 300


def test_replicas_of_several_engines(bstar: Run, bstar_json: Run) -> None:
    both = bstar_json(*BASE, *LOAD, "--dp", "2", "--replicas", "2")
    assert both["cluster"]["replicas"] == 4
    assert both["tpot_s"] == bstar_json(*BASE, *LOAD, "--replicas", "4")["tpot_s"]
    done = bstar("simulate", "mixtral-8x7b", "--gpu", "h200", "--dp", "2", "--enable-expert-parallel", *LOAD,
                 "--replicas", "2")  # fmt: skip
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "replicas: " in done.stderr and "--rate R/2" in done.stderr


@pytest.mark.parametrize(("args", "says"), [
    (("--prefill-replicas", "1"), "--decode-replicas"),
    (("--kv-link", "50GB/s"), "--prefill-replicas"),
    (("--replicas", "2", "--router", "magic"), "magic"),
    (("--replicas", "2", "--policy", "static"), "--policy"),
    (("--replicas", "2", "--compare", "static,continuous"), "one engine"),
    (("--fail", "x"), "x"),
    (("--drain", "0@10x"), "drain: unit 'x'"),
    (("--startup", "5s"), "--startup: is for engines that start later"),
    (("--replicas", "2", "--startup", "5s", "--fail", "0@10s"), "--startup: is for engines that start later"),
])  # fmt: skip
def test_contradictions_of_several_engines(bstar: Run, args: tuple[str, ...], says: str) -> None:
    done = bstar(*BASE, *LOAD, *args)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("policy", [
    "static", "unchunked", "sglang", "sglang-mixed", "trtllm-no-evict", "trtllm-max-utilization", "swap",
    "continuous:watermark_fraction=0.05,max_num_active_seqs=16",
])  # fmt: skip
def test_every_policy_serves_every_request(bstar_json: Run, policy: str) -> None:
    sheet = bstar_json(*BASE, "--input", "300", "--output", "uniform:1-60", "--rate", "20", "--num-requests", "80",
                       "--policy", policy)
    assert sheet["num_finished"] == 80
    assert sheet["policy"] == policy
    assert sheet["itl_s"]["count"] == sheet["output_tokens"] - 80


def said(done: Any) -> str:
    """What stderr has, but for the note of a machine that runs this path for the first time."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: compiling the simulator")]
    return "\n".join(lines)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C in the n-th call of the compiled engine from now on; the first loads it."""
    from bstar.sim.engine import KernelEngine

    advance = KernelEngine.advance

    def at(number: int) -> None:
        calls: list[float] = []

        def stopped(self: KernelEngine, until_s: float) -> bool:
            calls.append(until_s)
            if len(calls) == number:
                raise KeyboardInterrupt
            return advance(self, until_s)

        monkeypatch.setattr(KernelEngine, "advance", stopped)

    return at


def test_an_interrupt_prints_what_happened(
    bstar: Run, bstar_json: Run, interrupt: Callable[[int], None], tmp_path: Path
) -> None:
    interrupt(5)
    sheet = bstar_json(*BASE, *LOAD, exit_code=130)
    assert sheet["interrupted"] is True
    assert 0 < sheet["num_finished"] <= sheet["num_requests"] < 400
    assert sheet["steady_state"] is None
    assert sheet["steady"]["message"] is None
    interrupt(5)
    out = tmp_path / "r.csv"
    done = bstar(*BASE, *LOAD, "--requests-out", str(out))
    assert done.exit_code == 130
    assert "interrupted: what happened so far" in done.stdout
    assert "steady" not in done.stdout
    assert len(out.read_text().splitlines()) == sheet["num_requests"] + 1  # those that were sent


def test_an_interrupt_before_the_first_step_is_one_line(bstar: Run, interrupt: Callable[[int], None]) -> None:
    for more in ((), ("--json",), ("--replicas", "2"), ("--replications", "2")):
        interrupt(1)
        done = bstar(*BASE, *LOAD, *more)
        assert (done.exit_code, done.stdout, said(done)) == (130, "", "interrupted before the first step")


def test_a_second_interrupt_ends_at_once(bstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from bstar.sim.engine import KernelEngine

    advance, calls = KernelEngine.advance, []

    def stopped(self: KernelEngine, until_s: float) -> bool:
        calls.append(until_s)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return advance(self, until_s)

    monkeypatch.setattr(KernelEngine, "advance", stopped)
    done = bstar(*BASE, *LOAD)
    assert (done.exit_code, done.stdout, said(done)) == (130, "", "interrupted before all was written")


def test_an_interrupt_of_what_is_written_is_heard(bstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bstar.interfaces.cli.simulate.show_run", slow)
    done = bstar(*BASE, *LOAD)
    assert (done.exit_code, said(done)) == (130, "interrupted before all was written")


def test_an_interrupted_comparison_is_of_what_served_all(
    bstar: Run, bstar_json: Run, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[int], None]
) -> None:
    interrupt(5)
    sheet = bstar_json(*BASE, *LOAD, "--compare", "static,continuous,unchunked", exit_code=130)
    assert sheet["interrupted"] is True
    assert list(sheet["runs"]) == ["static"]
    assert sheet["left_out"] == ["continuous", "unchunked"]
    assert sheet["gain"] == {}
    interrupt(5)
    done = bstar(*BASE, *LOAD, "--compare", "static,continuous")
    assert done.exit_code == 130
    assert "interrupted: without continuous" in done.stdout
    interrupt(5)
    none = bstar(*BASE, *LOAD, "--compare", "continuous,static")
    assert (none.exit_code, none.stdout) == (130, "")
    assert said(none) == "interrupted before continuous had served all requests: nothing to compare"


def test_interrupted_replications_are_the_whole_ones(
    bstar: Run, bstar_json: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bstar.sim.run import simulate

    numbers: list[int] = []

    def stopped(*args: Any, **kwargs: Any) -> Any:
        numbers.append(kwargs["seed"])
        if len(numbers) == 3:
            raise KeyboardInterrupt
        return simulate(*args, **kwargs)

    monkeypatch.setattr("bstar.sim.run.simulate", stopped)
    sheet = bstar_json(*BASE, *LOAD, "--replications", "5", exit_code=130)
    assert sheet["interrupted"] is True
    assert sheet["replications"]["count"] == 2
    assert sheet["num_finished"] == 400
    numbers.clear()
    done = bstar(*BASE, *LOAD, "--replications", "5")
    assert done.exit_code == 130
    assert "interrupted: 2 of 5 runs were whole" in done.stdout


@pytest.mark.parametrize(("args", "says"), [
    (("--replicas", "100000"), "replicas: at most 1,024 engines"),
    (("--prefill-replicas", "1", "--decode-replicas", "5000"), "decode replicas: at most 1,024 engines"),
    (("--autoscale", "concurrency=20,max=100000"), "autoscale max: at most 1,024 engines"),
    (("--autoscale", "concurrency=20,min=2000"), "autoscale min: at most 1,024 engines"),
    (("--autoscale", "concurrency=0.001,interval=0"), "at most 60 engines"),
    (("--requests-out", "same.json", "--trace-out", "./same.json"), "is also that of --requests-out"),
    (("--trace-out", "x.csv"), "must end with .json"),
    (("--series-points", "5"), "add --json"),
    (("--series-points", "5", "--compare", "static,continuous", "--json"), "leave --requests-out"),
])  # fmt: skip
def test_what_cannot_be_done_is_one_line(
    bstar: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], says: str
) -> None:
    if "at most 60" in says:  # where the autoscaler itself comes to the bound
        monkeypatch.setattr("bstar.sim.cluster.fleet._MOST_ENGINES", 60)
    done = bstar(*BASE, *LOAD, *args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in said(done)
    assert said(done).count("error: ") == len(said(done).splitlines()) == 1


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_trace_does_not_go_where_the_report_goes(more: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", "bstar.interfaces.cli", *BASE, *LOAD, *more, "--trace-out",
                           "/dev/stdout"], capture_output=True, text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --trace-out: '/dev/stdout' is where the report goes; give a file\n"


def test_a_shared_text_without_a_cache_is_told(bstar: Run, bstar_json: Run) -> None:
    prefix = ("--prefix", "400")
    sheet = bstar_json(*BASE, *LOAD, *prefix, "--no-enable-prefix-caching")
    assert any("computed anew" in note for note in sheet["notes"])
    assert sheet["cached_tokens"] == 0
    assert "computed anew" not in bstar(*BASE, *LOAD, *prefix).stderr


def test_compiling_is_told_once_on_stderr(bstar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import njit

    from bstar.sim import run

    real = run.deployed_engine

    def compiles(*args: Any) -> Any:
        njit(lambda x: x + 1)(1)
        njit(lambda x: x + 2)(1)
        return real(*args)

    monkeypatch.setattr(run, "deployed_engine", compiles)
    assert bstar(*BASE, *LOAD).stderr.count("compiling the simulator, once on this machine") == 1
