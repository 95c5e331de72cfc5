"""Rewrite the output shown in the console blocks of README.md and docs/ with what the commands print now.

    python tools/update_docs.py [--check] [FILE.md …]

A console block of commands alone is filled in (a command without output belongs into a bash block). Blocks that are
skipped, marked `output: free`, or that leave lines out with "…" are left as they are; the last
are listed, because only a person can decide what to leave out. --check changes nothing and exits with 1 where
something would change.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "docs")]

from blocks import ELISION, blocks, commands, difference, run_command  # noqa: E402
from test_docs import FILES, furnish  # noqa: E402


def updated(file: Path) -> tuple[str, list[str]]:
    """(the file's new text, what needs a person)."""
    lines = file.read_text(encoding="utf-8").split("\n")
    by_hand: list[str] = []
    changes: list[tuple[int, int, list[str]]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = furnish(Path(folder))
        for block in blocks(file):
            if block.skip or block.language not in ("console", "bash", "sh", "shell"):
                continue
            for command in commands(block):
                code, printed = run_command(command.text, place)
                where = f"{file.name}:{command.line}"
                if code != command.exit_code:
                    by_hand.append(f"{where}: ended with {code}: {printed.strip()[-300:]}")
                elif block.language == "console" and not block.free_output:
                    shown = command.shown or ()
                    if not difference(shown, printed):
                        continue
                    if ELISION in (line.strip() for line in shown):
                        by_hand.append(f"{where}: shows only some lines")
                        continue
                    first = command.line + command.text.count("\n")  # 0-based line after the command
                    new = [line.rstrip() for line in printed.rstrip("\n").split("\n")]
                    changes.append((first, first + len(shown), new))
    for first, last, new in reversed(changes):
        lines[first:last] = new
    return "\n".join(lines), by_hand


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    files = [Path(a).resolve() for a in arguments if not a.startswith("-")] or FILES
    different = False
    for file in files:
        text, by_hand = updated(file)
        for line in by_hand:
            print(line, file=sys.stderr)
        if text != file.read_text(encoding="utf-8"):
            different = True
            print(("would change " if check else "changed ") + str(file.relative_to(ROOT)))
            if not check:
                file.write_text(text, encoding="utf-8")
        different = different or bool(by_hand)
    return int(different and check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
