"""Ask a real vLLM how it groups layers into KV blocks and what it would log (run inside a vLLM environment).

    python tools/vllm_kv_oracle.py draw SEED COUNT CASES.json       draw random cases (no vLLM needed)
    python tools/vllm_kv_oracle.py answer CASES.json OUT.json       answer them with the vLLM that is importable
    python tools/vllm_kv_oracle.py compressed OUT.json              DeepSeek-V4-Flash's packed caches (vLLM >= 0.20)

Cases hold layers by what they cache; the answer drives vLLM's own classes and functions
(vllm/v1/kv_cache_interface.py, vllm/v1/core/kv_cache_utils.py: get_kv_cache_groups, get_kv_cache_configs, the
capacity report) with a stub of the configuration objects they read. Works with the sources of 0.11 to 0.32; for an
older version put its package folder first on PYTHONPATH (modules that version wants and the environment lacks are
replaced by mocks).
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import fields
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

GIB = 1 << 30


def draw_case(rng: random.Random) -> dict[str, Any]:
    """One random model and setting, in the shapes that real models have."""
    kind = rng.choice(["uniform", "windows", "windows-mixed", "chunks", "states", "states-windows", "latent", "heads"])
    heads, size, width = rng.choice([1, 2, 4, 8, 16]), rng.choice([64, 128, 256]), rng.choice([1, 2])
    block = rng.choice([16, 32, 64])
    count = rng.randrange(8, 81)
    full = {"kind": "full", "block": block, "heads": heads, "head_size": size, "bytes": width}
    window = {"kind": "sliding", "block": block, "heads": heads, "head_size": size, "bytes": width,
              "window": rng.choice([128, 512, 1024, 4096])}
    period = rng.choice([2, 4, 5, 6])
    if kind == "uniform":
        layers = [full] * count
    elif kind == "windows":
        layers = [full if i % period == period - 1 else window for i in range(count)]
    elif kind == "windows-mixed":
        window = {**window, "heads": heads * 4, "head_size": max(size // 2, 64)}
        layers = [full if i % period == period - 1 else window for i in range(count)]
    elif kind == "chunks":
        chunk = {**window, "kind": "chunked", "window": 8192}
        layers = [full if i % period == period - 1 else chunk for i in range(count)]
    elif kind in ("states", "states-windows"):
        state_bytes = rng.randrange(50_000, 4_000_000) // 4 * 4
        per_token = heads * 2 * size * width
        block = 16 * -(-state_bytes // (16 * per_token))
        full = {**full, "block": block}
        state = {"kind": "state", "state_bytes": state_bytes, "padded": block * per_token}
        layers = [full if i % period == period - 1 else state for i in range(count)]
        if kind == "states-windows":
            layers = [{**window, "block": block} if i % 7 == 3 and c["kind"] == "full" else c
                      for i, c in enumerate(layers)]
    elif kind == "latent":
        layers = [{"kind": "latent", "block": 64, "heads": 1, "head_size": 576, "bytes": width}] * count
    else:
        other = {**full, "heads": heads * 2}
        layers = [full if i % period else other for i in range(count)]
    pp = rng.choice([1, 1, 1, 2, 4])
    return {
        "kind": kind, "layers": layers, "pp": pp, "max_model_len": rng.choice([4096, 16384, 40960, 131072, 262144]),
        "max_num_batched_tokens": rng.choice([2048, 8192, 16384]), "batches": rng.choice([1, 2]),
        "available": [rng.randrange(1 * GIB, 60 * GIB) for _ in range(pp)],
        "prefix_caching": rng.random() < 0.5,
        "override": rng.choice([None, None, None, rng.randrange(100, 20000)]),
    }  # fmt: skip


class _Mocks(MetaPathFinder, Loader):
    """Modules that are missing become mocks, so that only the arithmetic has to be importable."""

    NAMES = ("diskcache", "gguf", "lmformatenforcer", "outlines", "xgrammar", "cbor2", "blake3", "pybase64", "ray")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.NAMES else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        return None


def _only(cls: type, **values: Any) -> Any:
    """An instance of a vLLM dataclass from the keywords that this version knows."""
    known = {f.name for f in fields(cls)}
    if "use_mla" in known:
        values.setdefault("use_mla", False)
    return cls(**{k: v for k, v in values.items() if k in known})


def layer_spec(cache: dict[str, Any], mode: str) -> Any:
    """vLLM's KVCacheSpec of one layer of a case."""
    import torch
    from vllm.v1 import kv_cache_interface as api

    if cache["kind"] == "state":
        return _only(
            api.MambaSpec, block_size=1 << 20, shapes=((cache["state_bytes"] // 4,),), dtypes=(torch.float32,),
            page_size_padded=cache["padded"], mamba_cache_mode=mode)
    dtype = {1: torch.uint8, 2: torch.bfloat16}[cache["bytes"]]
    common = {"block_size": cache["block"], "num_kv_heads": cache["heads"], "head_size": cache["head_size"],
              "dtype": dtype, "sliding_window": cache.get("window"), "attention_chunk_size": cache.get("window")}
    if cache["kind"] == "full":
        return _only(api.FullAttentionSpec, **{**common, "sliding_window": None, "attention_chunk_size": None})
    if cache["kind"] == "latent":
        return _only(api.MLAAttentionSpec, **{**common, "sliding_window": None, "attention_chunk_size": None})
    return _only(api.SlidingWindowSpec if cache["kind"] == "sliding" else api.ChunkedLocalAttentionSpec, **common)


def _config(case: dict[str, Any], mode: str) -> Any:
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        layout: Any = KVCacheLayout.LBNHC
    except ImportError:
        layout = None
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["max_model_len"], original_max_model_len=case["max_model_len"]),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1,
            pipeline_parallel_size=case["pp"]),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=case["max_num_batched_tokens"], disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=case["override"], mamba_cache_mode=mode, block_size=16,
            prefix_cache_retention_interval=None, get_resolved_kv_cache_layout=lambda: layout),
        speculative_config=None, kv_transfer_config=None, num_speculative_tokens=0, num_prefill_lookahead_tokens=0,
        attention_config=SimpleNamespace(hisparse_config=None), device_config=SimpleNamespace(device_type="cuda"),
        max_in_flight_tokens=case["batches"] * case["max_num_batched_tokens"])


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """vLLM's groups, blocks, concurrency and logged tokens for a case, or the error it raises."""
    import vllm.v1.core.kv_cache_utils as utils
    from vllm.distributed.utils import get_pp_indices

    lines: list[tuple[str, tuple[Any, ...]]] = []

    def log(message: str, *args: Any, **_: Any) -> None:
        lines.append((message, args))

    utils.logger = SimpleNamespace(  # type: ignore[assignment]
        info=log, info_once=log, debug=log, warning=log, warning_once=log, debug_once=log)
    mode = "align" if case["prefix_caching"] else "none"
    config = _config(case, mode)
    specs = {f"model.layers.{i}.attn": layer_spec(c, mode) for i, c in enumerate(case["layers"])}
    names = list(specs)
    bounds = [get_pp_indices(len(names), rank, case["pp"]) for rank in range(case["pp"])]
    workers = [{n: specs[n] for n in names[a:b]} for a, b in bounds]
    try:
        configs = utils.get_kv_cache_configs(config, workers, list(case["available"]))
    except (ValueError, NotImplementedError) as error:
        return {"error": str(error)}
    groups = utils.get_kv_cache_groups(config, dict(specs))
    report = getattr(utils, "_report_kv_cache_config", None) or getattr(utils, "update_kv_cache_capacity", None)
    if report is not None:
        report(config, configs[0])
    tokens = [_tokens(m, a) for m, a in lines if "KV cache size" in m]
    return {
        "groups": sorted(sorted(names.index(n) for n in g.layer_names) for g in groups),
        "num_blocks": configs[0].num_blocks,
        "max_concurrency": utils.get_max_concurrency_for_kv_cache_config(config, configs[0]),
        "tokens": tokens[-1] if tokens else None,
    }


def _tokens(message: str, args: tuple[Any, ...]) -> int:
    return int(next(str(a) for a in args if str(a).replace(",", "").isdigit()).replace(",", ""))


def compressed_specs(ratios: list[int], fp8: bool) -> dict[str, Any]:
    """The caches of a DeepSeek V4 model, one entry each, as vllm/models/deepseek_v4 makes them."""
    import torch
    from vllm.v1 import kv_cache_interface as api

    unit, dtype, name = (576, torch.uint8, "fp8_ds_mla") if fp8 else (512, torch.bfloat16, "auto")
    packed = 584 if fp8 else None
    one = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": unit}
    latent = {**one, "head_size": 512, "dtype": dtype, "cache_dtype_str": name, "state_content_bytes": packed,
              "model_version": "deepseek_v4"}
    out: dict[str, Any] = {}
    for i, ratio in enumerate(ratios):
        p = f"model.layers.{i}."
        out[p + "window"] = _only(api.SlidingWindowMLASpec, block_size=64, sliding_window=128, **latent)
        if ratio <= 1:
            continue
        overlap, block = (2, 4) if ratio == 4 else (1, 8)
        pending = {**one, "block_size": block, "dtype": torch.float32, "sliding_window": overlap * ratio}
        shared = {"block_size": 256, "tokens_per_state": ratio, "compress_ratio": ratio}
        out[p + "latent"] = _only(api.MLAAttentionSpec, **shared, **latent)
        out[p + "pending"] = _only(api.SlidingWindowMLASpec, head_size=2 * overlap * 512, **pending)
        if ratio == 4:
            out[p + "index"] = _only(api.MLAAttentionSpec, head_size=132, dtype=torch.uint8, **shared, **one)
            out[p + "index_pending"] = _only(api.SlidingWindowMLASpec, head_size=2 * overlap * 128, **pending)
    return out


def compressed_answers() -> list[dict[str, Any]]:
    """Blocks and concurrency of DeepSeek-V4-Flash (43 layers) for some settings, with the layout its backend wants."""
    import vllm.v1.core.kv_cache_utils as utils

    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        layout: Any = KVCacheLayout.BLHNC
    except ImportError:
        layout = None
    ratios = [0, 0] + [4, 128] * 20 + [4]
    settings = ((8192, 1 << 20, 140 * GIB), (2048, 1 << 18, 20 * GIB), (16384, 30000, 16 * GIB))
    out = []
    for fp8 in (True, False):
        for budget, length, available in settings:
            case = {"max_model_len": length, "max_num_batched_tokens": budget, "batches": 2, "pp": 1, "override": None}
            config = _config(case, "none")
            config.cache_config.get_resolved_kv_cache_layout = lambda: layout
            answer_ = {**case, "fp8": fp8, "available": available}
            try:
                made = utils.get_kv_cache_configs(config, [compressed_specs(ratios, fp8)], [available])[0]
                answer_ |= {
                    "groups": sorted(len(g.layer_names) for g in made.kv_cache_groups), "num_blocks": made.num_blocks,
                    "max_concurrency": utils.get_max_concurrency_for_kv_cache_config(config, made)}
            except ValueError as error:
                answer_["error"] = str(error)
            out.append(answer_)
    return out


def main(argv: list[str]) -> None:
    if argv[0] == "compressed":
        sys.meta_path.append(_Mocks())
        Path(argv[1]).write_text(json.dumps(compressed_answers(), indent=0), encoding="utf-8")
        return
    if argv[0] == "draw":
        rng = random.Random(int(argv[1]))
        Path(argv[3]).write_text(json.dumps([draw_case(rng) for _ in range(int(argv[2]))]), encoding="utf-8")
        return
    sys.meta_path.append(_Mocks())
    cases = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    answers = [answer(case) for case in cases]
    Path(argv[2]).write_text(json.dumps(answers), encoding="utf-8")
    print(sum("error" in a for a in answers), "errors of", len(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
