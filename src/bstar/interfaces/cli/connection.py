"""How a server is reached: the options that every command with a --url has, and the endpoint that they describe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import SpecError
from bstar.interfaces.cli.params import apply
from bstar.interfaces.cli.sections import section

if TYPE_CHECKING:
    from bstar.measure.endpoint import Api, Endpoint, Timeouts
    from bstar.measure.server.scraper import MetricsSource

section("Server", "api_key_env", "headers", "insecure", "ca_file")

connection_options = apply(
    click.option("--api-key-env", metavar="VAR",
                 help="Environment variable with the API key (BSTAR_API_KEY, else OPENAI_API_KEY)."),
    click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="Further request header."),
    click.option("--insecure", is_flag=True, help="Take any certificate."),
    click.option("--ca-file", type=click.Path(path_type=Path), metavar="FILE", help="Certificates to trust."),
)
_NAMES = ("api_key_env", "headers", "insecure", "ca_file")


def take_connection(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `parse_endpoint` that the options give (removed from `options`)."""
    variable, headers, insecure, ca_file = (options.pop(name) for name in _NAMES)
    if variable is not None and not os.environ.get(variable):
        raise SpecError(f"--api-key-env: {variable} is not set in the environment")
    return {"key_variable": variable, "headers": tuple(headers), "verify": not insecure, "ca_file": ca_file}


def endpoint_at(
    url: str, connection: dict[str, Any], *, model: str = "", api: Api = "completions",
    timeouts: Timeouts | None = None,
) -> Endpoint:  # fmt: skip
    """The server at a URL, reached as `take_connection` says."""
    from bstar.measure.endpoint import parse_endpoint

    return parse_endpoint(url, model=model, api=api, timeouts=timeouts, **connection)


def metrics_at(url: str, connection: dict[str, Any]) -> MetricsSource:
    """Where the server at a URL (or the URL of its metrics) shows its counters."""
    from bstar.measure.server.scraper import metrics_of

    return metrics_of(endpoint_at(url, connection))
