"""`bstar calibrate` and `--profile`."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bstar.calibration.profile import read_profile
from bstar.catalog import probe
from bstar.catalog.probe import Probe
from bstar.errors import ConfigError
from bstar.interfaces.cli.main import cli

DEPLOY = ["--gpu", "h100-sxm-80gb", "--engine", "vllm@0.19.0"]
POINTS = [
    {"concurrency": 2, "input_tokens": 256, "output_tokens": 32, "ttft_ms": 60, "tpot_ms": 9.0},
    {"concurrency": 24, "input_tokens": 256, "output_tokens": 32, "ttft_ms": 90, "tpot_ms": 11.0},
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "points.json").write_text(json.dumps({"points": POINTS}))
    out = folder / "mine.json"
    made = run("calibrate", str(folder / "points.json"), "--model", "llama-3.1-8b", *DEPLOY, "--out", str(out))
    assert made.exit_code == 0, made.output
    for word in ("measured", "calibrated", "scale.gemm_memory", "TPOT"):
        assert word in made.stdout
    return out


def _json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_file_is_the_profile(profile: Path) -> None:
    found = read_profile(profile)
    assert found.name == "mine"
    assert found.scope.engine_version == "0.19.0"
    assert [p.load_value for p in found.points] == [2.0, 24.0]
    points = profile.parent / "points.json"
    printed = _json("calibrate", str(points), "--model", "llama-3.1-8b", *DEPLOY, "--name", "mine")
    assert printed["path"] is None
    assert printed["constants"] == found.to_dict()["constants"]


def test_every_command_predicts_with_it(profile: Path) -> None:
    slower = ["--profile", str(profile)]
    ask = ["explain", "llama-3.1-8b", *DEPLOY, "--context", "512", "--batch", "2"]
    before, after = _json(*ask), _json(*ask, *slower)
    assert after["step_time_s"]["expected"] > 1.05 * before["step_time_s"]["expected"]
    assert after["step_time_s"]["floor"] == before["step_time_s"]["floor"]
    assert after["provenance"] == "measured"
    assert after["deployment"]["profile"] == "mine"
    assert before["deployment"]["profile"] is None
    load = ["--input", "256", "--output", "32", "--concurrency", "8", "--num-requests", "32"]
    ask = ["simulate", "llama-3.1-8b", *DEPLOY, *load]
    assert _json(*ask, *slower)["tpot_s"]["mean"] > 1.05 * _json(*ask)["tpot_s"]["mean"]
    ask = ["curve", "llama-3.1-8b", *DEPLOY, "--context", "512"]
    assert (_json(*ask, *slower)["curves"][0]["step_time_s"]["expected"][0]
            > 1.05 * _json(*ask)["curves"][0]["step_time_s"]["expected"][0])
    ask = ["plan", "llama-3.1-8b", *DEPLOY, "--input", "256", "--output", "32", "--rate", "2"]
    found = _json(*ask, *slower)
    assert any("profile mine" in note for note in found["notes"])
    ask = ["memory", "llama-3.1-8b", *DEPLOY]
    assert _json(*ask, *slower)["per_gpu"] == _json(*ask)["per_gpu"]


def test_elsewhere_it_is_refused_in_one_line(profile: Path) -> None:
    result = run("explain", "llama-3.1-8b", "--gpu", "a100", "--engine", "vllm@0.19.0", "--context", "512",
                 "--profile", str(profile))  # fmt: skip
    assert result.exit_code == 2
    assert result.stderr.startswith("error: profile mine: was measured with gpu h100-sxm-80gb")
    assert result.stderr.count("\n") == 1


def test_a_comparison_uses_it_where_it_holds(profile: Path) -> None:
    result = run("curve", "llama-3.1-8b", "--gpu", "h100-sxm-80gb,a100-sxm-80gb", "--engine", "vllm@0.19.0",
                 "--context", "512", "--profile", str(profile), "--json")  # fmt: skip
    assert result.exit_code == 0
    curves = json.loads(result.stdout)["curves"]
    assert [c["deployment"]["profile"] for c in curves] == ["mine", None]
    assert "as fitted" in result.stderr


def test_another_layout_is_noted(profile: Path) -> None:
    result = run("explain", "llama-3.1-8b", *DEPLOY, "--tp", "2", "--context", "512", "--profile", str(profile))
    assert result.exit_code == 0
    assert "tp 1 (here 2)" in result.stderr


def test_a_deployment_file_may_name_it(profile: Path, tmp_path: Path) -> None:
    spec = tmp_path / "d.yaml"
    run("explain", "llama-3.1-8b", *DEPLOY, "--context", "512", "--profile", str(profile), "--save-spec", str(spec))
    assert _json("explain", "--file", str(spec), "--context", "512")["deployment"]["profile"] == "mine"


@pytest.mark.parametrize(("arguments", "said"), [
    (["calibrate", "none.csv", "--model", "llama-3.1-8b", *DEPLOY], "'none.csv': does not exist"),
    (["calibrate", "none", "--model", "llama-3.1-8b", *DEPLOY], "'none': does not exist"),
    (["calibrate", ".", "--model", "llama-3.1-8b", *DEPLOY], "bstar bench"),
    (["calibrate", "p.json", *DEPLOY], "say it with --model, --from-command or --file"),
    (["calibrate", "p.json", "--model", "llama-3.1-8b", *DEPLOY, "--out", "p.txt"], ".toml"),
    (["calibrate", "p.json", "--model", "llama-3.1-8b", *DEPLOY, "--profile", "x.json"], "leave it out"),
    (["calibrate", "p.json", "--model", "llama-3.1-8b", *DEPLOY, "--out", "no/p.json"], "no folder"),
    (["calibrate", "--url", "http://127.0.0.1:9", "--api-key-env", "UNSET_KEY", "--model", "llama-3.1-8b", *DEPLOY],
     "UNSET_KEY is not set"),
    *((["calibrate", "--url", "http://127.0.0.1:9", "--window", window, "--model", "llama-3.1-8b", *DEPLOY],
       "--window: ") for window in ("0", "1s")),
    (["explain", "llama-3.1-8b", *DEPLOY, "--context", "512", "--profile", "none.json"], "none.json"),
])  # fmt: skip
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text(json.dumps({"points": POINTS}))
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_simulating_a_point_gives_what_the_profile_says(profile: Path) -> None:
    point = read_profile(profile).points[1]
    found = _json("simulate", "llama-3.1-8b", *DEPLOY, "--profile", str(profile), "--input", "256", "--output", "32",
                  "--concurrency", "24", "--start", "even")  # fmt: skip
    assert found["tpot_s"]["mean"] == pytest.approx(point.after["tpot_s"], rel=0.02)
    assert found["ttft_s"]["mean"] == pytest.approx(point.after["ttft_s"], rel=0.1)
    together = run("simulate", "llama-3.1-8b", *DEPLOY, "--profile", str(profile), "--input", "256", "--output", "32",
                   "--concurrency", "24")  # fmt: skip
    assert "--start even" in together.stderr
    open_loop = run("simulate", "llama-3.1-8b", *DEPLOY, "--input", "256", "--output", "32", "--rate", "2",
                    "--start", "even")  # fmt: skip
    assert open_loop.exit_code == 2
    assert "--start" in open_loop.stderr


def test_a_cpu_is_measured_once_and_a_profile_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same commands say the same, and a profile's predictions outlive a new measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speeds = iter((1.0, 3.0, 9.0))

    def measured() -> Probe:
        probe.cpu_device.cache_clear()
        speed = next(speeds)
        return Probe(processor=probe._processor(), logical_cpus=probe._logical_cpus(), memory_bytes=1 << 33,
                     read_bytes_per_s=2e10 * speed, copy_bytes_per_s=1e10, fp32_flops_per_s=3e11 * speed,
                     measured_at="2026-11-30T00:00:00Z")  # fmt: skip

    def fresh(*arguments: str) -> dict[str, Any]:
        probe.cpu_device.cache_clear()  # as a new process
        return _json(*arguments)

    monkeypatch.setattr(probe, "measure", measured)
    monkeypatch.setattr(probe, "_memory_bytes", lambda: 1 << 33)
    cpu = ["qwen3-0.6b", "--gpu", "cpu", "--max-model-len", "2048"]
    ask = ["explain", *cpu, "--context", "512"]
    first = fresh(*ask)
    assert fresh(*ask) == first
    points = [{"concurrency": n, "input_tokens": 64, "output_tokens": 8, "ttft_ms": 200 * n, "tpot_ms": 60 + n}
              for n in (1, 4)]
    (tmp_path / "p.json").write_text(json.dumps({"points": points}))
    mine = str(tmp_path / "mine.json")
    assert run("calibrate", str(tmp_path / "p.json"), "--model", *cpu, "--out", mine).exit_code == 0
    with_profile = fresh(*ask, "--profile", mine)
    probe.main()
    assert fresh(*ask)["step_time_s"] != first["step_time_s"]
    assert fresh(*ask, "--profile", mine) == with_profile
    probe.cpu_device.cache_clear()


def test_a_short_window_names_its_option() -> None:
    from bstar.calibration.sources import of_window
    from bstar.measure.server.snapshot import Window

    short = Window(duration_s=1.0, engine="vllm", restarted=False, counters={"requests": 3.0}, histograms={})
    with pytest.raises(ConfigError, match=r"watch for longer \(--window\)"):
        of_window(short)


class _Rising(http.server.BaseHTTPRequestHandler):
    """A vLLM that answers 60 requests between two scrapes; the third one is of a new process, far ahead again."""

    restarts = False
    scraped = 0

    def do_GET(self) -> None:
        kind = type(self)
        kind.scraped += 1
        count = 60 * kind.scraped
        if kind.restarts:
            count = {2: 30, 3: 5}.get(kind.scraped, count)
        label = '{model_name="tiny"}'
        lines = [f"vllm:num_requests_running{label} 4", "# TYPE vllm:request_success_total counter",
                 f"vllm:request_success_total{label} {count}"]
        for name, mean in (("time_to_first_token_seconds", 0.05), ("request_time_per_output_token_seconds", 0.009),
                           ("request_prompt_tokens", 256), ("request_generation_tokens", 32)):
            lines += [f"# TYPE vllm:{name} histogram", f'vllm:{name}_bucket{{model_name="tiny",le="+Inf"}} {count}',
                      f"vllm:{name}_sum{label} {count * mean}", f"vllm:{name}_count{label} {count}"]
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("restarts", [False, True])
def test_a_window_tells_another_model_and_a_restart(restarts: bool) -> None:
    pytest.importorskip("prometheus_client")
    handler = type("Handler", (_Rising,), {"restarts": restarts})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        result = run("calibrate", "--url", f"http://127.0.0.1:{server.server_address[1]}", "--window", "2s",
                     "--model", "llama-3.1-8b", *DEPLOY)  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    if restarts:
        assert result.exit_code == 2
        assert "the server was restarted" in result.stderr
    else:
        assert result.exit_code == 0, result.output
        assert "served tiny, the deployment is llama-3.1-8b" in " ".join(result.stdout.split())
