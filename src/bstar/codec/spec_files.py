"""Deployment descriptions in files: yaml, toml or json ↔ the keywords of `bstar.deployment`, strict and atomic.

A file holds what the command line holds, under the same names with underscores:

    model: llama-3.1-8b
    gpu: h100-sxm-80gb
    tp: 2
    max_num_seqs: 256

An unknown key is an error, a value of the wrong kind too; nothing is guessed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bstar.errors import ConfigError
from bstar.files import write_whole

FORMATS = (".yaml", ".yml", ".toml", ".json")
MAX_BYTES = 1 << 20

_INTEGERS = frozenset({
    "tp", "pp", "dp", "attention_dp", "ep", "dcp", "gpu_memory_bytes", "max_num_seqs", "max_num_batched_tokens",
    "max_model_len", "block_size", "cudagraph_max_size", "long_prefill_token_threshold", "num_gpu_blocks_override",
    "kv_cache_memory_bytes", "num_speculative_tokens", "cpu_offload_bytes", "stream_interval",
    "scheduler_recv_interval", "max_prefill_tokens", "batch_wait_timeout_iters",
})  # fmt: skip
_NUMBERS = frozenset({
    "gpu_memory_utilization", "bandwidth_bytes_per_s", "price_usd_per_hour", "schedule_conservativeness",
    "batch_wait_max_tokens_ratio",
})
_SWITCHES = frozenset({
    "enable_expert_parallel", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "enforce_eager",
    "estimate_cudagraph_memory", "strict_version", "allow_long_max_model_len", "enable_mixed_chunk",
})
_SIZES = frozenset({"gpu_memory_bytes", "kv_cache_memory_bytes", "cpu_offload_bytes", "bandwidth_bytes_per_s"})


def deployment_keys() -> tuple[str, ...]:
    """The keys that a deployment file may hold."""
    from bstar.codec.build import build_deployment

    return (*inspect.signature(build_deployment).parameters, "profile")


def read_deployment_file(path: Path) -> dict[str, Any]:
    """The keywords of `bstar.deployment` that a file holds. Raises ConfigError naming file, key and remedy."""
    raw = read_mapping(path, what="deployment file")
    known = deployment_keys()
    for key in raw:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"keys: {', '.join(known)}"
            raise ConfigError(f"deployment file {str(path)!r}: unknown key {str(key)[:60]!r}; {hint}")
    return {key: _checked(path, key, value) for key, value in raw.items() if value is not None}


def _checked(path: Path, key: str, value: Any) -> Any:
    where = f"deployment file {str(path)!r}: {key}"
    if key in _SIZES and isinstance(value, str):
        from bstar.units import parse_bytes

        return parse_bytes(value.removesuffix("/s"), field=where)
    if key == "max_model_len" and isinstance(value, str):
        from bstar.codec.engine_values import max_model_len

        return max_model_len(value, field=where)
    if key in _SWITCHES:
        return _of_kind(where, value, bool, "true or false")
    if key in _INTEGERS:
        return _of_kind(where, value, int, "a whole number")
    if key in _NUMBERS:
        return float(_of_kind(where, value, int | float, "a number"))
    if key == "unmodelled":
        found = _of_kind(where, value, list, "a list of flags")
        return tuple(_of_kind(where, v, str, "a list of flags") for v in found)
    if key == "model_overrides":
        found = _of_kind(where, value, dict, "a table of sizes")
        return {str(k): _of_kind(f"{where}.{k}", v, int, "a whole number") for k, v in found.items()}
    if key == "hf_overrides":
        return dict(_of_kind(where, value, dict, "a table of keys of config.json"))
    return _of_kind(where, value, str, "text")


def _of_kind(where: str, value: Any, kind: Any, words: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where}: must be {words}, is {str(value)[:60]!r}")
    return value


def write_deployment_file(path: Path, keywords: Mapping[str, Any]) -> None:
    """Write the keywords that are set; the file appears whole or not at all. The suffix decides the format."""
    known = deployment_keys()
    plain: dict[str, Any] = {}
    for key, value in keywords.items():
        if key not in known:
            raise ConfigError(f"deployment file {str(path)!r}: {key!r} is not a key of a deployment")
        if value is not None:
            kind: Any = list if isinstance(value, tuple) else dict if isinstance(value, Mapping) else None
            plain[key] = value if kind is None else kind(value)
    write_whole(path, _dumped(path, plain), what="deployment file")


def read_mapping(path: Path, *, what: str) -> dict[str, Any]:
    """The top-level table of a yaml, toml or json file. Raises ConfigError in one line."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"{what} {str(path)!r}: its name must end in {', '.join(FORMATS)}")
    if suffix == ".json":
        from bstar.codec.safe_json import read_json

        return read_json(path, what=what)
    from bstar.codec.safe_json import open_regular

    handle, size = open_regular(path, what=what)
    with handle:
        if size > MAX_BYTES:
            raise ConfigError(f"{what} {str(path)!r}: {size} bytes are too many; such a file has a few lines")
        body = handle.read(MAX_BYTES + 1)
    try:
        found = _parsed(suffix, body.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {str(path)!r}: is not UTF-8 text") from None
    except RecursionError:
        raise ConfigError(f"{what} {str(path)!r}: is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{what} {str(path)!r}: is not {suffix[1:]} ({' '.join(str(error).split())[:160]})") from None
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise ConfigError(f"{what} {str(path)!r}: must hold key: value pairs at its top")
    return found


def _parsed(suffix: str, text: str) -> Any:
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    import yaml

    try:
        if "&" in text and "*" in text and any(isinstance(e, yaml.AliasEvent) for e in yaml.parse(text)):
            raise ValueError("aliases are not allowed")  # a few of them can stand for gigabytes
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _dumped(path: Path, plain: dict[str, Any]) -> str:
    suffix = path.suffix.lower()
    if suffix == ".json":
        return json.dumps(plain, indent=2) + "\n"
    if suffix in (".yaml", ".yml"):
        import yaml

        return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    if suffix == ".toml":
        tables = {k: v for k, v in plain.items() if isinstance(v, dict)}
        lines = [f"{k} = {_toml(v)}" for k, v in plain.items() if k not in tables]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{_toml(k)} = {_toml(v)}" for k, v in table.items() if v is not None)]
        return "\n".join(lines) + "\n"
    raise ConfigError(f"deployment file {str(path)!r}: its name must end in {', '.join(FORMATS)}")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value if v is not None) + "]"
    # JSON's true/false, numbers, strings and arrays are TOML's, but for the DEL character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
