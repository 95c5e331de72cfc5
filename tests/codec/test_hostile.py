"""Whatever is handed to bstar, it answers or refuses: one line on stderr, exit code 2, nothing on stdout, quickly."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hostile
import pytest
from hostile_run import FILES, LLAMA, refused, run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st


def cases(source: Any) -> list[Any]:
    return [pytest.param(config, id=label) for label, config in source]


@pytest.mark.parametrize(
    "config", [*cases(hostile.wrong_sizes()), *cases(hostile.missing_sizes()), *cases(hostile.other_wrongs())]
)
def test_a_wrong_config_is_one_line(tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    refused("model", str(path), "--json")


@pytest.mark.parametrize("index", range(4))
def test_code_that_a_config_names_is_never_run(tmp_path: Path, index: int) -> None:
    marker = tmp_path / "marker"
    _label, config = list(hostile.code_references(marker))[index]
    for name in ("configuration_evil.py", "modeling_evil.py", "__init__.py"):
        (tmp_path / name).write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("model", str(tmp_path), "--json")
    refused("model", str(tmp_path / "config.json"), "--json")
    assert not marker.exists()


def test_a_code_reference_beside_a_known_type_is_ignored(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "modeling_evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"auto_map": auto_map}))
    done = subprocess.run(
        [sys.executable, "-m", "bstar.interfaces.cli.main", "model", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["parameters"]["total"] == 8_030_261_248
    assert not marker.exists()


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["config.json", "model.gguf"])
def test_a_file_that_is_no_model_is_one_line(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / name
    FILES[kind](path)
    refused("model", str(path), "--json")


@pytest.mark.parametrize("kind", [k for k in FILES if k not in ("missing", "a folder")])
def test_a_quantization_file_that_is_none_is_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    FILES[kind](tmp_path / "hf_quant_config.json")
    code, out, err = run("model", str(tmp_path), "--json")
    # A link that leads nowhere or a pipe is as good as absent, and the last says nothing about quantization.
    harmless = ("a link to itself", "a dangling link", "a pipe", "an escape sequence")
    assert (code == 2 and not out and err.count("\n") == 1) or (code == 0 and kind in harmless)


@pytest.mark.parametrize("argument", [
    "", " ", "\0", "a\0b", "x" * 5000, "/" * 5000, "../" * 2000, "/dev/zero", "/dev/stdin", "/proc/self/mem",
    "/proc/self", "no/such/folder/config.json", "~nobody-at-all/config.json", "\ud800", "new\nline", "\x1b[31m", "-",
    "--", "..", "/", "llama-3.1-8b\n", "https://example.org/config.json", "file:///etc/passwd", "$(touch marker)",
    "`id`", "%s%s%n", "{}", "*", "C:\\model\\config.json", "\\\\server\\share", "٣", "🦙", "llama-3.1-8b;ls",
])  # fmt: skip
def test_a_name_that_is_no_model_is_one_line(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A Hub id would be looked up: these tests must not depend on a network.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _out, err = run("model", argument, "--json")
    assert code in (0, 2)
    if code == 2:
        assert err.strip()
    assert list(tmp_path.iterdir()) == []


NAMES = sorted(
    p.name.removesuffix("_config.json") for p in hostile.CONFIGS.glob("*_config.json")
    if not p.name.endswith("hf_quant_config.json"))  # fmt: skip
VALUES = st.sampled_from([
    None, True, False, 0, 1, -1, 3, 7, 1.5, float("nan"), float("inf"), 10**30, 2**31, 10**6, "", "text", "fp8", [], {},
    [1], ["a"], [None], {"a": 1}, [[1]], "full_attention", ["full_attention"] * 3, 1e300, ...,
])  # fmt: skip


def paths(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += paths(value, (*before, key))
    return found


@given(st.sampled_from(NAMES), st.lists(st.tuples(st.floats(0, 0.999), VALUES), min_size=1, max_size=3))
@example("meta-llama--Meta-Llama-3.1-8B", [(0.0, None)])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_of_a_real_config_is_answered_or_refused(
    tmp_path: Path, name: str, changes: list[tuple[float, Any]]
) -> None:
    config = copy.deepcopy(hostile.load(name))
    for where, value in changes:
        all_paths = paths(config)
        if all_paths:
            config = hostile.changed(config, "\x1f".join(all_paths[int(where * len(all_paths))]), copy.deepcopy(value))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, out, err = run("model", str(path), "--json")
    if code == 0:
        answer = json.loads(out, parse_constant=lambda c: pytest.fail(f"{c} in the answer"))
        assert answer["parameters"]["total"] > 0 and answer["weight_bytes"] > 0 and answer["kv_bytes_per_token"] >= 0
    else:
        assert (code, out) == (2, "") and err.count("\n") == 1


@pytest.mark.slow
def test_the_same_from_a_shell(tmp_path: Path) -> None:
    for kind in ("100 MB", "a pipe", "a link to itself", "100,000 nested objects", "an escape sequence"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        FILES[kind](path)
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "bstar.interfaces.cli.main", "model", str(path), "--json"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "Traceback" not in done.stderr and time.perf_counter() - started < 5
