"""Help in sections: a command's many options under a few headings instead of in one list."""

from __future__ import annotations

import click

_BY_PARAM: dict[str, str] = {}


def section(title: str, *names: str) -> None:
    """Options called `names` (as Python sees them) go under `title`, in every command."""
    _BY_PARAM.update(dict.fromkeys(names, title))


section("Layout", "gpu", "gpus", "tp", "pp", "dp", "ep", "enable_expert_parallel", "attention_dp", "dcp")
section("Numbers", "weight_dtype", "kv_cache_dtype", "gpu_memory_bytes", "bandwidth_bytes_per_s", "prices")
section(
    "Engine flags, as the engine spells them (unset: the default of its version for the device and model)",
    "engine", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization", "block_size",
    "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "enforce_eager", "cudagraph_max_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "estimate_cudagraph_memory",
)  # fmt: skip
section("Instead of flags", "from_command", "allow_unknown_flags", "spec_file", "save_spec", "log_file",
        "profile")
section("Load", "context", "input_lengths", "output_lengths", "trace", "rate", "burstiness", "concurrency",
        "prefix", "batch", "batches", "peak_factor", "headroom")
section("SLO", "slo", "attainment")
_BY_HAND = "A model by hand (replaces the config's size, or describes a model without one)"
_BY_HAND_ELSEWHERE = "A model by hand (and with the sizes of `bstar model --help`: --layers, --hidden-size, …)"


class SectionedCommand(click.Command):
    """A command whose --help groups its options; an option of no section is under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is None:
                continue
            name = param.name or ""
            title = _BY_HAND if name.startswith("hand_") else _BY_PARAM.get(name, "Options")
            found.setdefault(title, []).append(record)
        if len(found.get(_BY_HAND, ())) == 1:  # the rest is hidden, see params.by_hand_options
            found[_BY_HAND_ELSEWHERE] = found.pop(_BY_HAND)
        for title, records in sorted(found.items(), key=lambda item: item[0] == "Options"):
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)
