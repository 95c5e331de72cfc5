"""Printing: JSON that is only JSON, and text tables that look the same in a terminal and in a pipe."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import click

from bstar.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

PIPE_WIDTH = 120
MAX_WIDTH = 132


def jsonable(value: Any) -> Any:
    """`value` as plain JSON data: no NaN or infinity (null), no numpy, dataclasses by `to_dict` or field."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if hasattr(value, "to_dict"):
        return jsonable(value.to_dict())
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return jsonable(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Iterable):
        return [jsonable(v) for v in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_json(value: Any) -> None:
    """Write one JSON document to stdout; what `warn` said is in the `notes` of an object."""
    plain = jsonable(value)
    if isinstance(plain, dict) and _said():
        plain["notes"] = list(dict.fromkeys([*_said(), *plain.get("notes", [])]))
    click.echo(json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=False))


def warn(message: str) -> None:
    """One line on stderr, once."""
    text = " ".join(message.split())
    if text not in _said():
        _said().append(text)
        click.echo("note: " + text, err=True)


def was_said(message: str) -> bool:
    """Whether `warn` printed it in this invocation."""
    return " ".join(message.split()) in _said()


def _said() -> list[str]:
    """What this invocation printed as notes."""
    context = click.get_current_context(silent=True)
    found: list[str] = [] if context is None else context.find_root().meta.setdefault("bstar.notes", [])
    return found


def console() -> Console:
    """A rich console: colours only in a terminal, a fixed width in a pipe, so that output diffs cleanly."""
    from rich.console import Console

    if sys.stdout.isatty():
        found = Console(highlight=False)
        return found if found.width <= MAX_WIDTH else Console(highlight=False, width=MAX_WIDTH)
    return Console(highlight=False, no_color=True, force_terminal=False, width=PIPE_WIDTH, file=sys.stdout)


def show(*parts: RenderableType) -> None:
    """Print renderables one under the other, without trailing blanks."""
    out = console()
    with out.capture() as captured:
        for part in parts:
            out.print(part, soft_wrap=getattr(part, "no_wrap", False) is True)
    text = captured.get()
    click.echo("\n".join(line.rstrip() for line in text.rstrip("\n").split("\n")), color=sys.stdout.isatty() or None)


def heading(title: str, detail: str = "") -> RenderableType:
    """A bold title and what it is about."""
    from rich.text import Text

    text = Text(title, style="bold")
    if detail:
        text.append(f"  {detail}", style="dim")
    return text


def line(text: str, *, style: str = "") -> RenderableType:
    """A plain line (no markup is read in it)."""
    from rich.text import Text

    return Text(text, style=style)


def verbatim(text: str) -> RenderableType:
    """A line that is never wrapped, so that it can be copied: a command."""
    from rich.text import Text

    return Text(text, style="bold", no_wrap=True, overflow="ignore")


def facts(rows: Iterable[Sequence[str]]) -> Table:
    """Label, value, note: the note is dim; a row may leave its note out."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(overflow="fold")
    for row in rows:
        label, value, note = (*row, "", "")[:3]
        grid.add_row(Text("  " + label), Text(value, style="bold"), Text(note, style="dim"))
    return grid


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), fold: Sequence[int] = ()
) -> Table:
    """A table with a rule under the header; columns are right-aligned but for `left`, and kept whole but for `fold`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        out.add_column(Text(name), justify="left" if index in left else "right", overflow="fold",
                       no_wrap=index not in fold)
    for row in rows:
        out.add_row(*[Text(cell) for cell in row])
    return out


def size(value: float | None, units: str = "both") -> str:
    """ "14.96 GiB (16.06 GB)", or one of the two conventions."""
    if value is None:
        return "–"
    if units == "si":
        return format_bytes(value, binary=False)
    if units == "iec":
        return format_bytes(value)
    if abs(value) < 1024:
        return format_bytes(value)
    return f"{format_bytes(value)} ({format_bytes(value, binary=False)})"
