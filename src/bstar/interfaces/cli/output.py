"""Printing: JSON that is only JSON, and text tables that look the same in a terminal and in a pipe."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import click

from bstar.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

PIPE_WIDTH = 120
MAX_WIDTH = 132
_WIDEST = 1000


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


def console(width: int | None = None) -> Console:
    """A rich console: colours only in a terminal, a fixed width in a pipe, so that output diffs cleanly."""
    from rich.console import Console

    if sys.stdout.isatty():
        found = Console(highlight=False, width=width)
        return found if width is not None or found.width <= MAX_WIDTH else Console(highlight=False, width=MAX_WIDTH)
    return Console(highlight=False, no_color=True, force_terminal=False, width=width or PIPE_WIDTH, file=sys.stdout)


def show(*parts: RenderableType) -> None:
    """Print renderables one under the other, without trailing blanks.

    No figure is ever cropped: a table that is wider than the terminal runs over its edge, as a shell's own would.
    """
    out = console()
    texts: list[str] = []
    for part in parts:
        least = _least_width(part, out)
        target = out if least <= out.width else console(least)
        with target.capture() as captured:
            target.print(part, soft_wrap=getattr(part, "no_wrap", False) is True)
        texts.append(captured.get())
    text = "".join(texts)
    click.echo("\n".join(line.rstrip() for line in text.rstrip("\n").split("\n")), color=sys.stdout.isatty() or None)


def _least_width(part: RenderableType, out: Console) -> int:
    """Columns that a table needs to be whole: those of its columns that do not fold, the longest words of the rest."""
    from rich.measure import Measurement
    from rich.table import Table

    if not isinstance(part, Table):
        return 0
    return Measurement.get(out, out.options.update(max_width=_WIDEST), part).minimum


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
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    whole = [tuple((*row, "", "")[:3]) for row in rows]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=max((2 + cell_len(label) for label, _, _ in whole), default=0))
    grid.add_column(no_wrap=True, min_width=max((cell_len(v) for _, v, _ in whole), default=0), justify="right")
    grid.add_column(overflow="fold")
    for label, value, note in whole:
        grid.add_row(Text("  " + label), Text(value, style="bold"), Text(note, style="dim"))
    return grid


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), fold: Sequence[int] = (),
    spare: Sequence[int] = (),
) -> Table:
    """A table with a rule under the header; columns are right-aligned but for `left`, and kept whole but for `fold`.

    spare   columns that are left out, in this order, and named under the table where the width is short
    """
    out = console()
    cells = [tuple(row) for row in rows]
    for count in range(len(spare) + 1):
        for gap in (3, 2):
            found = _table(columns, cells, left=left, fold=fold, dropped=spare[:count], gap=gap)
            if _least_width(found, out) <= out.width:
                return found
    return found


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int], fold: Sequence[int],
    dropped: Sequence[int], gap: int,
) -> Table:
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, gap - 2), show_edge=False, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        if index not in dropped:
            whole = None if index in fold else max(cell_len(c) for c in (name, *(row[index] for row in rows)))
            out.add_column(Text(name), justify="left" if index in left else "right", overflow="fold",
                           no_wrap=index not in fold, min_width=whole)
    for row in rows:
        out.add_row(*[Text(cell) for index, cell in enumerate(row) if index not in dropped])
    named = ", ".join(columns[index] for index in sorted(dropped) if columns[index])
    if named:
        out.caption = Text(f"left out for want of width: {named}; a wider terminal or --json has all", style="dim")
        out.caption_justify = "left"
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


def number(value: float | None) -> str:
    """Four significant digits, "12,290" and "1.229 M"; "–" where there is none."""
    return "–" if value is None or value != value else format_count(value, digits=4)


def percent(value: float | None, decimals: int = 0) -> str:
    """A share; "–" where there is none."""
    return "–" if value is None or value != value else f"{value:.{decimals}%}"
