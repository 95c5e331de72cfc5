"""The deployment that a measured point names, as its harness served it.

A point was measured, so it ran: where the labels contradict themselves, or name what the engine would refuse, the
nearest deployment that works is taken and a note says so. Only a model or a GPU that is not known is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd
from typing import Any, Final, Literal

from bstar.calibration.point import Point, Pool
from bstar.catalog.devices import get_device
from bstar.catalog.engines import ENGINES
from bstar.codec.build import build_deployment
from bstar.codec.resolve import resolve_model, with_weight_dtype
from bstar.errors import BstarError, SpecError
from bstar.physics.arithmetic import computed_dtype
from bstar.physics.partition import check_parallel
from bstar.specs.attention import LatentAttention
from bstar.specs.deployment import Deployment
from bstar.specs.device import DeviceSpec
from bstar.specs.engine import EngineSettings
from bstar.specs.formats import tensor_format
from bstar.specs.model import ModelSpec

Side = Literal["prefill", "decode"]

_ENGINES: Final = {
    "tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "tensorrtllm": "trtllm", "trt-llm": "trtllm", "trt": "trtllm",
    "trtllm": "trtllm", "sgl": "sglang", "sglang": "sglang", "vllm": "vllm",
}  # fmt: skip
# Spellings of measured files (those of AIConfigurator's quantization modes among them) that formats do not know.
_DTYPES: Final = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "int4_wo": "w4a16", "int8_wo": "w8a16", "sq": "int8",
    "w4afp8": "w4a16", "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4", "w4a8_mxfp4_fp8": "mxfp4",
    "float8_e4m3fn": "fp8", "float8_e4m3": "fp8",
    "awq": "w4a16", "gptq": "w4a16", "auto": "", "default": "", "checkpoint default": "", "mixed": "",
}  # fmt: skip
# Tokens beyond the nominal lengths that the harnesses give max_model_len.
_SPARE_TOKENS: Final = 256
_SMALL_BUDGET: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism to try, and what has to be said of them."""

    tp: int
    pp: int = 1
    dp: int = 1
    attention_dp: int = 1
    ep: int = 1
    note: str = ""


def deployment_of(point: Point, *, side: Side | None = None) -> Deployment:
    """The deployment of `point`; of one worker of a side where it is disaggregated. What was assumed is in its
    engine's notes.

    Raises SpecError for a row that cannot be read, NotInCatalogError or ConfigError for what is not known.
    """
    if point.fault is not None:
        raise SpecError(point.fault)
    if side is None and point.is_disaggregated:
        raise SpecError("mode: a disaggregated row has two deployments; ask for its prefill or its decode side")
    engine, notes = engine_name(point.engine)
    device = get_device(point.gpu)
    model, of_dtype = _model(point.model, point.weight_dtype or "")
    model, of_kernels = _with_kernels(model, device)
    notes += of_dtype + of_kernels
    version = f"@{point.engine_version}" if point.engine_version else ""
    first: BstarError | None = None
    for layout in _layouts(point, model, engine, side):
        try:
            flags = run_flags(point, layout)
            found = _built(model, device, engine + version, flags)
        except SpecError as error:
            first = first or error
            continue
        refused = check_parallel(found.model, found.parallel, found.engine)
        if refused:
            first = first or SpecError(refused[0])
            continue
        if first is not None:
            notes += (f"layout taken as {layout.note}, because of the labelled one: {first}",)
        notes += _beyond_context(point, found.model) + _of_recipe(point, flags)
        return replace(found, engine=_admitting(found.engine, point, notes))
    raise first or SpecError("layout: the row's GPUs cannot be laid out for the model")


def _beyond_context(point: Point, model: ModelSpec) -> tuple[str, ...]:
    limit, tokens = model.max_context_tokens, round(point.input_tokens + point.output_tokens)
    return (f"requests of {tokens} tokens on a model of {limit}",) if limit and tokens > limit else ()


def _of_recipe(point: Point, flags: dict[str, Any]) -> tuple[str, ...]:
    """What the harness set that the row does not say."""
    if point.harness != "inferencex" or point.is_disaggregated:
        return ()
    own = {"tp", "pp", "dp", "attention_dp", "ep", "enable_prefix_caching", "allow_long_max_model_len"}
    said = sorted(f"{name} {value}" for name, value in flags.items() if name not in own)
    return (f"flags of the harness's runs: {', '.join(said)}",)


def _built(model: ModelSpec, device: DeviceSpec, engine: str, flags: dict[str, Any]) -> Deployment:
    """The deployment; an engine that cannot chunk prompts gets a token budget of a whole one."""
    try:
        return build_deployment(model, device, engine=engine, strict_version=False, **flags)
    except SpecError as error:
        if not str(error).startswith("max_num_batched_tokens"):
            raise
        whole = {"max_num_batched_tokens": flags["max_model_len"]}
        return build_deployment(model, device, engine=engine, strict_version=False, **(flags | whole))


def _with_kernels(model: ModelSpec, device: DeviceSpec) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model in a format that the device has kernels for: weights alone in it, where it cannot compute in it."""
    for group in model.layers:
        found = group.formats.default
        try:
            computed_dtype(device, found.compute_dtype)
        except SpecError as error:
            alone = "w8a16" if found.bits == 8 else "w4a16"
            note = f"weight dtype taken as {alone}, because of the labelled one: {error}"
            return with_weight_dtype(model, alone), (note,)
    return model, ()


def _admitting(engine: EngineSettings, point: Point, notes: tuple[str, ...]) -> EngineSettings:
    """The settings with `notes`, and with a token budget that admits the point's prompts."""
    longest = ceil(point.input_tokens)
    budget = engine.max_num_batched_tokens
    if not engine.enable_chunked_prefill and budget < longest:
        notes += (f"max_num_batched_tokens taken as {longest}: prompts are not chunked",)
        budget = longest
    return replace(engine, max_num_batched_tokens=budget, notes=(*engine.notes, *notes))


def _undocumented(point: Point) -> dict[str, Any]:
    """Flags of NVIDIA's runs, which no recipe lists: those that explain their TTFT.

    Configured by AIConfigurator: a token budget of a prompt and the batch (max_num_tokens), so about one prompt a step;
    under vLLM no more than 2,048 (longer prompts are chunked); quantized checkpoints for TensorRT-LLM say that their
    cache is fp8 too.
    """
    engine = engine_name(point.engine)[0]
    if point.is_disaggregated or engine == "sglang":
        return {}
    budget = ceil(point.input_tokens) + point.concurrency
    if engine == "vllm":
        budget = max(min(_SMALL_BUDGET, budget), point.concurrency)
    flags: dict[str, Any] = {"max_num_batched_tokens": budget}
    if engine == "trtllm" and (point.weight_dtype or "").lower()[:3] in ("fp8", "fp4", "nvf"):
        flags["kv_cache_dtype"] = "fp8"
    return flags


def model_of(point: Point) -> ModelSpec:
    """The point's model. Raises what `resolve_model` raises."""
    return _model(point.model, point.weight_dtype or "")[0]


def engine_name(text: str) -> tuple[str, tuple[str, ...]]:
    """(engine, notes): as bstar calls it; an engine that is not known is taken for vLLM, with a note."""
    key = text.strip().lower()
    for name in (key, key.split("(")[0].strip(), key.split(" ")[0]):
        if name in _ENGINES:
            return _ENGINES[name], ()
    near = [name for name in ENGINES if name in key]
    if near:
        return near[0], ()
    return "vllm", (f"engine {text[:40]!r} is not known: taken for vllm",)


def run_flags(point: Point, layout: Layout) -> dict[str, Any]:
    """Keywords of `build_deployment` that the point's harness served with, those of the layout among them."""
    of_layout = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "attention_dp": layout.attention_dp,
                 "ep": layout.ep}
    of_row = {"kv_cache_dtype": point.kv_dtype} if point.kv_dtype else {}
    longest = int(point.input_tokens + point.output_tokens) + _SPARE_TOKENS
    common = of_layout | {"enable_prefix_caching": False, "allow_long_max_model_len": True}  # prompts share nothing
    if point.harness != "inferencex" or point.is_disaggregated:
        return common | {"max_model_len": longest} | _undocumented(point) | of_row
    from bstar.catalog.run_settings import run_settings

    found = run_settings(
        engine_name(point.engine)[0], point.gpu, point.model, point.weight_dtype or "",
        isl_tokens=ceil(point.input_tokens), osl_tokens=ceil(point.output_tokens), concurrency=point.concurrency,
        tp=layout.tp, attention_dp=layout.attention_dp, ep=layout.ep, measured_on=point.measured_on or None)
    flags = common | found.flags | of_row
    if flags.pop("enable_expert_parallel", False) and layout.tp * layout.attention_dp > 1:
        flags["ep"] = layout.tp * layout.attention_dp
    flags["max_model_len"] = max(int(flags.get("max_model_len") or longest), longest - _SPARE_TOKENS + 8)
    return flags


@lru_cache(maxsize=512)
def _model(name: str, dtype: str) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model in the dtype of the row. Raises what `resolve_model` raises."""
    found = _resolved(name)
    if isinstance(found, BstarError):
        raise found
    key = dtype.strip().lower().replace(" ", "_")
    key = _DTYPES.get(key, _DTYPES.get(dtype.strip().lower(), key))
    if not key:
        return found, ()
    try:
        tensor_format(key)
    except SpecError:
        return found, (f"weight dtype {dtype[:40]!r} is not known: the checkpoint's own is taken",)
    return resolve_model(name, weight_dtype=key), ()


@lru_cache(maxsize=256)
def _resolved(name: str) -> ModelSpec | BstarError:
    """The model, or why there is none: asked for once a name, as it may ask the Hub."""
    try:
        return resolve_model(name)
    except BstarError as error:
        return error


def _layouts(point: Point, model: ModelSpec, engine: str, side: Side | None) -> Iterator[Layout]:
    """The labelled layout, then ever more distant ones on as many GPUs."""
    first = _labelled(point, model, side)
    if engine == "trtllm" and first.attention_dp > 1 and first.tp > 1:
        ranks = first.tp * first.attention_dp
        first = replace(first, tp=1, attention_dp=ranks)  # the engine has no other
    yield first
    ranks = first.tp * first.attention_dp
    if 1 < first.ep < ranks:
        yield replace(first, ep=ranks, note=f"expert parallelism over all {ranks} ranks")
    yield replace(first, ep=1, note="experts sharded by width")
    # TP replicates a latent cache on every rank: wide deployments of such models have data-parallel attention.
    latent = any(isinstance(group.mixer, LatentAttention) for group in model.layers)
    widths = range(1, 17) if latent and ranks > 16 else range(min(ranks, 16), 0, -1)
    for tp in widths:
        if ranks % tp:
            continue
        wide = ranks // tp
        note = f"tp {tp}" + (f", {wide} data-parallel ranks" if wide > 1 else "")
        if model.is_moe and not (engine == "trtllm" and 1 < tp < ranks):
            yield replace(first, tp=tp, attention_dp=wide, ep=ranks, note=note + f", expert parallelism over {ranks}")
            yield replace(first, tp=tp, attention_dp=wide, ep=1, note=note + ", experts sharded by width")
        yield Layout(tp=tp, pp=first.pp, dp=wide, note=note)


def _labelled(point: Point, model: ModelSpec, side: Side | None) -> Layout:
    pool: Pool | None = None if side is None else (point.prefill if side == "prefill" else point.decode)
    if pool is not None:
        ep = pool.moe_ep or 1
        return Layout(tp=pool.tp, pp=pool.pp, attention_dp=_data(pool.attention_dp, model),
                      dp=1 if model.is_moe else pool.attention_dp, ep=ep if model.is_moe else 1)
    wide = point.attention_dp or 1
    tp = point.attention_tp or max((point.num_gpus or 1) // wide, 1)
    ep = point.expert_parallel or 1
    if not model.is_moe:
        return Layout(tp=tp, dp=wide)
    ranks = tp * wide
    if ranks % ep:
        ep = gcd(ranks, ep)
    return Layout(tp=tp, attention_dp=wide, ep=ep)


def _data(attention_dp: int, model: ModelSpec) -> int:
    return attention_dp if model.is_moe else 1
