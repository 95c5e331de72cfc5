"""What a latency point was measured on, as a Deployment: names, formats, layout and flags read by rule.

What a row leaves open is filled in by what its engine does, and said in the notes:

    left open                       rule
    ──────────────────────────────  ─────────────────────────────────────────────────────────────────────────
    KV dtype, TensorRT-LLM engine   the quantization recipe of fp8 and fp4 checkpoints quantizes the cache to fp8
      built or benched as fp8, fp4    (quantize.py --qformat fp8 --kv_cache_dtype fp8; NVIDIA's hub checkpoints say
                                      kv_cache_quant_algo FP8). Check: peak memory of the static rows grows by one
                                      byte per cache element and token (tests/calibration/test_latency_points.py)
    KV dtype, servers               the engine's own default ("auto")
    attention DP                    "enable_attention_dp" in the notes, DEPn layouts, the launch command
    version                         the first number in the text; a date: the release of that time
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

from bstar.calibration.latency_points import LatencyPoint
from bstar.errors import BstarError, SpecError
from bstar.specs.attention import GroupedQueryAttention
from bstar.specs.deployment import Deployment
from bstar.specs.model import ModelSpec

# What an engine's name says: text in it, engine, and its version where the row has that of a product around it.
_ENGINES: Final = (
    ("nim", "trtllm", "0.17.0"), ("triton", "trtllm", "0.17.0"), ("tensorrt", "trtllm", None),
    ("trtllm", "trtllm", None), ("trt-llm", "trtllm", None), ("sglang", "sglang", None), ("vllm", "vllm", None),
    ("llama.cpp", "llamacpp", None), ("llamacpp", "llamacpp", None), ("transformers", "transformers", None),
    ("huggingface", "transformers", None),
)  # fmt: skip
# Dates that stand for a version: the release of the time.
_DATED: Final = {("vllm", "2023-11"): "0.2.2"}
# vLLM replays decode steps from CUDA graphs since this release.
_VLLM_GRAPHS_SINCE: Final = (0, 2, 6)
# TensorRT-LLM reads windows of attention from the model's config since its PyTorch backend.
_TRTLLM_WINDOWS_SINCE: Final = (1, 0)
# Sequences that NVIDIA's throughput runs let a step hold ("runtime max batch up to 4096").
_BENCH_MAX_BATCH: Final = 4096
# Their budget of a step; longer prompts are given a step that holds them.
_BENCH_TOKENS: Final = 8192
_LAUNCHERS: Final = {
    "vllm": "vllm serve {model} {flags}", "trtllm": "trtllm-serve {model} {flags}",
    "sglang": "python -m sglang.launch_server --model-path {model} {flags}",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedPoint:
    """A point's deployment, and what had to be assumed for it."""

    deployment: Deployment
    notes: tuple[str, ...] = field(default=())


@dataclass(slots=True)
class _Reading:
    """Keywords of `bstar.deployment` as they are found, and the notes about them."""

    point: LatencyPoint
    engine: str
    version: str
    settings: dict[str, Any]
    notes: list[str]


def latency_deployment(point: LatencyPoint, *, models: Mapping[str, ModelSpec] | None = None) -> MappedPoint:
    """The deployment that `point` was measured on.

    models   specs by name as written, for models that the catalog does not hold
    Raises SpecError or NotInCatalogError that says what of the row is not understood.
    """
    if models:
        return _mapped(point, models)
    # Rows that differ in their load alone share a deployment, and with it a step model.
    static = point.load == "static_batch"
    load = () if static else (point.load, point.input_tokens, point.output_tokens)
    key = (
        point.engine, point.engine_version, point.model, point.gpu, point.num_gpus, point.tp, point.pp, point.dp,
        point.expert_parallel, point.weight_dtype, point.kv_dtype, point.flags, point.notes, load,
    )  # fmt: skip
    found = _CACHE.get(key)
    if found is None:
        found = _CACHE[key] = _mapped(point, {})
        if len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    return found


_CACHE: OrderedDict[tuple[object, ...], MappedPoint] = OrderedDict()
_CACHE_SIZE: Final = 512


def _mapped(point: LatencyPoint, models: Mapping[str, ModelSpec]) -> MappedPoint:
    from bstar.codec.build import build_deployment

    engine, version = _engine(point)
    reading = _Reading(point, engine, version, {}, [])
    _flags(reading)
    _layout(reading)
    model = _model(reading, models)
    if engine == "trtllm" and _numbers(version) and _numbers(version) < _TRTLLM_WINDOWS_SINCE:
        model = _without_windows(model, reading)
    _formats(reading)
    _limits(reading)
    at = f"{engine}@{version}" if version else engine
    try:
        deployment = build_deployment(model, point.gpu, engine=at, strict_version=False, **reading.settings)
    except BstarError as error:
        if "max_num_batched_tokens" not in str(error) and "max_model_len" not in str(error):
            raise
        # Limits that contradict each other in the row's own flags: the engine's defaults, and the row says so.
        for name in ("max_num_batched_tokens", "max_model_len", "max_num_seqs"):
            reading.settings.pop(name, None)
        reading.notes.append(f"flags left out: {error}")
        deployment = build_deployment(model, point.gpu, engine=at, strict_version=False, **reading.settings)
    return MappedPoint(deployment=deployment, notes=tuple(reading.notes))


def engine_of(text: str) -> str:
    """"trtllm", "vllm", … of an engine's name as a table writes it. Raises SpecError."""
    return _product(text)[0]


def _product(text: str) -> tuple[str, str | None]:
    words = text.lower()
    for word, engine, version in _ENGINES:
        if word in words and not (version and ("vllm" in words or "sglang" in words)):
            return engine, version
    raise SpecError(f"engine: {text[:60]!r} is not known; use vLLM, SGLang, TensorRT-LLM, llama.cpp or transformers")


def _engine(point: LatencyPoint) -> tuple[str, str]:
    """(engine, version or ""): of a product around an engine the engine's version of its time."""
    engine, shipped = _product(point.engine)
    if shipped is not None:
        return engine, shipped
    dated = next((v for (name, date), v in _DATED.items() if name == engine and date in point.engine_version), None)
    found = re.search(r"\d+\.\d+(\.\d+)?(rc\d+|\.post\d+)?", point.engine_version)
    return engine, dated or (found[0] if found else "")


def _flags(reading: _Reading) -> None:
    """Settings of the launch command, where the row has one or a part of one."""
    point = reading.point
    text = point.flags
    if not re.search(r"(^|\s)--?[a-z]", text):
        for name, value in re.findall(r"\b(max_num_seqs|max_num_batched_tokens|max_model_len)=(\d+)", text):
            reading.settings[name] = int(value)
        return
    from bstar.codec.engine_command import parse_command

    started = any(word in text for word in ("vllm serve", "launch_server", "trtllm-serve"))
    text = re.sub(r"--model[= ]\$\([A-Z_]+\)", "", text)
    command = text if started else _LAUNCHERS.get(reading.engine, "").format(model=point.model, flags=text)
    try:
        parsed = parse_command(command)
    except BstarError as error:
        # Tables cut long commands off: the last flag may lack its end.
        reading.notes.append(f"flags read in part: {error}")
        try:
            parsed = parse_command(command[: command.rfind(" --")])
        except BstarError:
            return
    kept = dict(parsed.settings)
    for name in ("model", "gpu"):
        kept.pop(name, None)
    reading.settings.update(kept)
    if parsed.unmodelled:
        reading.notes.append(f"flags without a model: {', '.join(parsed.unmodelled)[:200]}")


def _layout(reading: _Reading) -> None:
    """Degrees of parallelism: the columns, then what the notes say of them."""
    point, settings = reading.point, reading.settings
    attention_dp = _attention_dp(reading)
    tp, pp = point.tp or 1, point.pp or 1
    dp = point.dp or 1
    if attention_dp > 1:
        tp, dp = 1, 1
    elif dp > 1 and point.num_gpus and tp * pp * dp > point.num_gpus:
        tp = max(1, point.num_gpus // (dp * pp))
        reading.notes.append(f"layout: {point.num_gpus} GPUs hold tp {tp}, pp {pp}, dp {dp}")
    elif point.num_gpus and point.tp is None and point.pp is None and point.dp is None:
        tp = point.num_gpus
        reading.notes.append(f"layout not stated: tensor parallel over all {tp} GPUs")
    if "dp" in settings and attention_dp > 1:
        settings.pop("dp")
    if attention_dp == 1 and reading.engine == "vllm":
        dp = max(dp, int(settings.pop("dp", 1)))
    settings.update(tp=tp, pp=pp, dp=dp, attention_dp=attention_dp)
    text = point.expert_parallel
    ranks = tp * attention_dp * (dp if reading.engine == "vllm" else 1)
    settings.pop("enable_expert_parallel", None)
    if text == "yes":
        settings["ep"] = ranks
    elif text.replace(".", "").isdigit():
        settings["ep"] = min(int(float(text)), ranks)
    elif settings.get("ep") is not None:
        settings["ep"] = min(int(settings["ep"]), ranks)


def _attention_dp(reading: _Reading) -> int:
    """Ranks of data-parallel attention; 1: none."""
    point, settings = reading.point, reading.settings
    given = int(settings.get("attention_dp", 1) or 1)
    if reading.engine == "sglang" and (given > 1 or "enable-dp-attention" in point.flags):
        return max(given, point.dp or 1) if max(given, point.dp or 1) > 1 else 1
    if reading.engine == "trtllm":
        if point.dp and point.dp > 1 and point.expert_parallel:
            return point.dp
        if "enable_attention_dp" in point.notes and point.tp and point.tp > 1 and _is_moe(point):
            reading.notes.append("attention data parallel over all ranks, as the notes say of MoE runs")
            return point.tp
    return given if reading.engine == "trtllm" else 1


def _longer(reading: _Reading, tokens: int) -> None:
    """A max_model_len beyond the config where the row's requests are longer than the model was made for."""
    limit = _spec(_known_name(reading.point.model)).max_context_tokens
    if limit and tokens > limit:
        reading.settings.update(max_model_len=tokens, allow_long_max_model_len=True)
        reading.notes.append(f"requests of {tokens} tokens on a model of {limit}")


def _is_moe(point: LatencyPoint) -> bool:
    return _spec(_known_name(point.model)).is_moe


def _without_windows(model: ModelSpec, reading: _Reading) -> ModelSpec:
    """The model with every sliding window as wide as the context."""
    groups = tuple(
        replace(g, mixer=replace(g.mixer, window=None))
        if isinstance(g.mixer, GroupedQueryAttention) and g.mixer.window and not g.mixer.chunked else g
        for g in model.layers)
    if groups == model.layers:
        return model
    reading.notes.append("no sliding window: the C++ runtime takes max_attention_window_size from its command alone")
    return replace(model, layers=groups)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def _model(reading: _Reading, models: Mapping[str, ModelSpec]) -> ModelSpec:
    name = reading.point.model
    return models.get(name) or _spec(_known_name(name))


@lru_cache(maxsize=256)
def _spec(name: str) -> ModelSpec:
    from bstar.codec.resolve import resolve_model

    return resolve_model(name)


def _known_name(text: str) -> str:
    """The catalog's or the Hub's name in what a table calls a model: no remark, no local folder, no GGUF type."""
    name = re.sub(r"\s*\([^()]*\)\s*$", "", text.strip())
    name = re.sub(r"(-GGUF)?:[A-Z0-9_]+$", "", name)
    if name.startswith("/"):
        name = name.rstrip("/").rsplit("/", 1)[-1]
    return name.split(" ")[0] if " " in name and not name.lower().endswith(("nvfp4", "fp8")) else name


def _formats(reading: _Reading) -> None:
    """weight_dtype, dtype and kv_cache_dtype."""
    point, settings = reading.point, reading.settings
    label = point.weight_dtype.lower()
    weights = re.split(r"[ (]", label, maxsplit=1)[0]
    if "label" in label and weights == "fp8":
        # What such tables call FP8 is a checkpoint that comes as MXFP4 alone: the activations' or the cache's format.
        reading.notes.append("weights as the checkpoint stores them: its label says FP8, no such checkpoint exists")
        weights = ""
    if "bitsandbytes" in point.flags and settings.get("weight_dtype") is None:
        weights = "w4a16"
        reading.notes.append("bitsandbytes quantizes on load to 4 bits (NF4), whatever the label says")
    if weights in ("fp16", "bf16", "fp32"):
        settings["weight_dtype"] = settings["dtype"] = weights
    elif weights.startswith(("q4", "iq4")):
        settings["weight_dtype"] = "w4a16"
        reading.notes.append(f"{weights} taken as 4-bit weights in groups")
    elif weights and "checkpoint" not in label and weights not in ("unknown", "default"):
        settings["weight_dtype"] = weights
    kv = point.kv_dtype.lower()
    if kv in ("fp16", "bf16", "auto"):
        settings["kv_cache_dtype"] = "auto"
    elif kv:
        settings["kv_cache_dtype"] = "fp8" if kv.startswith("fp8") else kv
    elif settings.get("kv_cache_dtype") in (None, "auto") and _recipe_quantizes_cache(point, reading.engine):
        settings["kv_cache_dtype"] = "fp8"
        reading.notes.append("KV cache fp8: TensorRT-LLM's recipe for fp8 and fp4 weights")


def _recipe_quantizes_cache(point: LatencyPoint, engine: str) -> bool:
    """Whether NVIDIA's quantization recipe made the checkpoint, and with it an fp8 cache."""
    served = "trtllm-serve" in point.flags  # somebody else's checkpoint from the Hub
    label = point.weight_dtype.lower()
    narrow = label.startswith(("fp8", "fp4", "nvfp4", "mxfp4"))
    return engine == "trtllm" and narrow and not served


def _limits(reading: _Reading) -> None:
    """Batch limits that the harness sets, and what the version could not do yet."""
    point, settings, engine = reading.point, reading.settings, reading.engine
    if point.load == "max_load":
        settings.setdefault("max_num_seqs", _BENCH_MAX_BATCH)
        # A whole prompt and a token of every sequence have to fit into a step.
        longest = round(point.input_tokens or 0) + settings["max_num_seqs"]
        settings.setdefault("max_num_batched_tokens", max(_BENCH_TOKENS, longest))
        fraction = re.search(r"mem_fraction (0\.\d+)", point.flags)
        if fraction:
            settings.setdefault("gpu_memory_utilization", float(fraction[1]))
    if point.load != "static_batch" and point.input_tokens and "max_model_len" not in settings:
        _longer(reading, round(point.input_tokens + (point.output_tokens or 0.0)) + 1)
    numbers = _numbers(reading.version)
    if engine == "vllm" and numbers and numbers < _VLLM_GRAPHS_SINCE:
        settings["enforce_eager"] = True
