"""Who else watches a run of `bstar bench`: the server's counters, the GPU's telemetry."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any, Final

import click

from bstar.errors import BstarError, SpecError
from bstar.interfaces.cli.params import SECONDS, apply

if TYPE_CHECKING:
    from bstar.measure.observers import CounterReader, Observer
    from bstar.measure.run import Prepared
    from bstar.measure.server.scraper import MetricsSource

_OFF: Final = "off"

watching_options = apply(
    click.option("--metrics", metavar="URL|off",
                 help="Where the server shows its counters (default: its own /metrics, where it answers)."),
    click.option("--telemetry", metavar="nvml|URL|off",
                 help="GPU counters through the run: this machine's NVML (default, where the server is local and there "
                      "is a GPU), or a DCGM exporter."),
    click.option("--scrape-interval", type=SECONDS, default="1s", show_default=True, metavar="T"),
)


def watchers(server: Prepared, options: dict[str, Any]) -> tuple[tuple[Observer, ...], CounterReader | None]:
    """(observers, reader of the counters that a run is checked by) for a server.

    What was asked for by name and does not answer is an error; what is only tried is left out quietly.
    """
    metrics, telemetry, interval = (options.pop(k) for k in ("metrics", "telemetry", "scrape_interval"))
    if not interval > 0:
        raise SpecError("--scrape-interval: must be positive")
    observers: list[Observer] = []
    source = _metrics(server, metrics)
    if source is not None:
        from bstar.measure.server.scraper import ServerObserver

        observers.append(ServerObserver(source, interval_s=interval))
    gpus = _gpus(server, telemetry)
    if gpus is not None:
        from bstar.measure.telemetry.watch import GpuObserver

        observers.append(GpuObserver(gpus, interval_s=interval))
    counters: CounterReader | None = None
    if source is not None:
        from bstar.measure.server.scraper import ServerCounters

        counters = ServerCounters(source)
    return tuple(observers), counters


def _metrics(server: Prepared, asked: str | None) -> MetricsSource | None:
    if asked == _OFF:
        return None
    from bstar.measure.server.scraper import metrics_of

    source = metrics_of(server.endpoint, asked)
    try:
        source.read()
    except BstarError:
        if asked is not None:
            raise
        return None
    return source


def _gpus(server: Prepared, asked: str | None) -> Any:
    if asked == _OFF:
        return None
    from bstar.measure.telemetry.watch import DcgmExporter, Nvml

    try:
        if asked is not None and asked != "nvml":
            if "://" not in asked:
                raise SpecError(f"--telemetry: {asked!r} is neither nvml nor the URL of a DCGM exporter's metrics")
            exporter = DcgmExporter(asked)
            exporter.read()
            return exporter
        if asked is None and not _local(server.endpoint.host):
            return None
        return Nvml()
    except BstarError:
        if asked is not None:
            raise
        return None


def _local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
