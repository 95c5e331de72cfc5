"""Option types: sizes, rates, counts and lists that are parsed with their units, and the shared option groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bstar import units
from bstar.codec.by_hand import KEYS, flag_name
from bstar.codec.engine_values import engine_float, engine_int, max_model_len
from bstar.errors import UnitError

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # no type parameter before click 8.2

F = TypeVar("F", bound=Callable[..., Any])


class Parsed(_ParamType):
    """An option whose text goes through one of bstar's parsers; the parser's own message is the error."""

    def __init__(self, name: str, parse: Callable[..., Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        field = max(param.opts, key=len) if param is not None and param.opts else self.name
        return self._parse(value, field=field)


SIZE = Parsed("size", units.parse_bytes)
SECONDS = Parsed("time", units.parse_seconds)


def _rate(text: str, *, field: str) -> float:
    found = 0.0 if text.strip().startswith("-") else units.parse_rate(text, field=field)
    if found <= 0:
        raise UnitError(f"{field}: must be more than 0 requests per second, is {text!r}")
    if not _SLOWEST_PER_S <= found <= _FASTEST_PER_S:
        raise UnitError(f"{field}: {text!r} is no load of a server; give {_SLOWEST_PER_S:g} to {_FASTEST_PER_S:g} "
                        "requests per second")
    return found


_SLOWEST_PER_S, _FASTEST_PER_S = 1e-6, 1e7  # a request in eleven days; ten times the largest services known


RATE = Parsed("rate", _rate)
COUNT = Parsed("n", units.parse_count)
ENGINE_INT = Parsed("n", engine_int)
FLOAT = Parsed("f", engine_float)
MODEL_LEN = Parsed("n|auto", max_model_len)


def _positive_counts(text: str, *, field: str) -> tuple[int, ...]:
    found = tuple(units.parse_count(part, field=field) for part in text.split(",") if part.strip())
    if not found or min(found) < 1:
        raise UnitError(f"{field}: {text!r} must be one or more whole numbers of at least 1, like 512,2048")
    return found


COUNTS = Parsed("n[,n…]", _positive_counts)


def _positive_count(text: str, *, field: str) -> int:
    found = units.parse_count(text, field=field)
    if found < 1:
        raise UnitError(f"{field}: must be a whole number of at least 1, is {text!r}")
    return found


POSITIVE = Parsed("n", _positive_count)


def _with_unit(text: str, *, field: str) -> int:
    """Bytes of a size that says its unit: nobody means a GPU of 80 bytes by --gpu-memory 80."""
    found = units.parse_bytes(text, field=field)
    if not text.strip()[-1:].isalpha():
        raise UnitError(f"{field}: {text.strip()} has no unit; say {text.strip()}GB or {text.strip()}GiB")
    return found


def _bandwidth(text: str, *, field: str) -> float:
    size = text.strip().removesuffix("/s")
    found = units.parse_bytes(size, field=field)
    if not size.strip()[-1:].isalpha():
        raise UnitError(f"{field}: {text.strip()} has no unit; say {size}TB/s or {size}GB/s")
    if size.strip()[-2:-1].isupper() and size.strip().endswith("b"):  # Tb/s, as links are named in
        raise UnitError(f"{field}: {text.strip()} reads as bits; say bytes, an eighth of it: {found / 8e12:.4g}TB/s")
    return float(found)


def _gibibytes(text: str, *, field: str) -> int:
    found = engine_float(text, field=field)
    if found < 0:
        raise UnitError(f"{field}: must be at least 0 GiB, is {text!r}")
    return round(found * units.GIB)


DEVICE_SIZE = Parsed("size", _with_unit)
GIBIBYTES = Parsed("gib", _gibibytes)
BANDWIDTH = Parsed("size/s", _bandwidth)


def apply(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator from several, the first on top in --help."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def complete_models(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Catalog models that begin with what was typed."""
    from bstar.catalog.models import entry_ids

    return [name for name in entry_ids() if name.startswith(incomplete.lower())]


def complete_gpus(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Catalog devices that begin with what was typed (after the last comma)."""
    from bstar.catalog.devices import device_ids

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in device_ids() if name.startswith(last.lower())]


json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and nothing else.")
units_option = click.option(
    "--units", type=click.Choice(["both", "si", "iec"]), default="both", show_default=True,
    help="Print sizes in GB (si), GiB (iec) or both.")

dtype_options = apply(
    click.option("--weight-dtype", metavar="D",
                 help="bf16, fp8, int8, int4, nvfp4, mxfp4, w4a16 …; default: the checkpoint's."),
    click.option("--kv-cache-dtype", "--kv-dtype", "kv_cache_dtype", metavar="D", default=None,
                 help="auto, bf16, fp8, nvfp4 …; default: the checkpoint's."),
)

_HELP = {
    "layers": "Decoder layers.", "hidden_size": "Width of the residual stream.", "heads": "Query heads.",
    "kv_heads": "KV heads (default: --heads).", "head_dim": "Width of a head (default: hidden / heads).",
    "intermediate_size": "Width of a dense FFN.", "vocab_size": "Vocabulary rows.",
    "experts": "Routed experts a layer.",
    "experts_per_token": "Experts a token takes.", "moe_intermediate_size": "Width of one expert.",
    "shared_experts": "Experts that every token takes.", "dense_layers": "First layers with a dense FFN.",
    "kv_lora_rank": "MLA: width of the latent.", "q_lora_rank": "MLA: rank of the query.",
    "qk_nope_head_dim": "MLA.", "qk_rope_head_dim": "MLA.", "v_head_dim": "MLA: width of a value head.",
    "sliding_window": "Tokens that a layer sees.", "max_context": "Longest context in tokens.",
    "tie_embeddings": "1: the head is the embedding table.",
}  # fmt: skip

_RARE = frozenset({
    "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "dense_layers", "tie_embeddings",
})  # fmt: skip


def by_hand_options(*, hidden: bool) -> Callable[[F], F]:
    """The sizes of a model by hand; `hidden` keeps them out of --help (all work everywhere)."""
    return apply(*(
        click.option(flag_name(key), "hand_" + key, type=COUNT, metavar="N", help=_HELP[key],
                     hidden=(hidden and key != "max_context") or key in _RARE)
        for key in KEYS
    ))


def take_by_hand(options: dict[str, Any]) -> dict[str, int] | None:
    """Remove the by-hand sizes from `options` and return those that were given."""
    given = {key: options.pop("hand_" + key, None) for key in KEYS}
    return {key: value for key, value in given.items() if value is not None} or None
