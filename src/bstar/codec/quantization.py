"""quantization_config and hf_quant_config.json -> the storage format of every tensor.

    which modules   names, globs, "re:" patterns, class targets ("Linear"), exclusions: module_names
    which format    fp8 (tensor, channel, block) · int8 · int4 groups · nvfp4 · mxfp4 · nf4, with or without
                    quantized activations
Embedding, head, norms, router and other small tensors keep the model's dtype unless they are named.
Sources: vLLM 0.32 (model_executor/layers/quantization), compressed-tensors, ModelOpt, AutoGPTQ, AutoAWQ,
bitsandbytes, Quark and AutoRound config formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bstar.codec import quantization_formats as formats
from bstar.codec.module_names import Patterns, local_names, spelled_in
from bstar.errors import ConfigError
from bstar.specs.formats import (
    BF16,
    FP8,
    FP8_CHANNEL,
    MXFP4,
    TensorFormat,
)
from bstar.specs.model import UNQUANTIZED_PREFIXES, UNQUANTIZED_ROLES, UNQUANTIZED_TENSORS, WeightFormats
from bstar.specs.tensors import Role, WeightTensor


@dataclass(slots=True, kw_only=True)
class Quantization:
    """The formats a checkpoint asks for.

    default         of every GEMM weight that nothing else decides (None: the model's dtype)
    named           formats by module name, tried first, in order; None: the model's dtype
    excluded        modules kept in the model's dtype
    roles           the roles `default` applies to (None: every GEMM role)
    kv_cache_dtype  what the checkpoint asks the cache to be
    """

    default: TensorFormat | None = None
    named: list[tuple[Patterns, TensorFormat | None]] = field(default_factory=list)
    excluded: Patterns | None = None
    roles: frozenset[Role] | None = None
    kv_cache_dtype: str | None = None
    notes: list[str] = field(default_factory=list)
    _found: dict[tuple[int, tuple[WeightTensor, ...]], WeightFormats] = field(default_factory=dict)
    _spelled: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def _patterns(self) -> list[Patterns]:
        return [p for p, _ in self.named] + ([self.excluded] if self.excluded is not None else [])

    def _spellings(self, name: str) -> tuple[str, ...]:
        """The spellings of a tensor that some pattern could name."""
        if name not in self._spelled:
            tokens = [p.tokens for p in self._patterns()]
            some = frozenset().union(*(t for t in tokens if t is not None))
            self._spelled[name] = spelled_in(local_names(name), None if None in tokens else some)
        return self._spelled[name]

    def _format_of(self, names: Sequence[str], tensor: WeightTensor) -> TensorFormat | None:
        for patterns, fmt in self.named:
            if patterns.match(names):
                return fmt
        if self.default is None or (self.roles is not None and tensor.role not in self.roles):
            return None
        if tensor.role in UNQUANTIZED_ROLES or tensor.name in UNQUANTIZED_TENSORS or tensor.name.startswith(
                UNQUANTIZED_PREFIXES):
            return None
        if self.excluded is not None and self.excluded.match(names):
            return None
        return self.default

    def _formats(self, tensors: Sequence[WeightTensor], names: Callable[[str], Sequence[str]], base: TensorFormat
                 ) -> WeightFormats:
        """The format that holds most GEMM weights as the default, the other tensors by name."""
        chosen = {t: self._format_of(names(t.name), t) or base
                  for t in tensors if t.matmul or t.role == "embedding"}
        weight: dict[TensorFormat, int] = {}
        for tensor, fmt in chosen.items():
            if tensor.role not in UNQUANTIZED_ROLES:
                weight[fmt] = weight.get(fmt, 0) + tensor.parameters
        plain = WeightFormats(base=base, default=max(weight, key=lambda f: weight[f]) if weight else base)
        return replace(plain, overrides=tuple(
            (tensor.name, fmt) for tensor, fmt in chosen.items() if fmt != plain.of(tensor)))

    def layer_formats(self, index: int, tensors: Sequence[WeightTensor], base: TensorFormat) -> WeightFormats:
        """The formats of layer `index`, which holds `tensors`."""
        if self.default is None and not self.named:
            return WeightFormats(base=base, default=base)
        key = (index if any(p.by_layer for p in self._patterns()) else 0, tuple(tensors))
        if key not in self._found:
            self._found[key] = self._formats(
                tensors, lambda n: [f"layers.{index}.{x}" for x in self._spellings(n)], base)
        return self._found[key]

    def prediction_formats(self, index: int, tensors: Sequence[WeightTensor], base: TensorFormat) -> WeightFormats:
        """The formats of a prediction layer: "layers.<index>" behind the decoder's, or "mtp.layers.0"."""
        if self.default is None and not self.named:
            return WeightFormats(base=base, default=base)
        stacks = (f"layers.{index}", "mtp.layers.0")
        return self._formats(tensors, lambda n: [f"{s}.{x}" for s in stacks for x in self._spellings(n)], base)

    def outer_formats(self, tensors: Sequence[WeightTensor], base: TensorFormat) -> WeightFormats:
        """The formats of embedding, head and what else stands outside the layers."""
        return self._formats(tensors, lambda n: (n, "head") if n == "lm_head" else (n,), base)


def quantization_of(
    raw: Mapping[str, Any], text: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, *,
    base: TensorFormat = BF16,
) -> Quantization:
    """What the files ask for; no quantization where they say nothing.

    raw              config.json; `text` its nested text config (either may hold quantization_config)
    hf_quant_config  ModelOpt's file beside it, used where config.json is silent
    Raises ConfigError naming an unknown method, algorithm or width.
    """
    config = _section(raw) or _section(text)
    beside = _hf_section(hf_quant_config)
    if config is None:
        config = beside
    if config is None:
        return Quantization()
    method = _method(config)
    inner = config.get("quantization")
    if isinstance(inner, Mapping):  # ModelOpt's file, pasted into config.json
        config = {**config, **inner}
    found = _METHODS[method](config, base)
    if found.kv_cache_dtype is None:
        found.kv_cache_dtype = _kv_cache_dtype(config) or (_kv_cache_dtype(beside) if beside else None)
    expert_dtype = raw.get("expert_dtype", text.get("expert_dtype"))
    if method == "fp8" and expert_dtype == "fp4" and not found.named:
        # DeepSeek V4's own checkpoints: routed experts in MXFP4, the rest in block fp8.
        found.named.append((Patterns(("re:.*experts\\.[0-9*].*",), where="expert_dtype"), formats.MXFP4_W4A8))
    return found


def _section(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    value = raw.get("quantization_config", raw.get("compression_config"))
    if value is None or value == {}:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: quantization_config is a {type(value).__name__}; it must be an object")
    return value


def _hf_section(raw: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if raw is None:
        return None
    inner = raw.get("quantization", raw) if isinstance(raw, Mapping) else None
    if not isinstance(inner, Mapping):
        raise ConfigError("hf_quant_config.json: quantization must be an object")
    if inner is raw and raw and "quant_algo" not in raw:
        raise ConfigError("hf_quant_config.json: quantization is missing; it must hold quant_algo")
    if inner.get("quant_algo") is None and not inner.get("quantized_layers"):
        return None
    return {"quant_method": "modelopt", **inner}


def _method(config: Mapping[str, Any]) -> str:
    method = config.get("quant_method")
    if method is None:
        if config.get("quant_algo") or "producer" in config or "quantization" in config:
            return "modelopt"
        if "config_groups" in config:
            return "compressed-tensors"
        if config.get("load_in_4bit") or config.get("load_in_8bit"):
            return "bitsandbytes"
        raise ConfigError(f"config.json: quantization_config.quant_method is missing; known are {_known()}")
    if not isinstance(method, str):
        raise ConfigError("config.json: quantization_config.quant_method must be a string")
    key = _ALIASES.get(method.lower(), method.lower())
    if key not in _METHODS:
        raise ConfigError(
            f"config.json: quantization_config.quant_method {method[:40]!r} is not known; known are {_known()} "
            "(or give --weight-dtype and remove quantization_config)")
    return key


def _known() -> str:
    return ", ".join(sorted(_METHODS))


def _listed(config: Mapping[str, Any], *keys: str) -> list[Any]:
    """The module names under the first of `keys` that is set."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, str):
            return [value]
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"config.json: quantization_config.{key} must be a list of module names")
        if len(value) > 200_000:
            raise ConfigError(f"config.json: quantization_config.{key} has {len(value)} entries; at most 200000")
        return list(value)
    return []


def _kv_cache_dtype(config: Mapping[str, Any]) -> str | None:
    """"fp8" or "nvfp4" where the checkpoint carries scales for a quantized cache."""
    for key in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method"):
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, str):
            name = value.lower().replace("kv_", "")
            if name.startswith("fp8"):
                return "fp8"
            if name.startswith(("nvfp4", "fp4")):
                return "nvfp4"
            if name.startswith("int8"):
                return "int8"
            if name in ("none", ""):
                return None
        if isinstance(value, Mapping):
            bits, kind = value.get("num_bits"), str(value.get("type", "float")).lower()
            if bits == 8:
                return "fp8" if kind == "float" else "int8"
            if bits == 4 and kind == "float":
                return "nvfp4"
            if bits is None:
                return None
        raise ConfigError(f"config.json: quantization_config.{key} {str(value)[:60]!r} is not known; known are 8-bit "
                          "float (fp8), 8-bit int and nvfp4")
    return None


# -- methods ---------------------------------------------------------------------------------------


def _fp8(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    default = formats.fp8(config)
    found = Quantization(default=default, excluded=Patterns(
        _listed(config, "modules_to_not_convert", "ignored_layers"), where="modules_to_not_convert"))
    found.named = _quantized_layers(config)
    return found


def _modelopt(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    ignored = Patterns(_listed(config, "exclude_modules", "ignore", "exclude"), where="ignore")
    named = _quantized_layers(config)
    algorithm = config.get("quant_algo")
    if named or str(algorithm).upper() == "MIXED_PRECISION":
        return Quantization(named=[(ignored, None), *named] if ignored else named)
    if algorithm is None:
        groups = config.get("config_groups")
        if isinstance(groups, Mapping):
            return _compressed_tensors(config, base)
        raise ConfigError("config.json: quantization_config.quant_algo is missing; known are "
                          + ", ".join(sorted(formats.MODELOPT)))
    fmt = formats.modelopt(str(algorithm), config)
    return Quantization(default=fmt, excluded=ignored)


def _quantized_layers(config: Mapping[str, Any]) -> list[tuple[Patterns, TensorFormat | None]]:
    """ModelOpt's map of module name -> algorithm, as one pattern set per format."""
    layers = config.get("quantized_layers")
    if layers is None:
        return []
    if not isinstance(layers, Mapping):
        raise ConfigError("config.json: quantization_config.quantized_layers must be an object of module names")
    if len(layers) > 400_000:
        raise ConfigError(f"config.json: quantized_layers has {len(layers)} entries; at most 400000")
    by_format: dict[TensorFormat, list[str]] = {}
    for name, spec in layers.items():
        if not isinstance(spec, Mapping):
            raise ConfigError(f"config.json: quantized_layers.{str(name)[:60]} must be an object with quant_algo")
        fmt = formats.modelopt(str(spec.get("quant_algo")), spec)
        by_format.setdefault(fmt, []).append(str(name))
    return [(Patterns(names, where="quantized_layers"), fmt) for fmt, names in by_format.items()]


def _compressed_tensors(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("config.json: quantization_config.config_groups is missing; it must be an object of groups")
    named: list[tuple[Patterns, TensorFormat | None]] = []
    ignored = Patterns(_listed(config, "ignore"), where="ignore")
    if ignored:
        named.append((ignored, None))
    default: TensorFormat | None = None
    for key, group in groups.items():
        if not isinstance(group, Mapping):
            raise ConfigError(f"config.json: config_groups.{str(key)[:40]} must be an object")
        fmt = formats.compressed(group, str(group.get("format") or config.get("format") or ""))
        targets = _listed(group, "targets") or ["Linear"]
        classes = [t for t in targets if t in ("Linear", "FusedMoE", "MoE")]
        if classes:
            default = default or fmt
        names = [t for t in targets if t not in classes]
        if names:
            named.append((Patterns(names, where="targets"), fmt))
    return Quantization(default=default, named=named)


def _gptq(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    fmt = formats.integer_groups(config, bits_keys=("bits", "w_bit"), zero_points=True)
    named: list[tuple[Patterns, TensorFormat | None]] = []
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ConfigError("config.json: quantization_config.dynamic must be an object of patterns")
    for pattern, change in dynamic.items():
        text = str(pattern)
        expression = Patterns(("re:" + text.removeprefix("-:").removeprefix("+:"),), where="dynamic")
        if text.startswith("-:"):
            named.append((expression, None))
        elif isinstance(change, Mapping):
            named.append((expression, formats.integer_groups(
                {**config, **change}, bits_keys=("bits", "w_bit"), zero_points=True)))
    if config.get("lm_head") is True:
        named.append((Patterns(("lm_head",), where="lm_head"), fmt))
    return Quantization(default=fmt, named=named, excluded=Patterns(
        _listed(config, "modules_to_not_convert"), where="modules_to_not_convert", substring=True))


def _awq(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    fmt = formats.integer_groups(config, bits_keys=("bits", "w_bit"),
                                 zero_points=config.get("zero_point", True) is not False)
    return Quantization(default=fmt, excluded=Patterns(
        _listed(config, "modules_to_not_convert"), where="modules_to_not_convert", substring=True))


def _bitsandbytes(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    return Quantization(default=formats.bitsandbytes(config), excluded=Patterns(
        _listed(config, "llm_int8_skip_modules"), where="llm_int8_skip_modules"))


def _mxfp4(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    return Quantization(default=MXFP4, roles=frozenset({"experts"}), excluded=Patterns(
        _listed(config, "modules_to_not_convert"), where="modules_to_not_convert"))


def _fbgemm(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    return Quantization(default=FP8_CHANNEL, excluded=Patterns(
        _listed(config, "modules_to_not_convert"), where="modules_to_not_convert"))


def _quark(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    named: list[tuple[Patterns, TensorFormat | None]] = []
    ignored = Patterns(_listed(config, "exclude"), where="exclude")
    if ignored:
        named.append((ignored, None))
    layers = config.get("layer_quant_config") or {}
    if not isinstance(layers, Mapping):
        raise ConfigError("config.json: quantization_config.layer_quant_config must be an object of patterns")
    for pattern, spec in layers.items():
        named.append((Patterns((str(pattern),), where="layer_quant_config"), formats.quark(spec)))
    overall = config.get("global_quant_config")
    return Quantization(default=formats.quark(overall) if overall is not None else None, named=named)


def _auto_round(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    fmt = formats.integer_groups(config, bits_keys=("bits",), zero_points=config.get("sym") is not True)
    named: list[tuple[Patterns, TensorFormat | None]] = []
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError("config.json: quantization_config.extra_config must be an object of module names")
    for pattern, change in extra.items():
        if not isinstance(change, Mapping):
            continue
        merged = {**config, **change}
        text = str(pattern)
        regular = any(c in text for c in "*[(|\\")
        patterns = Patterns((f"re:{text}" if regular else text,), where="extra_config")
        bits = merged.get("bits")
        wide = isinstance(bits, int) and bits >= 16
        named.append((patterns, None if wide else formats.integer_groups(
            merged, bits_keys=("bits",), zero_points=merged.get("sym") is not True)))
    return Quantization(default=fmt, named=named, excluded=Patterns(
        _listed(config, "modules_to_not_convert"), where="modules_to_not_convert"))


def _torchao(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    return Quantization(default=formats.torchao(config), excluded=Patterns(
        _listed(config, "modules_to_not_convert"), where="modules_to_not_convert"))


def _hqq(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    inner = config.get("quant_config")
    params: Any = inner.get("weight_quant_params", {}) if isinstance(inner, Mapping) else {}
    if not isinstance(params, Mapping):
        raise ConfigError("config.json: quantization_config.quant_config.weight_quant_params must be an object")
    fmt = formats.integer_groups({"bits": params.get("nbits"), "group_size": params.get("group_size", 64)},
                                 bits_keys=("bits",), zero_points=True)
    return Quantization(default=replace(fmt, zero_point_bits=16), excluded=Patterns(
        _listed(config, "skip_modules"), where="skip_modules"))


def _experts_int8(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    return Quantization(default=formats.W8A16_CHANNEL, roles=frozenset({"experts"}))


def _fp8_tensor(config: Mapping[str, Any], base: TensorFormat) -> Quantization:
    return Quantization(default=FP8, excluded=Patterns(_listed(config, "ignored_layers"), where="ignored_layers"))


_METHODS: dict[str, Callable[[Mapping[str, Any], TensorFormat], Quantization]] = {
    "fp8": _fp8, "modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq,
    "bitsandbytes": _bitsandbytes, "mxfp4": _mxfp4, "fbgemm_fp8": _fbgemm, "quark": _quark,
    "auto-round": _auto_round, "torchao": _torchao, "hqq": _hqq, "experts_int8": _experts_int8,
    "ptpc_fp8": _fbgemm, "fp8_per_tensor": _fp8_tensor,
}  # fmt: skip
_ALIASES = {
    "compressed_tensors": "compressed-tensors", "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt", "nvfp4": "modelopt", "petit_nvfp4": "modelopt", "gptq_marlin": "gptq",
    "gptqmodel": "gptq", "awq_marlin": "awq", "bnb": "bitsandbytes", "auto_round": "auto-round",
    "intel/auto-round": "auto-round", "inc": "auto-round", "deepseek_v4_fp8": "fp8", "gpt_oss_mxfp4": "mxfp4",
    "finegrained_fp8": "fp8",
}  # fmt: skip
