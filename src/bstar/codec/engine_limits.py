"""What an engine makes of lengths, batch limits and block sizes that are unset, and which it refuses.

vLLM's rules are those of its config/model.py and engine/arg_utils.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bstar.codec.engine_values import AUTO_LENGTH
from bstar.errors import SpecError
from bstar.specs.model import ModelSpec
from bstar.units import GB, MB, TB, format_bytes

if TYPE_CHECKING:
    from bstar.catalog.engines import EngineDefaults


def max_model_len_of(
    model: ModelSpec, defaults: EngineDefaults, asked: int | None, *, allow_longer: bool
) -> tuple[int, tuple[str, ...]]:
    """(max_model_len, notes) by vLLM's rule (config/model.py, _get_and_verify_max_len).

    The factor of YaRN lengthened the config's length before 0.30; since then the config's length counts as
    lengthened already, and what goes beyond it needs VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.
    """
    longest, scaled = model.max_context_tokens, model.scaled_context_tokens
    version = tuple(int(part) for part in defaults.version.split(".")[:2] if part.isdigit())
    default = longest
    if defaults.engine == "vllm":
        if scaled is not None and version < _CONFIG_LENGTH_IS_SCALED:
            default = longest = scaled
        if version >= _LONG_ROPE_IS_SHORT and model.engine_context_tokens is not None:
            default = min(model.engine_context_tokens, longest)
    if asked is None or asked == AUTO_LENGTH:
        return default, ()
    if asked < 1:
        raise SpecError(f"max_model_len: must be at least 1 token (or auto), is {asked}")
    if asked <= longest:
        return asked, ()
    beyond = f"max_model_len {asked:,} is beyond the {longest:,} tokens of {model.name}'s config"
    if allow_longer:
        return asked, (f"{beyond}; the environment allows it",)
    if scaled is not None and asked <= scaled:
        return asked, (f"{beyond} but within its rope scaling: {defaults.engine} {defaults.version} wants "
                       f"{_ALLOW_LONGER[defaults.engine]}",)
    raise SpecError(
        f"max_model_len: {asked} is more than the {longest} tokens of {model.name}'s config; "
        f"lower it, or say --max-context {asked} if the model is used beyond its config")


_CONFIG_LENGTH_IS_SCALED = (0, 30)
_LONG_ROPE_IS_SHORT = (0, 12)  # LongRoPE's default is its original length since then
_ALLOW_LONGER = {
    "vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 set for it",
    "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 set for it",
    "trtllm": "a config with the longer max_position_embeddings",
}


def checked_block_size(engine: str, asked: int) -> int:
    # Every attention kernel of vLLM takes pages of 16 tokens or a multiple; releases before 0.11 took 1 and 8 too.
    if engine == "vllm" and asked % 16 and asked not in (1, 8):
        raise SpecError(f"block_size: vLLM takes multiples of 16, not {asked}; use {max(16, round(asked / 16) * 16)}")
    return asked


def check_figures(memory_bytes: int | None, bandwidth_bytes_per_s: float | None) -> None:
    """Raises SpecError where a device's figure is of another order than any accelerator's: its unit is wrong."""
    if memory_bytes is not None and not 256 * MB <= memory_bytes <= 100 * TB:
        raise SpecError(f"gpu_memory: {format_bytes(memory_bytes, binary=False)} is no accelerator's memory; "
                        "give it with its unit, like 80GB or 80GiB")
    if bandwidth_bytes_per_s is not None and not GB <= bandwidth_bytes_per_s <= 10_000 * TB:
        raise SpecError(f"bandwidth: {format_bytes(bandwidth_bytes_per_s, binary=False)}/s is no accelerator's "
                        "bandwidth; give it with its unit, like 3.35TB/s")


def batch_limits(
    defaults: EngineDefaults, max_model_len: int, max_num_seqs: int | None, max_num_batched_tokens: int | None, *,
    chunked: bool, factor: int,
) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens): vLLM's rules for what is unset and what contradicts."""
    seqs = max_num_seqs if max_num_seqs is not None else defaults.max_num_seqs * factor
    if max_num_batched_tokens is None:
        budget = defaults.max_num_batched_tokens * factor
        if not chunked and defaults.engine == "vllm":
            budget = max(budget, max_model_len)
        if defaults.engine == "vllm":
            budget = min(budget, max(1, seqs) * max_model_len)
    else:
        budget = max_num_batched_tokens
    if max_num_seqs is None:
        seqs = min(seqs, max(1, budget))
    if defaults.engine == "vllm":
        if budget < max_model_len and not chunked:
            raise SpecError(f"max_num_batched_tokens: {budget} is less than max_model_len {max_model_len} and chunked "
                            "prefill is off; raise it, lower --max-model-len or enable chunked prefill")
        if budget < seqs:
            raise SpecError(f"max_num_batched_tokens: {budget} is less than max_num_seqs {seqs}; "
                            "every sequence takes a token of each step: raise one or lower the other")
    return seqs, budget
