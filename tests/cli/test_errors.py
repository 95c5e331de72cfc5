"""Bad input: exit code 2, one line on stderr that begins with "error:", nothing on stdout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from bstar.interfaces.cli.main import COMMANDS

Run = Callable[..., Result]
M, G = "llama-3.1-8b", ("--gpu", "h100-sxm-80gb")

BAD: list[tuple[tuple[str, ...], str]] = [
    (("modle", M), "did you mean model"),
    (("model",), "MODEL"),
    (("model", "lama-3.1-8b"), "did you mean"),
    (("model", "no-org/no-model"), "HF_HUB_OFFLINE"),
    (("model", M, "--context", "0"), "--context"),
    (("model", M, "--context", "many"), "--context"),
    (("model", M, "--tp", "3"), "tp"),
    (("model", M, "--weight-dtype", "fp7"), "fp7"),
    (("model", M, "--kv-cache-dtype", "fp7"), "fp7"),
    (("model", M, "--no-such-flag"), "--no-such-flag"),
    (("model", "/no/such/config.json"), "does not exist"),
    (("plan", M, *G, "--input", "9", "--output", "9", "--simulate", "2", "--fast"), "--simulate"),
    (("plan", M, *G, "--input", "9", "--output", "9", "--simulate", "0"), "--simulate"),
    (("plan", M, *G, "--input", "9", "--output", "9", "--simulate", "some"), "--simulate"),
    (("memory", M), "--gpu"),
    (("memory", *G), "MODEL"),
    (("memory", M, "--gpu", "h1000"), "h1000"),
    (("memory", M, *G, "--tp", "5"), "tp"),
    (("memory", M, *G, "--engine", "vlmm"), "vlmm"),
    (("memory", M, *G, "--engine", "vllm@banana"), "banana"),
    (("memory", M, *G, "--gpu-memory-utilization", "1.2"), "gpu_memory_utilization"),
    (("memory", M, *G, "--gpu-memory-utilization", "lots"), "--gpu-memory-utilization"),
    (("memory", M, *G, "--gpu-memory", "80XB"), "--gpu-memory"),
    (("memory", M, *G, "--gpu-memory", "80"), "80GB or 80GiB"),
    (("memory", M, *G, "--gpu-memory", "80MB"), "gpu_memory"),
    (("memory", M, *G, "--gpu-memory", "-80GB"), "gpu_memory"),
    (("memory", M, *G, "--bandwidth", "3.3"), "3.3TB/s"),
    (("memory", M, *G, "--bandwidth", "26.8Tb/s"), "bits; say bytes, an eighth of it: 3.35TB/s"),
    (("memory", M, *G, "--engine", "vllm@"), "no version after the @"),
    (("memory", M, *G, "--attention-dp", "2"), "say --dp 2"),
    (("memory", M, *G, "--bandwidth", "3.3 KB/s"), "bandwidth"),
    (("memory", M, "--gpu", "h100,h200"), "bstar plan"),
    (("memory", M, *G, "--max-model-len", "0"), "max_model_len: must be at least 1"),
    (("memory", M, *G, "--block-size", "7"), "multiples of 16"),
    (("memory", M, *G, "--enable-expert-parallel"), "no experts"),
    (("memory", "no-such-model", *G, "--layers", "32"), "--vocab-size"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--gpu-memory", "80"), "80GB or 80GiB"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--gpu-memory", "80MB"), "gpu_memory"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--price", "a100=1"), "--price"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--headroom", "30%"), "--headroom"),
    (("memory", M, *G, "--max-model-len", "1m"), "max_model_len"),
    (("memory", M, *G, "--from-command", "ls -l"), "command"),
    (("memory", M, *G, "--file", "/no/such.yaml"), "does not exist"),
    (("memory", M, *G, "--log", "/no/such.log"), "does not exist"),
    (("explain", M, *G), "--context"),
    (("explain", M, *G, "--context", "512", "--input", "5", "--output", "5"), "--context"),
    (("explain", M, *G, "--input", "5"), "--output"),
    (("explain", M, *G, "--input", "zipf:3", "--output", "5"), "--input"),
    (("explain", M, *G, "--context", "512", "--slo", "ttft"), "slo"),
    (("explain", M, *G, "--context", "512", "--attainment", "0.9"), "--slo"),
    (("curve", M, *G), "--context"),
    (("curve", *G, "--context", "512"), "MODEL"),
    (("curve", M, *G, "--context", "512", "--plot", "x.bmp"), ".bmp"),
    (("plan", M, *G), "--input"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--price", "h100"), "--price"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--rate", "0"), "more than 0"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--rate", "-1/s"), "more than 0"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--rate", "1e300"), "no load"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--rate", "1e-300"), "no load"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--concurrency", "1000000000"), "no load"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--slo", "chat", "--attainment", "95"), "say 0.95"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--rate", "1", "--concurrency", "2"), "concurrency"),
    (("plan", M, *G, "--input", "5", "--output", "5", "--executor", "ray"), "--executor"),
    (("plan", M, *G, "--trace", "/no/such.csv"), "does not exist"),
    (("plan", M, "--input", "5", "--output", "5"), "gpu"),
    (("plan", M, *G, "--input", "50", "--output", "5", "--prefix", "10,share=1"), "--prefix"),
    (("plan", M, *G, "--input", "50", "--output", "5", "--prefix", "10,hit=2"), "hit"),
    (("catalog", "modles"), "modles"),
    (("catalog", "devices", "zzz"), "zzz"),
    (("catalog", "models", "zzz-zzz"), "zzz"),
    (("completion", "tcsh"), "tcsh"),
]


@pytest.mark.parametrize(("args", "word"), BAD, ids=[" ".join(a)[:60] for a, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(bstar: Run, args: tuple[str, ...], word: str) -> None:
    for extra in ((), ("--json",)) if args[0] not in ("completion", "modle") else ((),):
        result = bstar(*args, *extra)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        lines = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1
        assert word.lower() in result.stderr.lower()


def test_the_trouble_is_named_where_a_file_is_bad(bstar: Run, tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("modell: x\n")
    result = bstar("memory", "--file", str(path))
    assert result.exit_code == 2
    assert "did you mean model" in result.stderr


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_with_an_example(bstar: Run, command: str) -> None:
    result = bstar(command, "--help")
    assert result.exit_code == 0
    assert f"bstar {command}" in result.output
    assert "Examples:" in result.output


def test_no_arguments_show_the_commands(bstar: Run) -> None:
    for args in ((), ("--help",), ("-h",)):
        shown = bstar(*args)
        assert all(f"  {name} " in shown.stdout for name in COMMANDS)
        assert (shown.exit_code, shown.stderr) == (0, "")


def test_version(bstar: Run) -> None:
    import bstar as package

    assert bstar("--version").stdout == f"bstar {package.__version__}\n"


def test_models_and_gpus_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.shell_completion import ShellComplete

    from bstar.interfaces.cli.main import cli

    def completed(*words: str, incomplete: str) -> list[str]:
        return [item.value for item in ShellComplete(cli, {}, "bstar", "_X").get_completions(list(words), incomplete)]

    assert "llama-3.1-8b" in completed("model", incomplete="llama-3.1")
    assert completed("plan", "x", "--gpu", incomplete="l4,h100-sx") == ["l4,h100-sxm-80gb"]
    assert completed(incomplete="mem") == ["memory"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(bstar: Run, shell: str) -> None:
    result = bstar("completion", shell)
    assert result.exit_code == 0
    assert "_BSTAR_COMPLETE" in result.stdout
