"""The options of `bstar bench`: the server, how the load is sent, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import ConfigError, SpecError, UnitError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.connection import connection_options, endpoint_at, take_connection
from bstar.interfaces.cli.params import POSITIVE, SECONDS, apply
from bstar.interfaces.cli.sections import section
from bstar.interfaces.cli.traffic import build_traffic, take_traffic

if TYPE_CHECKING:
    from bstar.measure.datasets import Dataset
    from bstar.measure.endpoint import Endpoint
    from bstar.measure.job import TextSource
    from bstar.measure.payloads import BodyOptions
    from bstar.traffic.load import Traffic

# What the parts of a load are called in Python, and which options give them.
_OPTIONS = {"input_tokens": "--input", "output_tokens": "--output", "trace": "--trace", "rate_per_s": "--rate",
            "rate": "--rate-curve", "num_requests": "--num-requests", "duration_s": "--duration",
            "duration": "--duration",
            "turns": "--turns", "think_s": "--think", "concurrency": "--concurrency", "burstiness": "--burstiness",
            "warmup_requests": "--warmup-requests", "warm-up": "--warmup-requests", "num_sessions": "--num-requests",
            "think time": "--think"}

# Seconds of load where nothing says how long, and how many requests that may be.
_USUAL_S, _FEWEST, _MOST = 60.0, 20, 2000
_MOST_WORKERS = 256
# A load generator keeps what it sends in memory, and no server that is measured takes more.
_MOST_REQUESTS, _MOST_CLIENTS = 10_000_000, 1_000_000

section("Server", "url", "model", "api", "request_timeout", "stall_timeout")
section("Load", "turns", "dataset", "max_in_flight", "ramp_up", "stop_after")
section("Requests", "tokenizer", "ignore_eos", "temperature", "extra_body", "continuous_usage", "return_token_ids",
        "content_salt")
section("Measuring", "sweep", "warmup", "cooldown", "runs", "until", "max_runs", "workers", "max_error_fraction",
        "allow_client_limited")
section("Watching", "metrics", "telemetry", "scrape_interval")
section("Output", "out", "no_out", "resume")

server_options = apply(
    click.option("--url", required=True, metavar="URL", help="The server: http://127.0.0.1:8000."),
    click.option("--model", metavar="NAME", help="As the server calls it (default: the first that it serves)."),
    click.option("--api", type=click.Choice(["completions", "chat"]), help="Which API (completions)."),
    connection_options,
    click.option("--timeout", "request_timeout", type=SECONDS, default="3600s", show_default=True, metavar="T",
                 help="For a whole answer."),
    click.option("--stall-timeout", type=SECONDS, default="300s", show_default=True, metavar="T",
                 help="Without a byte."),
)

sending_options = apply(
    click.option("--turns", metavar="DIST",
                 help="Conversations (--num-requests of them) of so many turns, started at --rate or held by "
                      "--concurrency users."),
    click.option("--dataset", type=click.Path(path_type=Path), metavar="FILE",
                 help="Prompts of a file: ShareGPT-like JSON, or JSON lines with prompt, messages or ids."),
    click.option("--max-in-flight", type=POSITIVE, metavar="N", help="Open loop: hold requests back beyond so many."),
    click.option("--ramp-up", type=SECONDS, metavar="T", help="Closed loop: clients start one by one over so long."),
    click.option("--stop-after", type=SECONDS, metavar="T", help="Send nothing later than that."),
    click.option("--tokenizer", metavar="FILE", help="tokenizer.json of the model, for exact texts (chat)."),
    click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True,
                 help="Ask for answers of exactly the length of the load."),
    click.option("--temperature", type=float, default=0.0, show_default=True, metavar="F"),
    click.option("--extra-body", metavar="JSON", help="Merged into every request."),
    click.option("--continuous-usage", is_flag=True, help="Ask for running counts in every chunk (vLLM, SGLang)."),
    click.option("--return-token-ids", is_flag=True, help="Ask for token ids in every chunk (vLLM)."),
    click.option("--content-salt", metavar="TEXT",
                 help="Draw the same prompts again (default: new ones, so that no prefix cache knows them)."),
    click.option("--workers", default="1", show_default=True, metavar="N|ray",
                 help="Processes that send; ray: one on every node of a Ray cluster."),
    click.option("--warmup", type=SECONDS, default="0s", metavar="T", help="The first seconds do not count."),
    click.option("--cooldown", type=SECONDS, default="0s", metavar="T", help="Nor do the last."),
    click.option("--max-error-fraction", type=float, default=0.05, show_default=True, metavar="F",
                 help="With more failures it is no result (exit code 1)."),
    click.option("--allow-client-limited", is_flag=True,
                 help="Exit code 0 even where the client was the limit; the verdict still says so."),
)

measuring_options = apply(
    click.option("--sweep", metavar="AXIS=LOADS",
                 help="concurrency=1,2,4,8 · rate=1..32 (doublings) · concurrency=auto: search for the SLO's "
                      "goodput, its end, and the knee."),
    click.option("--runs", type=POSITIVE, default=1, metavar="N", help="The same load so many times."),
    click.option("--until", metavar="FIGURE=F",
                 help="Again until the 95 % interval is as narrow: tpot_s=2%, ttft_s.p99=5%, output_tokens_per_s=1%."),
    click.option("--max-runs", type=POSITIVE, default=10, show_default=True, metavar="N",
                 help="At most, with --until."),
    click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
                 help="Folder of the run (default: runs/bench-TIME); an existing one gets a new folder inside."),
    click.option("--no-out", is_flag=True, help="Write nothing."),
    click.option("--resume", is_flag=True, help="Go on with the interrupted sweep in --out."),
)


def take_endpoint(options: dict[str, Any]) -> Endpoint:
    """The server of the options (removed from `options`)."""
    from bstar.measure.endpoint import Timeouts

    url, api = options.pop("url"), options.pop("api")
    if api is None:
        api = "chat" if url.rstrip("/").endswith("/chat/completions") else "completions"
    timeouts = Timeouts(stall_s=options.pop("stall_timeout"), request_s=options.pop("request_timeout"))
    return endpoint_at(url, take_connection(options), model=options.pop("model") or "", api=api, timeouts=timeouts)


def take_body(options: dict[str, Any]) -> BodyOptions:
    """What requests ask for beside prompt and length."""
    from bstar.measure.payloads import BodyOptions

    extra, text = {}, options.pop("extra_body")
    if text is not None:
        try:
            extra = json.loads(text)
        except ValueError:
            raise SpecError('--extra-body: is no JSON; write it like \'{"top_p": 0.9}\'') from None
        if not isinstance(extra, dict):
            raise SpecError("--extra-body: is no JSON object")
    exact = options.pop("ignore_eos")
    return BodyOptions(
        ignore_eos=exact, temperature=options.pop("temperature"), extra=extra,
        continuous_usage=options.pop("continuous_usage"), return_token_ids=options.pop("return_token_ids"),
    )  # fmt: skip


def take_text(options: dict[str, Any]) -> TextSource:
    """How prompts are made."""
    from bstar.measure.job import TextSource

    return TextSource(tokenizer_file=options.pop("tokenizer"))


def take_workers(options: dict[str, Any]) -> Any:
    text = options.pop("workers")
    if text == "ray":
        return "ray"
    if not text.isdecimal() or int(text) < 1:
        raise SpecError(f"--workers: must be a number of processes, 1 or more, or ray; is {text!r}")
    if int(text) > _MOST_WORKERS:
        raise SpecError(f"--workers: at most {_MOST_WORKERS} processes, are {text}; --workers ray takes more machines")
    return int(text)


def take_dataset(options: dict[str, Any], text: TextSource) -> Dataset | None:
    """The data set of the options, read."""
    path = options.pop("dataset")
    if path is None:
        return None
    if any(options.get(key) is not None for key in ("input_lengths", "trace", "turns")):
        raise SpecError("--dataset: the prompts come from the file; leave --input, --trace and --turns out")
    from bstar.measure.datasets import read_dataset
    from bstar.measure.tokenizers import LocalTokenizer

    return read_dataset(path, tokenizer=LocalTokenizer(text.tokenizer_file) if text.tokenizer_file else None)


@contextmanager
def named_by_options() -> Iterator[None]:
    """Errors of a load name the option to change: --input, where Python says input_tokens."""
    try:
        yield
    except (SpecError, ConfigError, UnitError) as error:
        field, colon, rest = str(error).partition(":")
        name = _OPTIONS.get(field)
        if not colon or name is None:
            raise
        raise type(error)(f"{name}:{rest}") from None


class LoadMaker:
    """Makes the Traffic of the options, at their own load or at another."""

    def __init__(self, options: dict[str, Any], dataset: Dataset | None, *, sweeping: str | None) -> None:
        self.dataset = dataset
        self.turns, self.ramp_up_s = options.pop("turns"), options.pop("ramp_up")
        self._asked_output = options.get("output_lengths")
        if dataset is not None:
            if self._asked_output is not None and (dataset.output_tokens > 0).any():
                output.warn("--output: is for prompts that do not say how long their answer is; the file says it for "
                            f"{int((dataset.output_tokens > 0).sum()):,} of {len(dataset.prompts):,}")
            options["input_lengths"], options["output_lengths"] = "1", "1"
        if self.turns is not None and options.get("trace") is not None:
            raise SpecError("--turns: a trace has its own requests; leave --turns out")
        if sweeping is not None:
            for axis in ("rate", "concurrency", "rate_curve"):
                if options.get(axis) is not None:
                    raise SpecError(f"--sweep: sets the load; leave --{axis.replace('_', '-')} out")
            options[sweeping] = 1
        _check_size(options)
        rate = options.get("rate")
        count = len(dataset.prompts) if dataset is not None else usual_count(rate)
        self._counted = options.get("num_requests") is not None or options.get("duration") is not None
        think = options.pop("think", None) if self.turns is not None else options.get("think")
        if dataset is not None and options.get("concurrency") is not None and options.get("num_requests") is None:
            options["num_requests"] = count
        try:
            self.given = take_traffic(options, default_requests=count)[1] if self.turns is None else _keys(options)
        except MemoryError:
            raise SpecError("load: is larger than this machine's memory; ask for fewer requests or clients") from None
        self.given["think"] = think

    def at(self, *, seed: int = 0, axis: str | None = None, load: float | None = None) -> Traffic:
        """The traffic, with the run's own seed added, at another load where one is given."""
        given = dict(self.given)
        if axis == "concurrency" and load is not None:
            given["concurrency"] = int(load)
        elif axis == "rate" and load is not None:
            given["rate"] = load
            if not self._counted and self.dataset is None:
                given["num_requests"] = usual_count(load)
        seed += int(given["seed"] or 0)
        try:
            made = self._sessions(given, seed) if self.turns is not None else build_traffic(given, seed=seed)
        except MemoryError:
            raise SpecError("load: is larger than this machine's memory; ask for fewer requests or clients") from None
        if self.dataset is not None:
            made = self.dataset.load(made, output_tokens=self._fixed_output())
        return made if self.ramp_up_s is None else _ramped(made, self.ramp_up_s)

    def asked(self, axis: str) -> dict[str, Any]:
        """What defines the load, as JSON, but for the one setting that is swept."""
        given = {key: value for key, value in self.given.items() if key not in (axis, "num_requests")}
        return {**{k: None if v is None else str(v) for k, v in given.items()}, "turns": self.turns,
                "dataset": None if self.dataset is None else self.dataset.name,
                "num_requests": self.given["num_requests"] if self._counted else None}

    def _fixed_output(self) -> int | None:
        if self._asked_output is None:
            return None
        if not str(self._asked_output).isdecimal():
            raise SpecError("--output: with --dataset it is one number, for prompts without a length of their own")
        return int(self._asked_output)

    def _sessions(self, given: dict[str, Any], seed: int) -> Traffic:
        from bstar.traffic import sessions

        if given["burstiness"] is not None or given["rate_curve"] is not None or given["duration"] is not None:
            raise SpecError("--turns: conversations start at --rate or are held by --concurrency users; leave the "
                            "other load options out")
        think = given["think"] if given["think"] is not None else 0.0
        count = given["num_requests"] or usual_count(given["rate"])
        return sessions(
            given["rate"], self.turns, given["input_lengths"], given["output_lengths"], count, think_s=think,
            concurrency=given["concurrency"], seed=seed,
        )  # fmt: skip


def _check_size(options: dict[str, Any]) -> None:
    """Refuse what no server is measured with, before arrays of it are made."""
    clients, count = options.get("concurrency"), options.get("num_requests")
    rate, duration = options.get("rate"), options.get("duration")
    if clients is not None and clients > _MOST_CLIENTS:
        raise SpecError(f"--concurrency: {clients} clients are no load of a server; at most {_MOST_CLIENTS:,}")
    if count is not None and count > _MOST_REQUESTS:
        raise SpecError(f"--num-requests: at most {_MOST_REQUESTS:,}, are {count}")
    if rate is not None and duration is not None and rate * duration > _MOST_REQUESTS:
        raise SpecError(f"--duration: {rate:g} requests per second for so long are more than {_MOST_REQUESTS:,}")


def _ramped(load: Traffic, over_s: float) -> Traffic:
    """The clients of a closed loop start evenly over `over_s` seconds."""
    from dataclasses import replace

    import numpy as np

    if load.concurrency is None:
        raise SpecError("--ramp-up: is for --concurrency; a rate rises with --rate-curve ramp:2-10,over=9min")
    arrival, clients = np.array(load.arrival_s), load.num_scheduled
    arrival[:clients] = np.arange(clients) * (over_s / clients)
    return replace(load, arrival_s=arrival)


def usual_count(rate_per_s: float | None) -> int:
    """Requests of a minute, within bounds."""
    return _FEWEST if rate_per_s is None else int(min(max(rate_per_s * _USUAL_S, _FEWEST), _MOST))


def fresh_out(options: dict[str, Any]) -> Path | None:
    """Where the run is written; None: nowhere."""
    out, nowhere, resume = options.pop("out"), options.pop("no_out"), options.pop("resume")
    if resume:
        if out is None or nowhere or options.get("sweep") is None:
            raise SpecError("--resume: goes on with a sweep; give --sweep and the --out that it wrote to")
        if not (out / "sweep.json").is_file():
            raise SpecError(f"--resume: {out} holds no sweep; leave --resume out to begin one")
        return Path(out)
    if nowhere:
        if out is not None:
            raise SpecError("--no-out: contradicts --out; give one")
        return None
    from bstar.measure.folder import run_name

    if out is None:
        return Path("runs") / run_name()
    return out / run_name() if Path(out).is_dir() else Path(out)


def _keys(options: dict[str, Any]) -> dict[str, Any]:
    from bstar.interfaces.cli.traffic import TRAFFIC_KEYS

    return {key: options.pop(key, None) for key in TRAFFIC_KEYS}


__all__ = ["LoadMaker", "fresh_out", "measuring_options", "named_by_options", "sending_options", "server_options",
           "take_body", "take_dataset", "take_endpoint", "take_text", "take_workers", "usual_count"]
