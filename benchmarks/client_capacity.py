"""How much one client process measures before it measures itself: bstar, vLLM's client and GuideLLM beside each other.

    python benchmarks/client_capacity.py [--vllm VENV --model-dir DIR] [--guidellm VENV] [--seconds 6] [--quick]

A null server (null_server.py) streams 50 chunks a request, one every 100 ms, the first at once; requests come as a
Poisson process. So R requests per second are 5·R streams at a time and 50·R chunks per second, every TTFT above 0 and
every gap other than 100 ms is the client's (or this machine's) doing. A client carries a rate if

    it is done in the time that the load takes (5 % more at most), and
    99 of 100 first chunks, and 99 of 100 gaps, are at most 20 ms off.

Bars: 2,000 streams and 20,000 chunks/s in one process; dispatch delay p99 below 5 ms at 500 requests/s; twice the
largest rate that vLLM's client and GuideLLM carry. Needs two free cores: one for the server, one for the client.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_agreement import VllmBench

from bstar.measure import RunOptions, bench, parse_endpoint, prepare
from bstar.traffic import poisson

HERE = Path(__file__).resolve().parent
CHUNKS, GAP_S, LATE_S = 50, 0.1, 0.02
RATES = (10, 25, 50, 100, 150, 200, 300, 400, 500, 700, 1000, 1400, 2000)
PORT = 18123


@dataclass(frozen=True)
class Carried:
    """What a client made of a rate."""

    rate: float
    stretch: float  # duration / the duration that the load takes
    ttft_p99_s: float
    gap_off_p99_s: float
    cpu: float  # share of a core
    dispatch_p99_s: float = float("nan")

    @property
    def good(self) -> bool:
        return self.stretch <= 1.05 and self.ttft_p99_s <= LATE_S and self.gap_off_p99_s <= LATE_S

    def line(self, name: str) -> str:
        return (f"{name:<12}{self.rate:>6.0f} requests/s {self.rate * CHUNKS * GAP_S:>7,.0f} streams "
                f"{self.rate * CHUNKS / self.stretch:>8,.0f} chunks/s   TTFT p99 {self.ttft_p99_s * 1e3:>7.1f} ms   "
                f"gap off p99 {self.gap_off_p99_s * 1e3:>7.1f} ms   "
                f"dispatch p99 {self.dispatch_p99_s * 1e3:>6.2f} ms   "
                f"{self.cpu:>4.0%} of a core   {'carried' if self.good else '-'}")  # fmt: skip


def ours(rate: float, seconds: float) -> Carried:
    server = prepare(parse_endpoint(f"http://127.0.0.1:{PORT}", model="tiny"), check=False)
    count = round(rate * seconds)
    run = bench(server, poisson(rate, 32, CHUNKS, count, seed=1, rescale=True), RunOptions(workers=1))
    assert run.table.succeeded.all(), run.to_dict()["errors"]
    off = np.abs(run.table.chunk_gaps_s() - GAP_S)
    cpu, delay = run.health.cpu_fraction, run.health.dispatch_delay_s.p99
    return Carried(rate, run.summary.duration_s / ideal(rate, count), run.summary.ttft_s.p99 or 0.0,
                   float(np.percentile(off, 99)), cpu or 0.0, delay or 0.0)


def vllm(client: VllmBench, model_dir: Path, rate: float, seconds: float) -> Carried:
    count = round(rate * seconds)
    found = client.run([
        "--backend", "openai", "--base-url", f"http://127.0.0.1:{PORT}", "--endpoint", "/v1/completions", "--model",
        str(model_dir), "--served-model-name", "tiny", "--dataset-name", "random", "--random-input-len", "32",
        "--random-output-len", str(CHUNKS), "--num-prompts", str(count), "--request-rate", str(rate), "--ignore-eos",
        "--seed", "1", "--percentile-metrics", "ttft,tpot,itl,e2el", "--ready-check-timeout-sec", "0",
    ])  # fmt: skip
    off = np.abs(np.concatenate([np.asarray(i) for i in found["itls"]]) - GAP_S)
    return Carried(rate, found["duration"] / ideal(rate, count), found["p99_ttft_ms"] * 1e-3,
                   float(np.percentile(off, 99)), found["cpu_s"] / found["duration"])


def guidellm(venv: Path, model_dir: Path, rate: float, seconds: float) -> Carried:
    """GuideLLM with one worker process. It keeps means of gaps only, so its lateness is judged by TTFT and dispatch."""
    count = round(rate * seconds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [venv / "bin" / "guidellm", "run", "--backend",
             f"kind=openai_http,target=http://127.0.0.1:{PORT},model=tiny", "--profile", f"kind=poisson,rate={rate}",
             "--constraint", f"kind=max_requests,count={count}", "--tokenizer",
             f"kind=huggingface_auto,model={model_dir}", "--data",
             f"kind=synthetic_text,prompt_tokens=32,output_tokens={CHUNKS}", "--output", f"kind=json,path={file}",
             "--disable-console"],
            check=True, capture_output=True, timeout=300, env={
                **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "GUIDELLM__MAX_WORKER_PROCESSES": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = json.loads(file.read_text())["benchmarks"][0]["requests"]["successful"]
    took = max(r["request_end_time"] for r in done) - min(r["request_start_time"] for r in done)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    off = [abs(r["inter_token_latency_ms"] * 1e-3 - GAP_S) for r in done]
    delays = [r["request_dispatch_delay"] for r in done]
    return Carried(rate, took / ideal(rate, len(done)),
                   float(np.percentile([r["time_to_first_token_ms"] * 1e-3 for r in done], 99)),
                   float(np.percentile(off, 99)), cpu / took, float(np.percentile(delays, 99)))


def ideal(rate: float, count: int) -> float:
    """Seconds from the first request to the last token: the arrivals, and one answer."""
    return count / rate + (CHUNKS - 1) * GAP_S


def largest(name: str, measure: Callable[[float], Carried], rates: tuple[float, ...]) -> tuple[float, list[Carried]]:
    """The largest rate that is carried (a missed rate is tried twice: the machine has hiccups)."""
    best, seen = 0.0, []
    for rate in rates:
        for _ in range(2):
            try:
                found = measure(rate)
            except Exception as error:
                print(f"{name:<12}{rate:>6.0f} requests/s: {type(error).__name__}: {error}"[:200], flush=True)
                return best, seen
            seen.append(found)
            print(found.line(name), flush=True)
            if found.good:
                break
        if not found.good:
            break
        best = rate
    return best, seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--guidellm", type=Path)
    parser.add_argument("--model-dir", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--quick", action="store_true", help="only 500 requests/s of bstar")
    options = parser.parse_args()
    server = subprocess.Popen([sys.executable, HERE / "null_server.py", str(PORT), "--gap", str(GAP_S)])
    try:
        time.sleep(1.0)
        sys.exit(compare(options))
    finally:
        server.terminate()
        server.wait()


def compare(options: argparse.Namespace) -> int:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    rates = (500,) if options.quick else RATES
    best, seen = largest("bstar", lambda r: ours(r, options.seconds), rates)
    others = {}
    if options.vllm and options.model_dir:
        client = VllmBench(options.vllm)
        try:
            others["vllm bench"] = largest(
                "vllm bench", lambda r: vllm(client, options.model_dir, r, options.seconds), RATES)[0]
        finally:
            client.close()
    if options.guidellm and options.model_dir:
        others["guidellm"] = largest(
            "guidellm", lambda r: guidellm(options.guidellm, options.model_dir, r, options.seconds), RATES)[0]
    at_500 = [c.dispatch_p99_s for c in seen if c.rate == 500]
    bars = {"2,000 streams and 20,000 chunks/s": best >= 400, "dispatch delay p99 < 5 ms at 500/s":
            bool(at_500) and min(at_500) < 0.005}  # fmt: skip
    for name, rate in others.items():
        bars[f"twice {name} ({rate:.0f}/s)"] = best >= 2 * rate
    print(f"bstar carries {best:.0f} requests/s: {best * CHUNKS * GAP_S:,.0f} streams, {best * CHUNKS:,.0f} chunks/s")
    for name, held in bars.items():
        print(f"  {'met   ' if held else 'MISSED'} {name}")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    main()
