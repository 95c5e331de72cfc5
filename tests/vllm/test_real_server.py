"""A real vLLM server on this machine's CPU: what it logs and exports is what bstar computes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from click.testing import CliRunner
from servers import Server

from bstar.codec.engine_log import parse_log
from bstar.codec.resolve import resolve_model
from bstar.interfaces.cli.main import cli
from bstar.physics.kv_cache import kv_bytes_per_token
from bstar.specs.formats import kv_format
from bstar.units import GIB

pytestmark = pytest.mark.vllm


def cache_config(server: Server) -> dict[str, str]:
    """The labels of vllm:cache_config_info."""
    line = next(x for x in server.get("/metrics").splitlines() if x.startswith("vllm:cache_config_info{"))
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def memory(server: Server, *more: str) -> dict[str, Any]:
    block = cache_config(server)["block_size"]
    result = CliRunner().invoke(cli, [
        "memory", str(server.model), "--gpu", "h100-sxm-80gb", "--block-size", block, "--kv-cache-memory-bytes", "1GiB",
        "--log", str(server.log), "--json", *more])  # fmt: skip
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_blocks_tokens_and_concurrency_are_the_servers(server: Server) -> None:
    told, logged = cache_config(server), parse_log(server.log.read_text(errors="replace"))
    sheet = memory(server)
    assert sheet["num_blocks"] == int(told["num_gpu_blocks"])
    assert sheet["kv_cache_tokens"] == logged.kv_cache_tokens
    assert sheet["max_concurrency"] == pytest.approx(logged.max_concurrency, abs=0.005)
    assert sheet["max_model_len"] == 2048


def test_the_log_is_read_term_by_term(server: Server) -> None:
    logged = parse_log(server.log.read_text(errors="replace"))
    assert (logged.engine, logged.version, logged.max_model_len) == ("vllm", "0.32.0", 2048)
    assert logged.kv_cache_bytes == GIB
    assert logged.settings["max_num_seqs"] == 8 and logged.settings["max_num_batched_tokens"] == 1024
    terms = memory(server)["log"]
    assert "kv_cache_tokens" in json.dumps(terms)


def test_kv_bytes_per_token_are_those_of_the_servers_blocks(server: Server) -> None:
    told = cache_config(server)
    model = resolve_model(str(server.model))
    per_token = kv_bytes_per_token(model, kv_format("auto", model_dtype=model.dtype))
    assert int(told["num_gpu_blocks"]) == GIB // int(int(told["block_size"]) * per_token)


def test_the_server_answers(server: Server) -> None:
    assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "tiny"
