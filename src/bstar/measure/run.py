"""`bench`: a load to a server, and what happened, as a `BenchRun` and as a folder.

    endpoint = parse_endpoint("http://127.0.0.1:8000")
    traffic = bstar.traffic.poisson(rate_per_s=4, input_tokens=512, output_tokens=128, num_requests=200)
    run = bench(prepare(endpoint), traffic, out=Path("runs/first"))

The traffic is the one that `bstar.simulate` takes.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bstar.errors import ConfigError, SpecError
from bstar.measure.clock import ClockOffset
from bstar.measure.contents import Given
from bstar.measure.endpoint import Endpoint
from bstar.measure.fleet import FleetReport, ProcessWorker, Progress, Worker, run_here, run_jobs, uninterrupted
from bstar.measure.folder import RunFolder
from bstar.measure.health import Health, judge
from bstar.measure.job import Job, TextSource, split
from bstar.measure.observers import CounterReader, Observation, Observer, hit_fraction
from bstar.measure.payloads import BodyOptions
from bstar.measure.probe import ServerFacts, addresses_of, identify, probe
from bstar.measure.result import BenchRun, Window
from bstar.measure.sharing import expected_fraction, num_distinct
from bstar.measure.tables import RequestTable, WorkerRows, request_table
from bstar.specs.slo import Slo
from bstar.traffic.load import Traffic

Workers = int | Literal["ray"]
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A server that has been looked at, and how requests to it are made; one for all runs of a sweep."""

    endpoint: Endpoint
    addresses: tuple[tuple[str, int], ...]
    facts: ServerFacts
    body: BodyOptions
    text: TextSource
    given: tuple[Given, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a load is sent and judged.

    workers         processes on this machine; 0: this process itself; "ray": one on every node of a Ray cluster
    max_in_flight   an open loop holds requests back beyond so many
    stop_after_s    nothing is sent later than that
    content_salt    of drawn prompts; None: a fresh one, so that no prompt has ever been sent before
    max_error_fraction   a run with more failures is no result
    allow_client_limited   a run whose client was the limit still says so, but ends with exit code 0
    """

    slo: Slo | None = None
    window: Window = field(default_factory=Window)
    workers: Workers = 1
    max_in_flight: int | None = None
    stop_after_s: float | None = None
    content_salt: str | None = None
    max_error_fraction: float = 0.05
    allow_client_limited: bool = False
    observers: tuple[Observer, ...] = ()
    counters: CounterReader | None = None
    on_progress: Callable[[Progress], None] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def prepare(
    endpoint: Endpoint, *, body: BodyOptions | None = None, text: TextSource | None = None,
    given: Sequence[Given] | None = None, check: bool = True,
) -> Prepared:  # fmt: skip
    """Look at a server and try a request on it.

    check   False: send nothing before the load; take the options as they are
    Raises ServerError (a ConfigError) where it cannot be reached or refuses a plain request.
    """
    addresses = addresses_of(endpoint)
    options = body if body is not None else BodyOptions()
    options = replace(options, api=endpoint.api)
    source = text if text is not None else TextSource()
    source = replace(source, as_ids=source.as_ids and endpoint.api == "completions")
    if check:
        facts = identify(endpoint)
        endpoint = replace(endpoint, model=facts.model)
        options = replace(options, model=facts.model)
        facts, options, source = probe(endpoint, addresses, facts, options, source, drawn=given is None)
    else:
        if not endpoint.model:
            raise SpecError("--model: is needed where the server is not asked")
        facts, options = ServerFacts(model=endpoint.model), replace(options, model=endpoint.model)
    return Prepared(endpoint=endpoint, addresses=addresses, facts=facts, body=options, text=source,
                    given=None if given is None else tuple(given))  # fmt: skip


def bench(
    server: Prepared, traffic: Traffic, options: RunOptions | None = None, *, out: Path | None = None
) -> BenchRun:
    """Send `traffic` and wait for every answer; with `out` write the run's folder.

    Ctrl-C ends it early: the run that is returned says so, and is written all the same if it holds an answer.
    Raises SpecError where a request is longer than the server takes, ConfigError where `out` cannot be made.
    """
    session = _Session(server, traffic, options if options is not None else RunOptions(), out)
    options = session.options
    before = options.counters.read() if options.counters is not None else None
    try:
        report = _send(session.job, options, session.take, session.start)
    except BaseException:
        with uninterrupted():
            session.stop()
            session.abandon()
        raise
    with uninterrupted() as pressed:
        session.stop()
        after = options.counters.read() if options.counters is not None else None
        run = session.result(report, hit_fraction(before, after))
    asked = bool(pressed or report.stop_asked) and not run.interrupted
    return replace(run, stop_asked=True) if asked else run


class _Session:
    """A run while it goes on: what was asked, and what has come back."""

    def __init__(self, server: Prepared, traffic: Traffic, options: RunOptions, out: Path | None) -> None:
        _check_lengths(server.facts, traffic)
        salt = options.content_salt if options.content_salt is not None else secrets.token_hex(8)
        self.server, self.traffic, self.options = server, traffic, options
        self.text = replace(server.text, salt=salt)
        self.job = Job(
            endpoint=server.endpoint, addresses=server.addresses, body=server.body, traffic=traffic,
            share=np.arange(traffic.num_requests), text=self.text, given=server.given,
            max_in_flight=options.max_in_flight, stop_after_s=options.stop_after_s,
            keep_text=not server.facts.counts_tokens and self.text.tokenizer_file is not None,
        )  # fmt: skip
        self.config, self.environment = describe(server, traffic, options, salt), environment_of(server)
        self.folder = RunFolder(out) if out is not None else None
        self.rows: dict[int, Rows] = {}
        self.offsets: list[ClockOffset] = []
        self.started = False
        self.observations: tuple[Observation, ...] = ()

    def start(self, origin_s: float, offsets: list[ClockOffset]) -> None:
        """Just before time 0 of the load."""
        self.offsets = offsets
        if self.folder is not None:
            self.folder.begin(self.config, self.environment, self.traffic, origin_s)
            if self.folder.error:  # a load is not spent on what cannot be written
                raise ConfigError(f"--out: {self.folder.final} cannot be written ({self.folder.error})")
        self.started = True
        for observer in self.options.observers:
            observer.start(origin_s)

    def take(self, worker: int, batch: Rows) -> None:
        """Rows of finished requests."""
        self.rows.setdefault(worker, []).extend(batch)
        if self.folder is not None:
            self.folder.journal(worker, self.offsets[worker], batch)

    def stop(self) -> None:
        """After the last answer."""
        if self.started:
            self.observations = tuple(observer.stop() for observer in self.options.observers)

    def abandon(self) -> None:
        """The run never began, or broke off: what has been journaled stays, a folder without an answer does not."""
        if self.folder is not None and not self.rows:
            self.folder.discard()

    def result(self, report: FleetReport, hits: float | None) -> BenchRun:
        """The run, written."""
        table = request_table(
            [WorkerRows(w, report.offsets[w], part) for w, part in self.rows.items()], self.traffic, report.origin_s,
            count_text=_counter(self.text) if self.job.keep_text else None,
        )  # fmt: skip
        options, traffic = self.options, self.traffic
        warmup = max(options.window.warmup_requests, traffic.warmup_requests)
        run = BenchRun(
            table=table, traffic=traffic, slo=options.slo, config=self.config, environment=self.environment,
            window=replace(options.window, warmup_requests=warmup), observations=self.observations,
            health=_health(report, table, traffic, options),
            clocks=tuple(offset.to_dict() for offset in report.offsets), interrupted=report.interrupted,
            prefix_hit_fraction=_cached(table, hits),
            expected_hit_fraction=expected_fraction(traffic, table.index, self.server.given),
            max_error_fraction=options.max_error_fraction, allow_client_limited=options.allow_client_limited,
            connections_opened=report.opened, refused_in_a_row=report.refused_in_a_row,
        )  # fmt: skip
        if self.folder is not None and run.holds_nothing:
            self.folder.discard()
        elif self.folder is not None:
            self.folder.finish(run, run.to_dict())
            run = replace(run, write_error=self.folder.error)
        return run


def _send(
    job: Job, options: RunOptions, take: Callable[[int, Rows], None],
    start: Callable[[float, list[ClockOffset]], None],
) -> FleetReport:
    total = job.traffic.num_requests
    if options.workers == 0:
        return run_here(job, take, on_progress=options.on_progress, on_start=start, total=total)
    make: Callable[[int], Worker] = ProcessWorker
    count = options.workers
    if count == "ray":
        from bstar.measure.ray_workers import ray_nodes, ray_worker

        make, count = ray_worker, ray_nodes()
    return run_jobs(split(job, int(count)), take, on_progress=options.on_progress, make=make, on_start=start,
                    total=total)  # fmt: skip


def _health(report: FleetReport, table: RequestTable, traffic: Traffic, options: RunOptions) -> Health:
    delay = table.sent_s - np.maximum(table.intended_s, table.allowed_s)
    good = table.succeeded
    first = (table.first_token_s - table.sent_s)[good]
    gaps = table.chunk_gaps_s()
    gaps = gaps[gaps > 0]
    due = np.asarray(traffic.arrival_s[: traffic.num_scheduled])
    if options.stop_after_s is not None:
        due = due[due <= options.stop_after_s]
    sent = int(np.count_nonzero(table.index < traffic.num_scheduled))
    partly = report.interrupted or options.stop_after_s is not None
    return judge(
        delay, report.lags_s, report.cpus, latency_s=float(np.nanmedian(first)) if first.size else None,
        gap_s=float(np.median(gaps)) if gaps.size else None,
        sent_fraction=1.0 if partly or not due.size else min(sent / due.size, 1.0),
        client_ports=int(np.count_nonzero(table.error == "client_ports")), lost_workers=len(report.lost),
    )  # fmt: skip


def _cached(table: RequestTable, by_counters: float | None) -> float | None:
    """Share of prompt tokens from the server's cache: by its counters, else by what its answers say."""
    if by_counters is not None:
        return by_counters
    told = table.succeeded & (table.cached_tokens >= 0)
    looked = float(table.input_tokens[told].sum())
    return float(table.cached_tokens[told].sum()) / looked if looked else None


def _counter(text: TextSource) -> Callable[[str], int]:
    tokenizer = text.tokenizer()
    return lambda answer: len(tokenizer.encode(answer))


def _check_lengths(facts: ServerFacts, traffic: Traffic) -> None:
    longest = int((np.asarray(traffic.input_tokens) + np.asarray(traffic.output_tokens)).max())
    if facts.max_model_len is not None and longest > facts.max_model_len:
        raise SpecError(f"load: a request takes {longest:,} tokens with its answer, the server at most "
                        f"{facts.max_model_len:,} (max_model_len); shorten --input or --output")


def describe(server: Prepared, traffic: Traffic, options: RunOptions, salt: str) -> dict[str, Any]:
    """What was asked for, as JSON; no key, no header value."""
    text = server.text
    return {
        "command": "bench", "endpoint": server.endpoint.to_dict(), "request": server.body.to_dict(),
        "prompts": {"as_token_ids": text.as_ids, "salt": salt, "overhead_tokens": text.overhead_tokens,
                    "vocabulary": [text.vocabulary.first, text.vocabulary.last],
                    "tokenizer": text.tokenizer_file, "given": len(server.given) if server.given else None,
                    "distinct": num_distinct(server.given) if server.given else None},
        "load": {"name": traffic.name, "source": traffic.source or None, "num_requests": traffic.num_requests,
                 "seed": traffic.seed, "concurrency": traffic.concurrency, "rate_per_s": traffic.rate_per_s,
                 "mean_input_tokens": traffic.mean_input_tokens, "mean_output_tokens": traffic.mean_output_tokens,
                 "fingerprint": traffic.fingerprint()},
        "slo": None if options.slo is None else {
            "ttft_s": options.slo.ttft_s, "tpot_s": options.slo.tpot_s, "e2e_s": options.slo.e2e_s,
            "attainment_fraction": options.slo.attainment_fraction},
        "workers": options.workers, "max_in_flight": options.max_in_flight, "stop_after_s": options.stop_after_s,
        **options.settings,
    }  # fmt: skip


def environment_of(server: Prepared) -> dict[str, Any]:
    """Where and with what the run was made."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for name in ("bstar", "httptools", "uvloop", "pyarrow", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "python": platform.python_version(), "platform": platform.platform(),
        "cpus": os.cpu_count(), "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "packages": versions, "started_utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "byte_order": sys.byteorder, "server": server.facts.to_dict(), "addresses": len(server.addresses),
    }  # fmt: skip
