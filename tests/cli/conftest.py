"""Running `bstar` in this process, as the shell would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bstar.interfaces.cli.main import cli


@pytest.fixture
def bstar(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command line; never the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*args: str) -> Result:
        result = CliRunner().invoke(cli, list(args), prog_name="bstar")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def bstar_json(bstar: Callable[..., Result]) -> Callable[..., Any]:
    """Run with --json; stdout must be one JSON document without NaN, whatever the exit code."""

    def run(*args: str, exit_code: int = 0) -> Any:
        result = bstar(*args, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return run
