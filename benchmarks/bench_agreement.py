"""`bstar bench` beside `vllm bench serve`: the same server, the same load, in turns; ratios within each pair.

    python benchmarks/bench_agreement.py --url http://127.0.0.1:8000 --model-dir DIR --vllm VENV [--pairs 5 --api chat]

The server is real vLLM (see tests/vllm/make_tiny_model.py for a model), with --no-enable-prefix-caching: the other
client's prompts are runs of consecutive ids, which a small vocabulary repeats, ours are new every time. Bars, on the
median of the ratios: output throughput, mean TPOT and mean ITL within 5 %, mean TTFT within 10 %; p99s by overlapping
intervals over the pairs. Both clients share two cores with the server here: prompts long enough that TTFT is the
server's (256 tokens), not what eight answers and eight requests at one moment cost a client.

Where definitions differ (docs/bench.md): with chat, vLLM's client takes the role-only chunk, which the server sends
together with the first token, for a token: a gap of nearly 0 more a request. So its ITL counts times n / (n - 1) there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bstar.measure import BodyOptions, RunOptions, bench, parse_endpoint, prepare
from bstar.measure.job import TextSource
from bstar.metrics.intervals import replications
from bstar.traffic import Traffic, closed_loop, poisson

HERE = Path(__file__).resolve().parent
BARS = {"output tok/s": 0.05, "mean TPOT": 0.05, "mean ITL": 0.05, "mean TTFT": 0.10}
TAILS = ("p99 TTFT", "p99 TPOT", "p99 ITL")


class VllmBench:
    """The other client, kept warm."""

    def __init__(self, venv: Path) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
        self.process = subprocess.Popen([venv / "bin" / "python", HERE / "vllm_bench_loop.py"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                return line[2:]
        raise RuntimeError("vLLM's client ended")

    def run(self, arguments: list[str]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.read())
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def theirs(client: VllmBench, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Figures of vLLM's client."""
    path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[options.api]
    arguments = ["--backend", "openai-chat" if options.api == "chat" else "openai", "--base-url", options.url,
                 "--endpoint", path, "--model", str(options.model_dir), "--served-model-name", options.model,
                 "--dataset-name", "random", "--random-input-len", str(options.input),
                 "--random-output-len", str(options.output), "--num-prompts", str(options.requests), "--ignore-eos",
                 "--temperature", "0", "--seed", str(seed), "--percentile-metrics", "ttft,tpot,itl,e2el"]
    arguments += (["--request-rate", str(options.rate)] if options.rate else
                  ["--max-concurrency", str(options.concurrency)])  # fmt: skip
    found = client.run(arguments)
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} requests failed")
    scale = 1e-3
    chat = options.output / (options.output - 1) if options.api == "chat" else 1.0
    return {"output tok/s": found["output_throughput"], "mean TPOT": found["mean_tpot_ms"] * scale,
            "mean ITL": found["mean_itl_ms"] * scale * chat, "mean TTFT": found["mean_ttft_ms"] * scale,
            "p99 TTFT": found["p99_ttft_ms"] * scale, "p99 TPOT": found["p99_tpot_ms"] * scale,
            "p99 ITL": found["p99_itl_ms"] * scale, "prompt tokens": found["total_input_tokens"]}  # fmt: skip


def ours(server: Any, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Figures of `bstar bench`."""
    load = _load(options, seed)
    run = bench(server, load, RunOptions(workers=1))
    summary = run.summary
    assert summary.num_finished == options.requests, run.to_dict()["errors"]
    figures = {"output tok/s": summary.output_tokens_per_s, "mean TPOT": summary.tpot_s.mean,
               "mean ITL": run.chunk_gap_s.mean, "mean TTFT": summary.ttft_s.mean, "p99 TTFT": summary.ttft_s.p99,
               "p99 TPOT": summary.tpot_s.p99, "p99 ITL": run.chunk_gap_s.p99,
               "prompt tokens": summary.input_tokens}  # fmt: skip
    return {name: float(value or 0.0) for name, value in figures.items()}


def _load(options: argparse.Namespace, seed: int) -> Traffic:
    if options.rate:
        return poisson(options.rate, options.input, options.output, options.requests, seed=seed, rescale=True)
    return closed_loop(options.concurrency, options.input, options.output, options.requests, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, default=os.environ.get("BSTAR_VLLM_VENV", ".vllm"))
    parser.add_argument("--api", choices=["completions", "chat"], default="completions")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    options = parser.parse_args()
    server = prepare(parse_endpoint(options.url, model=options.model, api=options.api), body=BodyOptions(),
                     text=TextSource(as_ids=False, tokenizer_file=str(options.model_dir / "tokenizer.json")))
    client = VllmBench(Path(options.vllm))
    pairs = []
    try:
        theirs(client, options, 999)  # both warm
        ours(server, options, 999)
        for number in range(options.pairs):
            one, two = (lambda n=number: ours(server, options, n)), (lambda n=number: theirs(client, options, 100 + n))
            if number % 2:
                other = two()
                pairs.append((one(), other))
            else:
                pairs.append((one(), two()))
    finally:
        client.close()
    sys.exit(report(pairs, options))


def report(pairs: list[tuple[dict[str, float], dict[str, float]]], options: argparse.Namespace) -> int:
    """Print the table; 1 where a bar is missed."""
    load = f"{options.rate}/s" if options.rate else f"{options.concurrency} clients"
    print(f"{len(pairs)} pairs, {options.api}, {load}, {options.input} in / {options.output} out, "
          f"{options.requests} requests")
    print(f"{'':<14}{'bstar':>12}{'vllm bench':>12}{'median ratio':>14}{'ratios':>34}")
    missed = 0
    for name in (*BARS, *TAILS):
        a, b = [p[0][name] for p in pairs], [p[1][name] for p in pairs]
        ratios = sorted(x / y for x, y in zip(a, b, strict=True))
        ratio = statistics.median(ratios)
        if name in BARS:
            held = abs(ratio - 1.0) <= BARS[name]
            said = f"within {BARS[name]:.0%}" if held else f"MISSED {BARS[name]:.0%}"
        else:
            one, two = replications(a), replications(b)
            assert one.mean is not None and two.mean is not None
            held = abs(one.mean - two.mean) <= (one.half_width or 0.0) + (two.half_width or 0.0)
            said = "intervals overlap" if held else "INTERVALS APART"
        missed += not held
        unit = 1.0 if "tok/s" in name else 1e3
        print(f"{name:<14}{statistics.median(a) * unit:>12.2f}{statistics.median(b) * unit:>12.2f}{ratio:>14.3f}   "
              + " ".join(f"{r:.3f}" for r in ratios) + f"   {said}")
    tokens = [p[0]["prompt tokens"] / p[1]["prompt tokens"] for p in pairs]
    print(f"prompt tokens, ours / theirs: {statistics.median(tokens):.4f} (ms, but tok/s)")
    return 1 if missed else 0


if __name__ == "__main__":
    main()
