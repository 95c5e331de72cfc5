"""Every code block of README.md and docs/ is run, and what it shows is what is printed.

Where the output has changed on purpose: python tools/update_docs.py
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT, Block, blocks, commands, difference, run_command, run_python

FILES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCKS = [block for file in FILES for block in blocks(file)]
# Blocks that need a network, another machine or hours. Raise this only with a reason in the document.
MAX_SKIPPED = 12


def furnish(folder: Path) -> Path:
    """The files that the documents talk about: a model folder and a server's log."""
    data = ROOT / "tests" / "data"
    (folder / "my-model").mkdir(parents=True, exist_ok=True)
    shutil.copy(data / "model_configs" / "Qwen--Qwen3-8B_config.json", folder / "my-model" / "config.json")
    for log in (data / "engine_logs").glob("vllm*.log"):
        shutil.copy(log, folder / log.name)
    return folder


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(ROOT)) for f in FILES])
def test_a_document_runs(file: Path, tmp_path: Path) -> None:
    """Its blocks one after another, in one working folder: one may use the names and files of an earlier one."""
    folder, names = furnish(tmp_path), {"__name__": "__main__"}
    for block in (b for b in BLOCKS if b.file == file and not b.skip):
        run_block(block, folder, names)


def run_block(block: Block, folder: Path, names: dict[str, Any]) -> None:
    if block.language in ("python", "pycon"):
        run_python(block, names, folder)
        return
    for command in commands(block):
        where = f"{block.file.name}:{command.line}: $ {command.text}"
        code, printed = run_command(command.text, folder)
        assert code == command.exit_code, f"{where}\nended with {code}:\n{printed[-2000:]}"
        if command.shown is not None:
            problem = difference(command.shown, printed)
            assert not problem, f"{where}\n{problem}\n(python tools/update_docs.py rewrites the shown output)"


def test_few_blocks_are_skipped_and_each_says_why() -> None:
    skipped = [b for b in BLOCKS if b.skip]
    assert len(skipped) <= MAX_SKIPPED, [b.name for b in skipped]
    assert all(b.skip != "no reason given" for b in skipped), [b.name for b in skipped]


TEXT = """
text
<!-- exit: 1 -->
<!-- output: free -->
```console
$ bstar plan x \\
    --gpu y
error: no
$ bstar model x
a
…
b
```

<!-- skip: needs a network -->
```bash
git clone x  # comment
# only a comment
```

```text
not run
```
"""


def test_blocks_are_found_with_their_directives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "docs" / "none.md"
    monkeypatch.setattr(Path, "read_text", lambda self, **_: TEXT)
    first, second = blocks(path)
    assert (first.language, first.exit_code, first.free_output, first.skip) == ("console", 1, True, "")
    assert (second.language, second.skip, second.line) == ("bash", "needs a network", 17)
    one, two = commands(first)
    assert (one.text, one.exit_code, one.line) == ("bstar plan x \\\n    --gpu y", 0, 6)
    assert (two.text, two.exit_code) == ("bstar model x", 1)
    assert [c.text for c in commands(second)] == ["git clone x  # comment"]


@pytest.mark.parametrize(("shown", "printed", "same"), [
    (("a", "b"), "a\nb\n", True), (("a",), "a\nb\n", False), (("a", "…"), "a\nb\n", True), (("…", "b"), "a\nb\n", True),
    (("a", "…", "c"), "a\nb\nb\nc\n\n", True), (("a", "c"), "a\nb\nc\n", False), (("…", "x"), "a\n", False),
])  # fmt: skip
def test_shown_and_printed_output(shown: tuple[str, ...], printed: str, same: bool) -> None:
    assert (difference(shown, printed) == "") == same
