"""Write docs/cli.md from the commands themselves: python tools/make_cli_reference.py [--check]

With --check nothing is written; exit code 1 says that the file is not what the commands say.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bstar.interfaces.cli.main import COMMANDS, cli

TARGET = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# Command line reference

Made by `tools/make_cli_reference.py` from the commands themselves; do not edit.

Exit codes: 0 answered · 1 well posed, but no feasible answer · 2 bad input (one line on stderr, nothing on stdout) ·
130 interrupted. With `--json` stdout is one JSON document; notes go to stderr. Sizes take units (`80GiB`, `16GB`),
times too (`500ms`, `1s`).
"""


def reference() -> str:
    """The text of docs/cli.md."""
    parts = [HEAD]
    root = click.Context(cli, info_name="bstar", terminal_width=110, **cli.context_settings)
    parts.append(_section("bstar", cli.get_help(root)))
    for name in COMMANDS:
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root)
        parts.append(_section(f"bstar {name}", command.get_help(context)))
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    body = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```text\n{body}\n```\n"


def main() -> int:
    """Write the file, or compare with it."""
    text = reference()
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
