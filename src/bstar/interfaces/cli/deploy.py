"""The DEPLOY options, the same for every command, and the Deployment that they describe.

Precedence, weakest first: --file, --from-command, the flags. What is set nowhere is the engine version's
default for the device and model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.errors import SpecError
from bstar.interfaces.cli import output
from bstar.interfaces.cli.params import (
    BANDWIDTH,
    DEVICE_SIZE,
    ENGINE_INT,
    FLOAT,
    GIBIBYTES,
    MODEL_LEN,
    POSITIVE,
    SIZE,
    apply,
    by_hand_options,
    complete_gpus,
    dtype_options,
    take_by_hand,
)

if TYPE_CHECKING:
    from bstar.calibration.intervals import Range
    from bstar.codec.engine_command import ParsedCommand
    from bstar.specs.deployment import Deployment
    from bstar.specs.model import ModelSpec

_ENGINE_FLAGS = apply(
    click.option("--engine", metavar="NAME[@VERSION]", help="vllm, sglang or trtllm; default: the newest vLLM known."),
    click.option("--max-num-seqs", type=ENGINE_INT, metavar="N", help="Sequences in one step."),
    click.option("--max-num-batched-tokens", type=ENGINE_INT, metavar="N", help="Token budget of one step."),
    click.option("--max-model-len", type=MODEL_LEN, metavar="N|auto",
                 help="Longest request; auto: what the memory holds."),
    click.option("--gpu-memory-utilization", type=FLOAT, metavar="F",
                 help="Fraction of the memory that the engine may take."),
    click.option("--block-size", type=ENGINE_INT, metavar="N", help="Tokens of a KV block."),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=None),
    click.option("--enable-chunked-prefill/--no-enable-chunked-prefill", default=None),
    click.option("--async-scheduling/--no-async-scheduling", default=None),
    click.option("--enforce-eager", is_flag=True, default=None, help="No CUDA graphs."),
    click.option("--cudagraph-max-size", "--max-cudagraph-capture-size", "cudagraph_max_size", type=ENGINE_INT,
                 metavar="N", help="Largest batch captured as a CUDA graph."),
    click.option("--num-gpu-blocks-override", type=ENGINE_INT, metavar="N", help="KV blocks, instead of profiling."),
    click.option("--kv-cache-memory-bytes", type=SIZE, metavar="SIZE", help="KV space, instead of profiling."),
    click.option("--estimate-cudagraph-memory/--no-estimate-cudagraph-memory", default=None,
                 help="Take CUDA-graph memory from the KV space (vLLM since 0.20)."),
    click.option("--long-prefill-token-threshold", type=ENGINE_INT, metavar="N", hidden=True),
    click.option("--scheduling-policy", type=click.Choice(["fcfs", "priority"]), hidden=True),
    click.option("--num-speculative-tokens", type=ENGINE_INT, metavar="N", hidden=True),
    click.option("--cpu-offload-gb", "cpu_offload_bytes", type=GIBIBYTES, metavar="GIB", hidden=True),
)

layout_options = apply(
    click.option("--tp", "--tensor-parallel-size", "tp", type=POSITIVE, metavar="N", help="Tensor parallelism."),
    click.option("--pp", "--pipeline-parallel-size", "pp", type=POSITIVE, metavar="N", help="Pipeline parallelism."),
    click.option("--dp", "--data-parallel-size", "dp", type=POSITIVE, metavar="N",
                 help="Copies behind one endpoint (vLLM with experts: data-parallel attention)."),
    click.option("--ep", type=POSITIVE, metavar="N", help="Expert-parallel ranks."),
    click.option("--enable-expert-parallel", is_flag=True, default=None, help="ep = tp · dp, as vLLM's flag."),
    click.option("--attention-dp", type=POSITIVE, metavar="N", help="Data-parallel attention over shared experts."),
    click.option("--dcp", "--decode-context-parallel-size", "dcp", type=POSITIVE, metavar="N",
                 help="Decode-context parallelism."),
)

_DEVICE_FIGURES = apply(
    click.option("--gpu-memory", "gpu_memory_bytes", type=DEVICE_SIZE, metavar="SIZE",
                 help="Instead of the catalog's: 80GB, 80GiB."),
    click.option("--bandwidth", "bandwidth_bytes_per_s", type=BANDWIDTH, metavar="SIZE/s",
                 help="Instead of the catalog's, 3.3TB/s."),
)

profile_option = click.option(
    "--profile", metavar="FILE", help="Predict with what bstar calibrate found on this model, GPU and engine.")

_SOURCES = apply(
    click.option("--from-command", metavar='"vllm serve …"', help="Take model and flags from a launch command."),
    click.option("--allow-unknown-flags", is_flag=True,
                 help="Go on where the command holds a flag that its engine does not have."),
    click.option("--file", "spec_file", type=click.Path(path_type=Path), metavar="F",
                 help="Take them from a yaml, toml or json file (strict)."),
    profile_option,
    click.option("--save-spec", type=click.Path(path_type=Path), metavar="F", help="Write them to such a file."),
)

deploy_options = apply(
    click.option("--gpu", metavar="G", shell_complete=complete_gpus,
                 help="Device id or alias (bstar catalog devices)."),
    layout_options, dtype_options, _ENGINE_FLAGS, _SOURCES, _DEVICE_FIGURES,
    by_hand_options(hidden=True),
)

_KEYS = (
    "gpu", "tp", "pp", "dp", "ep", "enable_expert_parallel", "attention_dp", "dcp", "weight_dtype", "kv_cache_dtype",
    "engine", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization", "block_size",
    "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "enforce_eager", "cudagraph_max_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "long_prefill_token_threshold", "scheduling_policy",
    "num_speculative_tokens", "cpu_offload_bytes", "estimate_cudagraph_memory", "gpu_memory_bytes",
    "bandwidth_bytes_per_s", "profile",
)  # fmt: skip


# What counters are read by also where nobody says what is served.
_OF_COUNTERS = ("max_num_seqs", "max_num_batched_tokens")


def take_deployment(model: str | None, options: dict[str, Any]) -> Deployment:
    """The Deployment that the options describe; they are removed from `options`.

    Notes what of a launch command is not modelled. Raises SpecError where model or GPU is not named.
    """
    from bstar.interfaces.deployments import deployment

    keywords = take_keywords(model, options)
    for key, what in (("model", "MODEL, --from-command or --file"),
                      ("gpu", "--gpu (bstar catalog devices lists them)")):
        if not keywords.get(key):
            raise SpecError(f"{key}: none given; say it with {what}")
    if "," in str(keywords["gpu"]):
        raise SpecError(f"--gpu: {keywords['gpu']} are several; this command takes one kind of GPU, bstar curve and "
                        "bstar plan take several")
    built = deployment(**keywords)
    note_deployment(built, str(keywords["model"]))
    note_profile(built, keywords.get("profile"))
    return built


def take_optional_deployment(model: str | None, options: dict[str, Any]) -> Deployment | None:
    """The deployment of the options, with its notes printed; None where nothing names a model.

    Raises SpecError where flags describe a deployment that has no model.
    """
    if model is None and all(options.get(key) is None for key in ("from_command", "spec_file")):
        for key, value in options.items():
            if value is not None and (key.startswith("hand_") or (key in _KEYS and key not in _OF_COUNTERS)):
                flag = "--" + key.removeprefix("hand_").replace("_", "-")
                raise SpecError(f"MODEL: {flag} is of a deployment; name its model too, or leave {flag} out")
        return None
    built = take_deployment(model, options)
    note_deployment(built, model or built.model.name)
    return built


def take_keywords(model: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `bstar.deployment` in the order of precedence; saved where --save-spec says so."""
    keywords: dict[str, Any] = {}
    spec_file, command = options.pop("spec_file", None), options.pop("from_command", None)
    save, allow_unknown = options.pop("save_spec", None), bool(options.pop("allow_unknown_flags", False))
    if spec_file is not None:
        from bstar.codec.spec_files import read_deployment_file

        keywords |= read_deployment_file(spec_file)
        if keywords.get("unmodelled"):
            from bstar.codec.masking import masked

            output.warn(f"not modelled: {listed([masked(flag) for flag in keywords['unmodelled']])}")
    flags = {key: value for key in _KEYS if (value := options.pop(key, None)) is not None}
    if model is not None:
        flags["model"] = model
    if command is not None:
        said = from_command(command, allow_unknown=allow_unknown)
        note_overridden(said, flags)
        keywords |= said
    keywords |= flags
    overrides = take_by_hand(options)
    if overrides:
        keywords["model_overrides"] = overrides
    if save is not None:
        from bstar.codec.spec_files import write_deployment_file

        write_deployment_file(save, keywords)
    return keywords


def from_command(text: str, *, allow_unknown: bool) -> dict[str, Any]:
    """The keywords of `bstar.deployment` that a launch command gives; notes which of its flags are not modelled.

    Raises SpecError for a flag that the engine does not have, because it would not start; `allow_unknown` makes
    that a note.
    """
    from bstar.codec.engine_command import parse_command

    command = parse_command(text)
    keywords = dict(command.settings)
    keywords["engine"] = command.engine_at_version
    if command.model is not None:
        keywords["model"] = command.model
    if command.unmodelled:
        keywords["unmodelled"] = command.unmodelled
    felt = [flag for flag in command.unmodelled if flag not in command.without_effect]
    if felt:
        output.warn(f"not modelled: {listed(felt)}")
    note_unknown(command, allow=allow_unknown)
    return keywords


def note_unknown(command: ParsedCommand, *, allow: bool) -> None:
    """Refuses, or notes with `allow`, the words of a command that its engine does not take."""
    from bstar.codec.engine_flags import refused_flag

    for word in () if allow else command.unknown:
        reason = refused_flag(command.engine, word, version=command.version)
        if reason is not None:
            raise SpecError(f"--from-command: {reason}; --allow-unknown-flags goes on without it")
    if command.unknown:
        output.warn(f"not a flag of {command.engine}: {listed(command.unknown)}")


def note_overridden(said: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """One line on stderr naming what the command line says differently from the launch command."""
    changed = [f"{'MODEL' if key == 'model' else '--' + key.replace('_', '-')} {value} (the command: {said[key]})"
               for key, value in flags.items() if key in said and said[key] != value]
    if changed:
        output.warn(f"instead of what --from-command says: {listed(changed)}")


def listed(flags: Sequence[str], *, most: int = 20) -> str:
    """The first flags as one printable text, with a count of the rest."""
    from bstar.codec.safe_json import shown

    rest = f" and {len(flags) - most} more" if len(flags) > most else ""
    return ", ".join(shown(f) if len(f) > 60 or not f.isprintable() else f for f in flags[:most]) + rest


def note_model(model: ModelSpec, name: str) -> None:
    """One line on stderr where the model was only found by a part of its name."""
    from bstar.codec.resolve import name_note

    note = name_note(name)
    if note is not None and note in model.notes:
        output.warn(note)


def note_deployment(built: Deployment, name: str) -> None:
    """Lines on stderr: how the model called `name` was found, what the engine would say, a version not yet known."""
    from bstar.catalog.engines import engine_defaults

    note_model(built.model, name)
    for note in (*built.engine.notes, engine_defaults(built.engine.name, built.engine.version, built.device).note):
        if note:
            output.warn(note)


def note_profile(built: Deployment, profile: str | None) -> None:
    """One line on stderr where a profile was measured with other flags than the deployment's."""
    if profile is None:
        return
    from bstar.calibration.profile import profile_notes, read_profile

    for note in profile_notes(built, read_profile(profile)):
        output.warn(note)


def check_context(built: Deployment, context: int) -> None:
    """One line on stderr where a context is longer than what the deployment serves: physics, but no such request."""
    if context > built.engine.max_model_len:
        output.warn(f"context {context:,} is beyond the {built.engine.max_model_len:,} tokens that {built.model.name} "
                    "is served with (--max-model-len)")


def headline(built: Deployment) -> str:
    """ "H100 SXM 80GB × 4 (tp 4) · vLLM 0.32.0 · bf16 weights, bf16 KV"."""
    p = built.parallel
    layout = ", ".join(f"{name} {value}" for name, value in (
        ("tp", p.tp), ("pp", p.pp), ("dp", p.dp), ("attention dp", p.attention_dp), ("ep", p.ep), ("dcp", p.dcp))
        if value > 1)
    devices = f"{p.num_devices} × {built.device.name}" + (f" ({layout})" if layout else "")
    profile = f" · profile {built.calibration.name}" if built.calibration is not None else ""
    return (f"{devices} · {built.engine.name} {built.engine.version} · {built.model.weight_dtype} weights, "
            f"{built.kv_format.name} KV{profile}")


def range_text(found: Range | None) -> str:
    """ "7.9–10.4 ms": where a mean is expected to lie; empty where that is not known."""
    from bstar.units import format_seconds

    if found is None:
        return ""
    low, high = format_seconds(found.low), format_seconds(found.high)
    number, _, unit = low.partition(" ")
    return f"{number}–{high}" if unit and high.endswith(" " + unit) else f"{low}–{high}"


def describe(built: Deployment) -> dict[str, Any]:
    """The deployment as JSON: what was resolved, so that a reader sees every default."""
    p, e = built.parallel, built.engine
    return {
        "model": built.model.name, "gpu": built.device.id, "num_gpus": p.num_devices,
        "tp": p.tp, "pp": p.pp, "dp": p.dp, "attention_dp": p.attention_dp, "ep": p.ep, "dcp": p.dcp,
        "weight_dtype": built.model.weight_dtype, "kv_dtype": built.kv_format.name,
        "engine": e.name, "engine_version": e.version, "max_num_seqs": e.max_num_seqs,
        "max_num_batched_tokens": e.max_num_batched_tokens, "max_model_len": e.max_model_len,
        "gpu_memory_utilization": e.gpu_memory_utilization, "block_size": e.block_size,
        "enable_prefix_caching": e.enable_prefix_caching, "enable_chunked_prefill": e.enable_chunked_prefill,
        "async_scheduling": e.async_scheduling, "enforce_eager": e.enforce_eager,
        "cudagraph_max_size": e.cudagraph_max_size, "unmodelled": list(e.unmodelled),
        "profile": built.calibration.name if built.calibration is not None else None,
    }  # fmt: skip
