"""`bstar memory`: what fits beside the weights, term by term, and what the engine's own log says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bstar.interfaces.cli import output
from bstar.interfaces.cli.deploy import deploy_options, describe, headline, note_deployment, take_deployment
from bstar.interfaces.cli.params import apply, complete_models, json_option, units_option
from bstar.interfaces.cli.sections import SectionedCommand
from bstar.units import GIB, format_bytes

if TYPE_CHECKING:
    from bstar.codec.engine_log import EngineLog
    from bstar.specs.deployment import Deployment

_EPILOG = """\b
Examples:
  bstar memory llama-3.1-8b --gpu h100-sxm-80gb
  bstar memory llama-3.1-70b --gpu a100-sxm-80gb --tp 4 --max-num-seqs 512 --max-model-len 32768
  bstar memory --gpu l40s --from-command "vllm serve Qwen/Qwen3-8B --max-model-len 16k --kv-cache-dtype fp8"
  bstar memory qwen3-32b --gpu h100 --tp 2 --log server.log
Exit code 1: it does not fit (the reason is the engine's).
"""


@click.command("memory", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model_name", metavar="[MODEL]", required=False, shell_complete=complete_models)
@apply(
    deploy_options,
    click.option("--log", "log_file", type=click.Path(path_type=Path), metavar="FILE",
                 help="An engine's start-up log: predicted beside logged. Flags that it states are taken from it."),
    units_option,
    json_option,
)
@click.pass_context
def memory(ctx: click.Context, /, model_name: str | None, log_file: Path | None, units: str, as_json: bool,
           **options: Any) -> None:
    """The memory of one GPU as the engine divides it: weights, activations, runtime, CUDA graphs, KV cache.

    KV cache tokens, blocks and maximum concurrency come out as the engine logs them.
    """
    from bstar.physics.memory import memory_budget

    logged = read_log(log_file) if log_file is not None else None
    built = take_deployment(model_name, options) if logged is None else _logged_deployment(model_name, options, logged)
    budget = memory_budget(built)
    sheet: dict[str, Any] = budget.to_dict() | {
        "max_model_len": built.engine.max_model_len, "deployment": describe(built)}
    if logged is not None:
        sheet["log"] = comparison(sheet, logged)
    if as_json:
        output.print_json(sheet)
    else:
        _show(sheet, built, units, logged)
    ctx.exit(0 if budget.fits else 1)


def read_log(path: Path) -> EngineLog:
    """The engine log in a file. Raises ConfigError in one line."""
    from bstar.codec.engine_log import MAX_CHARACTERS, parse_log
    from bstar.codec.safe_json import open_regular
    from bstar.errors import ConfigError

    handle, _size = open_regular(path, what="log")
    with handle:
        if path.suffix.lower() != ".gz":
            body = handle.read(MAX_CHARACTERS // 4)
        else:
            import zlib
            from gzip import GzipFile

            try:
                body = GzipFile(fileobj=handle).read(MAX_CHARACTERS // 4)
            except (OSError, EOFError, zlib.error) as error:
                raise ConfigError(f"log {str(path)!r}: is not gzip, or cut short ({error}); unpack it first") from None
    return parse_log(body.decode("utf-8", errors="replace"))


def _note_other_model(given: str, logged: str) -> None:
    from bstar.catalog.models import get_entry
    from bstar.catalog.models.names import key_of

    entries = [entry.id if entry is not None else None for entry in (get_entry(given), get_entry(logged))]
    if key_of(given) != key_of(logged) and (None in entries or entries[0] != entries[1]):
        output.warn(f"the log is of {logged}, what is predicted is {given}")


def _logged_deployment(model_name: str | None, options: dict[str, Any], logged: EngineLog) -> Deployment:
    """The deployment of the flags, of which those that are not given are the log's."""
    from bstar.errors import SpecError
    from bstar.interfaces.cli.deploy import take_keywords
    from bstar.interfaces.deployments import deployment

    given = take_keywords(model_name, options)
    keywords: dict[str, Any] = dict(logged.settings)
    if logged.version is not None or logged.engine != "vllm":
        keywords["engine"] = logged.engine + (f"@{logged.version}" if logged.version else "")
    if logged.model is not None:
        keywords["model"] = logged.model
        if given.get("model"):
            _note_other_model(str(given["model"]), logged.model)
    keywords |= given
    if not keywords.get("gpu"):
        raise SpecError("gpu: none given; a log does not name the device, say --gpu (bstar catalog devices lists them)")
    if not keywords.get("model"):
        raise SpecError("model: none given and the log does not name it; say MODEL")
    built = deployment(**keywords)
    note_deployment(built, str(keywords["model"]))
    return built


def comparison(sheet: dict[str, Any], logged: EngineLog) -> dict[str, Any]:
    """Term by term: predicted, logged, and their relative difference where both exist."""
    per_gpu = sheet["per_gpu"]
    pairs: dict[str, tuple[Any, Any]] = {
        "total_bytes": (per_gpu["total_bytes"], logged.total_bytes),
        "weight_bytes": (per_gpu["weight_bytes"], logged.weight_bytes),
        "activation_bytes": (per_gpu["activation_bytes"], logged.activation_bytes),
        "runtime_bytes": (per_gpu["runtime_bytes"], logged.runtime_bytes),
        "weights_and_runtime_bytes": (
            _plus(per_gpu["weight_bytes"], per_gpu["runtime_bytes"]), logged.consumed_bytes),
        "cuda_graph_bytes": (per_gpu["cuda_graph_bytes"],
                             logged.cudagraph_estimate_bytes if logged.cudagraph_estimate_bytes is not None
                             else logged.cudagraph_bytes),
        "kv_cache_bytes": (per_gpu["kv_cache_bytes"], logged.kv_cache_bytes),
        "kv_cache_tokens": (sheet["kv_cache_tokens"], logged.kv_cache_tokens),
        "num_blocks": (sheet["num_blocks"], logged.num_blocks),
        "max_concurrency": (sheet["max_concurrency"], logged.max_concurrency),
    }
    terms = {
        name: {"predicted": predicted, "logged": value, "difference_fraction": _relative(predicted, value)}
        for name, (predicted, value) in pairs.items() if value is not None
    }
    return {"engine": logged.engine, "version": logged.version, "model": logged.model, "terms": terms,
            "failure": logged.failure, "estimated_max_model_len": logged.estimated_max_model_len}


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _relative(predicted: float | None, logged: float) -> float | None:
    return None if predicted is None or not logged else (predicted - logged) / logged


def _rows(sheet: dict[str, Any], built: Deployment, units: str) -> list[tuple[str, str, str]]:
    """The device's memory as the engine divides it, one term a row; a term in brackets is not subtracted."""
    per_gpu, engine = sheet["per_gpu"], built.engine
    subtracted = bool(sheet["cuda_graphs_subtracted"])
    total, fraction = per_gpu["total_bytes"], f"× {engine.gpu_memory_utilization:.4g}"

    def size(name: str) -> str:
        return output.size(per_gpu[name], units)

    terms = [
        ("the driver reports", size("total_bytes"), built.device.name),
        ("− weights", size("weight_bytes"), f"{built.model.weight_dtype}, as loaded"),
        ("− activations", size("activation_bytes"),
         _peak_note(engine.max_num_batched_tokens, sheet["activation_set_by"])),
        ("− runtime", size("runtime_bytes"), "CUDA context, NCCL, workspaces"),
        ("− CUDA graphs" if subtracted else "(CUDA graphs)", size("cuda_graph_bytes"),
         _graph_note(built, subtracted=subtracted)),
    ]
    share = (fraction, size("usable_bytes"), "what the engine may take (--gpu-memory-utilization)")
    if engine.name == "trtllm":
        terms.append((fraction, "", "of what is left (--kv_cache_free_gpu_memory_fraction)"))
    elif engine.name == "sglang":
        terms.insert(1, (fraction, size("usable_bytes"), "for weights and KV cache (--mem-fraction-static)"))
        terms[3] = ("(activations)", *terms[3][1:])
    else:
        terms.insert(1, share)
    given = "given, not computed" if engine.kv_cache_memory_bytes or engine.num_gpu_blocks_override else ""
    bar = _bar(per_gpu["kv_cache_bytes"], total)
    return [*terms, ("= KV cache", size("kv_cache_bytes"), f"{bar}; {given}" if given else bar)]


def _show(sheet: dict[str, Any], built: Deployment, units: str, logged: EngineLog | None) -> None:
    rows = _rows(sheet, built, units)
    parts = [output.heading(built.model.name, headline(built)), output.line("per GPU", style="dim"), output.facts(rows)]
    capacity = [
        ("KV cache tokens", f"{sheet['kv_cache_tokens']:,}" if sheet["kv_cache_tokens"] is not None else "–",
         f"{sheet['num_blocks']:,} blocks of {sheet['block_size']}" if sheet["num_blocks"] is not None else ""),
        ("maximum concurrency", f"{sheet['max_concurrency']:.2f}x" if sheet["max_concurrency"] is not None else "–",
         f"requests of {built.engine.max_model_len:,} tokens (--max-model-len)"),
    ]
    if sheet.get("pools", 1) > 1:
        capacity.append(("pools", str(sheet["pools"]), "data-parallel ranks, each with such a cache"))
    parts += [output.line(""), output.facts(capacity)]
    if sheet["fits"]:
        parts.append(output.line("fits", style="bold green"))
    else:
        parts.append(output.line(f"does not fit: {sheet['reason']}", style="bold red"))
    parts += [output.line("note: " + n, style="yellow") for n in sheet["notes"]]
    if logged is not None:
        parts += [output.line(""), output.heading("predicted beside logged", _log_title(logged)), _log_table(sheet)]
        if logged.failure:
            parts.append(output.line(f"the engine did not start: {logged.failure}", style="red"))
    output.show(*parts)


def _peak_note(tokens: int, set_by: str) -> str:
    where = "while compiling" if set_by == "compile" else f"in the {set_by}"
    return f"peak of a step of {tokens:,} tokens, {where}"


def _graph_note(built: Deployment, *, subtracted: bool) -> str:
    if built.engine.cudagraph_max_size == 0:
        return "no CUDA graphs"
    if built.engine.name == "vllm" and not subtracted:
        if built.engine.estimate_cudagraph_memory is False:
            return f"batches up to {built.engine.cudagraph_max_size}; not subtracted (switched off)"
        return f"batches up to {built.engine.cudagraph_max_size}; not subtracted by this release"
    left = "" if subtracted else "; taken later, from what is left over"
    return f"batches up to {built.engine.cudagraph_max_size}{left}"


def _bar(part: int | None, total: int) -> str:
    """A bar of the share of the device that is left for the cache."""
    share = max(0.0, min(1.0, (part or 0) / total))
    filled = round(share * 20)
    return f"{'█' * filled}{'░' * (20 - filled)} {share:.0%} of the device"


def _log_title(logged: EngineLog) -> str:
    return f"{logged.engine} {logged.version or '(version not in the log)'} · {logged.model or 'model not in the log'}"


def _log_table(sheet: dict[str, Any]) -> Any:
    rows = []
    for name, term in sheet["log"]["terms"].items():
        label = name.removesuffix("_bytes").replace("_", " ")
        difference = term["difference_fraction"]
        rows.append((label, _value(name, term["predicted"]), _value(name, term["logged"]),
                     "–" if difference is None else f"{difference:+.1%}"))
    return output.table(("term", "predicted", "logged", "difference"), rows)


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.endswith("_bytes"):
        return f"{value / GIB:.2f} GiB" if abs(value) >= GIB / 100 else format_bytes(value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
