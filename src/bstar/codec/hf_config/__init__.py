"""config.json -> ModelSpec, by mechanism.

    reader      typed reads, defaults of transformers' configuration classes
    mixers, ffns, decoder    builders of mechanisms, shared by all families
    families    the table: model_type -> how its decoder is made (sparse, hybrids, older: rows that need code)
    multimodal, vision       wrappers around a text config, and their towers
    mtp         prediction layers beside the model
    rope        how a RoPE scaling changes the longest context
    signals     keys that mean a mechanism nobody read: refused

Nothing in a config is executed (`auto_map` is ignored). Every problem is a ConfigError in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bstar.codec.hf_config.families import FAMILIES
from bstar.codec.hf_config.grouping import dominant_format, grouped
from bstar.codec.hf_config.mtp import mtp_block, mtp_layer_count
from bstar.codec.hf_config.multimodal import EMBEDDED_TOWERS, TEXT_KEYS, THINKERS, WRAPPERS, Wrapper
from bstar.codec.hf_config.older import CLASS_OF, OWN_CLASSES
from bstar.codec.hf_config.reader import MAX_CONTEXT, Reader, architectures, class_defaults
from bstar.codec.hf_config.rope import positions_of
from bstar.codec.hf_config.signals import unread_signals
from bstar.codec.quantization import quantization_of
from bstar.errors import ConfigError, SpecError, UnsupportedArchitectureError
from bstar.specs.formats import BF16, FP16, TensorFormat
from bstar.specs.model import ExtraBlock, ModelSpec

__all__ = ["known_model_types", "model_from_config"]

BY_HAND = "--layers --hidden-size --heads --kv-heads --head-dim --intermediate-size --vocab-size --experts …"

# Model types whose text fields stand at the top level beside vision_config in older files.
_FLAT = ("qwen2_vl", "qwen2_5_vl")
# transformers builds these from their own text config (or its defaults) whatever the top level says.
_TOP_IGNORED = ("step3p7",)


def known_model_types() -> tuple[str, ...]:
    """Every model_type that is described, sorted."""
    return tuple(sorted(set(FAMILIES) | set(WRAPPERS) | set(THINKERS)))


def model_from_config(
    raw: Mapping[str, Any], *, name: str, source: str = "", hf_quant_config: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """The model that a config.json describes.

    raw              the parsed file; a text config may be nested in it
    hf_quant_config  the parsed hf_quant_config.json beside it, if there is one
    Raises ConfigError (a value at fault) or UnsupportedArchitectureError (a mechanism not understood).
    """
    if not isinstance(raw, Mapping):
        raise ConfigError("config.json: must hold an object; give the config.json of a language model")
    try:
        return _model(raw, name=name, source=source, hf_quant_config=hf_quant_config)
    except SpecError as error:
        raise ConfigError(_line(f"config.json: {error}")) from None
    except UnsupportedArchitectureError as error:
        raise UnsupportedArchitectureError(_line(str(error)), keys=error.keys) from None
    except ConfigError as error:
        raise ConfigError(_line(str(error))) from None


def _line(message: str) -> str:
    """One printable line: names from the file may hold anything."""
    shown = "".join(c if c.isprintable() else "?" for c in message)
    return shown if len(shown) <= 1200 else shown[:1200] + "…"


def _model(raw: Mapping[str, Any], *, name: str, source: str, hf_quant_config: Mapping[str, Any] | None) -> ModelSpec:
    raw = _thinker(raw)
    model_type, own = _model_type(raw)
    wrapper = WRAPPERS.get(model_type)
    top = Reader(raw, model_type)
    text, text_raw = _text_reader(top, wrapper) if wrapper else (
        _reader(raw, model_type, sizes=own, nested=False), raw)
    decoder = FAMILIES[text.model_type](text)
    unread = unread_signals(text)
    if unread:
        raise _unsupported(text, unread)
    notes = list(decoder.notes)
    if not own:
        kind = str(raw.get("model_type"))[:40]
        about = f"model_type {kind!r} is not known" if "model_type" in raw else "model_type is missing"
        notes.append(f"{about}: described by its architecture's class")
    counted_tied = _counted_tied(top, decoder.tied, wrapper) if wrapper else None
    if wrapper is not None and wrapper.counted and top.has("tie_word_embeddings"):
        decoder.tied = top.flag("tie_word_embeddings")
    if counted_tied is not None and counted_tied != decoder.tied:
        notes.append(f"parameters.total counts the head as {'the embedding' if counted_tied else 'its own'}, as "
                     "transformers does by the class's default; the engine goes by text_config")
    positions = positions_of(text, decoder.context)
    context = positions.longest
    if wrapper is not None and not text_raw and top.has("max_position_embeddings"):
        context = top.size("max_position_embeddings", high=MAX_CONTEXT)
        notes.append("text_config is missing: the class's defaults describe the text model, as transformers does")
    elif text.assumed:
        notes.append(f"{text.path}{', '.join(sorted(text.assumed))} missing: the default of the class of "
                     f"{text.model_type!r}")
    dtype = _dtype(text, top, notes)
    base = FP16 if dtype == "fp16" else BF16
    quantization = quantization_of(raw, text_raw, hf_quant_config, base=base)
    blocks = list(decoder.blocks)
    if wrapper is not None:
        blocks += _tower(top, wrapper, decoder.hidden_size, base, notes)
        blocks += _audio(top, wrapper, decoder.hidden_size, base, notes)
    elif model_type in EMBEDDED_TOWERS:
        tower = EMBEDDED_TOWERS[model_type](text, decoder.hidden_size)
        blocks.append(ExtraBlock(name="vision and audio towers", role="vision", parameters=tower, format=base))
    layers, outer = grouped(decoder, quantization, base)
    main_format = dominant_format(layers, decoder.hidden_size)
    extra = mtp_block(text, top, decoder, quantization, base)
    if extra is not None:
        blocks.append(extra)
    return ModelSpec(
        name=name, architecture=_architecture(raw, model_type), hidden_size=decoder.hidden_size,
        vocab_size=decoder.vocab_size, max_context_tokens=context, engine_context_tokens=positions.default,
        scaled_context_tokens=positions.scaled, rotary_positions=positions.rotary_rows,
        layers=layers, embedding=decoder.embedding,
        lm_head=decoder.lm_head, tied=decoder.tied, head_tensors=decoder.head_tensors, blocks=tuple(blocks),
        outer_formats=outer, dtype=dtype, kv_cache_dtype=quantization.kv_cache_dtype or decoder.kv_cache_dtype,
        weight_dtype=main_format.name, num_mtp_layers=mtp_layer_count(text, top),
        multimodal=any(b.role == "vision" for b in blocks), source=source, counted_tied=counted_tied,
        notes=tuple(notes + quantization.notes))


def _thinker(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a speech model that engines serve."""
    kind = raw.get("model_type")
    inner = raw.get("thinker_config")
    if not isinstance(kind, str) or kind not in THINKERS:
        return raw
    if not isinstance(inner, Mapping):
        raise ConfigError("config.json: thinker_config is missing; a speech model describes its language model there")
    shared = {k: raw[k] for k in ("architectures", "quantization_config", "dtype", "torch_dtype") if k in raw}
    return {**shared, **inner, "model_type": THINKERS[kind]}


def _model_type(raw: Mapping[str, Any]) -> tuple[str, bool]:
    """(the row that describes the config, whether its own model_type names it): else its architecture's class."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and (model_type in FAMILIES or model_type in WRAPPERS):
        return model_type, True
    names = raw.get("architectures")
    if (model_type is None or isinstance(model_type, str)) and isinstance(names, list) and len(names) == 1:
        known = OWN_CLASSES.get(str(names[0])) or architectures().get(str(names[0]))
        if known is not None and known in FAMILIES:
            return known, False
    if model_type is None:
        found = sorted(str(k)[:40] for k in raw)[:8]
        raise UnsupportedArchitectureError(
            f"config.json: model_type is missing (keys: {', '.join(found) or 'none'}); give the config.json of a "
            f"language model, or describe it by hand: {BY_HAND}", keys=("model_type",))
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json: model_type is a {type(model_type).__name__}; it must be a string")
    raise UnsupportedArchitectureError(
        f"config.json: model_type {model_type[:60]!r} is not understood; describe the model by hand: {BY_HAND}",
        keys=("model_type",))


def _reader(raw: Mapping[str, Any], model_type: str, path: str = "", *, sizes: bool = True, nested: bool = True
            ) -> Reader:
    return Reader(raw, model_type, path=path, class_of=CLASS_OF.get(model_type), sizes=sizes, nested=nested)


def _text_reader(top: Reader, wrapper: Wrapper) -> tuple[Reader, Mapping[str, Any]]:
    """The reader of the nested text config."""
    for key in TEXT_KEYS:
        child = top.child(key)
        if child is None:
            continue
        if not child:
            raise top.fail(key, "is empty; a multimodal config describes its text model there")
        given = child.get("model_type")
        text_type = given if isinstance(given, str) else wrapper.text_type
        if text_type in WRAPPERS:
            text_type = WRAPPERS[text_type].text_type
        if text_type not in FAMILIES:
            raise UnsupportedArchitectureError(
                f"config.json: {key}.model_type {text_type[:60]!r} is not understood; describe the model by hand: "
                f"{BY_HAND}", keys=(f"{key}.model_type",))
        return _reader(child, text_type, f"{key}."), child
    if top.model_type in _FLAT and top.has("hidden_size"):
        return _reader(top.raw, wrapper.text_type, nested=False), top.raw
    if top.model_type not in _TOP_IGNORED or not top.has("hidden_size", "num_hidden_layers"):
        raise top.fail("text_config", "is missing; a multimodal config describes its text model there")
    return _reader({}, wrapper.text_type, "text_config."), {}


def _counted_tied(top: Reader, text_tied: bool, wrapper: Wrapper) -> bool | None:
    """Whether transformers ties the head: the top-level class decides where it builds the whole model."""
    if not wrapper.counted or not (top.has("tie_word_embeddings") or "tie_word_embeddings" in top.defaults):
        return None
    return top.flag("tie_word_embeddings", default=text_tied)


def _tower(top: Reader, wrapper: Wrapper, hidden: int, base: TensorFormat, notes: list[str]) -> list[ExtraBlock]:
    raw = top.child("vision_config")
    if wrapper.tower is None or (raw is None and wrapper.optional):
        if raw is not None:
            notes.append("vision_config is not understood: the tower's weights are not counted")
        return []
    given = raw.get("model_type") if raw is not None else None
    # LLaVA-like wrappers take any tower: the defaults are those of the class that the config names.
    named = given if isinstance(given, str) and class_defaults(given) else wrapper.vision_type
    reader = Reader(raw or {}, named, path="vision_config.",
                    defaults=dict(wrapper.tower_defaults) if raw is None else None)
    parameters = wrapper.tower(reader, top, hidden)
    return [ExtraBlock(name="vision tower", role="vision", parameters=parameters, format=base,
                       in_total=wrapper.counted)]


def _audio(top: Reader, wrapper: Wrapper, hidden: int, base: TensorFormat, notes: list[str]) -> list[ExtraBlock]:
    raw = top.child("audio_config")
    if raw is None and (wrapper.audio is None or wrapper.audio_optional):
        return []
    if wrapper.audio is None:
        notes.append("audio_config is not understood: the audio tower's weights are not counted")
        return []
    reader = Reader(raw or {}, wrapper.audio_type, path="audio_config.")
    return [ExtraBlock(name="audio tower", role="vision", parameters=wrapper.audio(reader, hidden), format=base,
                       in_total=wrapper.counted)]


_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16", "float32": "bf16",
           "fp32": "bf16", "float": "bf16", "auto": "bf16"}


def _dtype(text: Reader, top: Reader, notes: list[str]) -> str:
    """The dtype that the engine keeps unquantized tensors in: float32 checkpoints are loaded as bf16."""
    found = text.text("dtype", "torch_dtype") or top.text("dtype", "torch_dtype")
    found = found.removeprefix("torch.")
    if not found:
        notes.append("dtype is missing: bf16 assumed, as engines load it")
        return "bf16"
    if found not in _DTYPES:
        raise text.fail("dtype", f"is {found[:40]!r}; known are bfloat16, float16, float32")
    if found in ("float32", "fp32", "float"):
        notes.append("the checkpoint is float32: engines load it as bf16")
    return _DTYPES[found]


def _architecture(raw: Mapping[str, Any], model_type: str) -> str:
    names = raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0][:200]
    return model_type


def _unsupported(text: Reader, keys: list[str]) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(
        f"config.json: {text.path}{', '.join(keys)} set a mechanism that model_type {text.model_type!r} does not have; "
        f"correct model_type, or describe the model by hand: {BY_HAND}", keys=tuple(keys))
