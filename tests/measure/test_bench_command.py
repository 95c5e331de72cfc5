"""The command as a user runs it: exit codes, signals, limits of the system, secrets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_server import FakeServer, choice, good

# A process each, half a second and more; `make test` runs them.
slow = pytest.mark.slow

KEY = "sk-very-secret-0123456789"


def start(*arguments, key=None, before="", cwd=None):
    """`bstar bench` in a shell with limits set `before`; a busy machine is no failure of these tests."""
    environment = {**os.environ, "NO_COLOR": "1"}
    for name in ("OPENAI_API_KEY", "BSTAR_API_KEY"):
        environment.pop(name, None)
    if key is not None:
        environment["OPENAI_API_KEY"] = key
    words = [sys.executable, "-m", "bstar.interfaces.cli", "bench", "--allow-client-limited", *arguments]
    if before:
        words = ["bash", "-c", f'{before}; exec "$@"', "bash", *words]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd)


def call(*arguments, **settings):
    process = start(*arguments, **settings)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


LOAD = ("--input", "10", "--output", "4", "--rate", "50", "--num-requests", "20")


def test_json_is_all_of_stdout_and_the_folder_is_written(tmp_path):
    with FakeServer(good) as server:
        code, out, err = call("--url", server.url, *LOAD, "--slo", "ttft=5s", "--json", "--out", str(tmp_path / "run"))
    assert code == 0, err
    found = json.loads(out)
    assert found["num_finished"] == 20
    assert found["meets_slo"]
    assert found["folder"] == str(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_finished"] == 20
    assert "Traceback" not in err


@slow
def test_a_sweep_has_a_folder_a_load_and_one_sheet(tmp_path):
    with FakeServer(good) as server:
        code, out, err = call("--url", server.url, "--input", "10", "--output", "2", "--sweep", "concurrency=1,2",
                              "--num-requests", "10", "--slo", "ttft=5s", "--out", str(tmp_path / "s"))
    assert code == 0, err
    sheet = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [p["load"] for p in sheet["points"]] == [1, 2]
    assert sheet["slo_boundary"]["edge"] == "above"
    assert (tmp_path / "s" / "concurrency-2" / "requests.parquet").is_file()
    assert "concurrency" in out


@slow
def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path):
    """Ctrl-C in the second load: what was whole is kept, --resume measures the rest, another sweep is refused."""
    async def long(answer, body):
        await good(answer, body, first_s=0.2, gap_s=0.1)

    common = ("--input", "10", "--output", "4", "--num-requests", "8", "--sweep", "concurrency=1,2,4", "--json",
              "--out", str(tmp_path / "s"))
    with FakeServer(long) as server:
        process = start("--url", server.url, *common)
        while len(server.bodies) < 12 and process.poll() is None:  # a probe, eight, and some
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert [p["interrupted"] for p in json.loads((tmp_path / "s" / "sweep.json").read_text())["points"]] == [
            False, True]
        before = len(server.bodies)
        code, _, err = call("--url", server.url, *common, "--resume")
        assert code == 0, err
        assert len(server.bodies) == before + 1 + 16
        code, _, err = call("--url", server.url, *common, "--resume", "--prefix", "5")
        assert code == 2
        assert "another prefix (None, not 5)" in err
    sheet = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [(p["load"], p["run"]["num_finished"]) for p in sheet["points"]] == [(1, 8), (2, 8), (4, 8)]
    assert all((tmp_path / "s" / p["folder"] / "summary.json").is_file() for p in sheet["points"])


@slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_keeps_it(how, tmp_path):
    async def slow(answer, body):
        await good(answer, body, gap_s=0.05)

    with FakeServer(slow) as server:
        process = start("--url", server.url, "--input", "10", "--output", "4", "--rate", "20", "--num-requests", "400",
                        "--json", "--out", str(tmp_path / "run"))
        while len(server.bodies) < 25 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(how)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["interrupted"]
    assert 5 < found["num_finished"] < 400
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert kept["num_finished"] == found["num_finished"]


@slow
def test_a_signal_before_the_first_answer_is_one_line_and_no_folder(tmp_path):
    async def never(answer, body):
        if len(server.bodies) > 1:  # after the probe
            await asyncio.sleep(60)
        await good(answer, body)

    with FakeServer(never) as server:
        process = start("--url", server.url, "--input", "10", "--output", "4", "--rate", "20", "--num-requests", "400",
                        cwd=tmp_path)
        while len(server.bodies) < 4 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err.strip()) == ("", "error: interrupted: nothing was measured, nothing is kept")
    assert list(tmp_path.iterdir()) == []


@slow
def test_running_out_of_files_is_the_clients_fault(tmp_path):
    """60 streams with room for fewer descriptors: the run ends, says so, and is no result (exit code 1)."""
    async def slow(answer, body):
        await good(answer, body, first_s=1.0)

    with FakeServer(slow) as server:
        code, out, err = call("--url", server.url, "--input", "10", "--output", "2", "--concurrency", "60",
                              "--num-requests", "60", "--json", "--no-out", before="ulimit -n 40")
    assert code == 1, err  # more failures than are allowed
    found = json.loads(out)
    assert found["errors"]["client_ports"]["count"] > 0
    assert found["health"]["client_limited"]
    assert not found["verdict"]["valid"]
    assert found["num_finished"] > 0


@slow
def test_a_full_disk_is_exit_code_2_and_the_figures_are_printed(tmp_path):
    """A limit on the size of files stands in for a full disk: the same write fails, at the same place."""
    with FakeServer(good) as server:
        code, out, err = call("--url", server.url, "--input", "10", "--output", "40", "--rate", "100", "--num-requests",
                              "200", "--json", "--out", str(tmp_path / "run"), before="ulimit -f 8")
    assert code == 2, err
    found = json.loads(out)
    assert found["num_finished"] == 200
    assert found["write_error"]
    assert found["folder"].endswith(".partial")
    assert "Traceback" not in err


@slow
def test_the_key_is_sent_and_shows_nowhere(tmp_path):
    """Not even where a server sends it back in an error."""
    async def tells(answer, body):
        said = answer.headers.get("authorization", "")
        if len(answer.headers.get("content-length", "")) > 5:
            return
        count[0] += 1
        if count[0] % 3 == 1:
            await answer.reply(401, json.dumps({"error": f"bad key {said}"}).encode())
        elif count[0] % 3 == 2:
            await answer.head()
            await answer.event(choice("a"))
            await answer.event({"error": {"message": f"who are you, {said}"}})
            await answer.end()
        else:
            await good(answer, body)

    count = [2]
    with FakeServer(tells) as server:
        code, out, err = call("--url", server.url, *LOAD, "--header", "X-Token: hidden-too", "--json", "--out",
                              str(tmp_path / "run"), key=KEY)
        headers = list(server.headers)
        _, text, more = call("--url", server.url, *LOAD, "--no-out", key=KEY)
    assert code == 1
    assert all(h["authorization"] == f"Bearer {KEY}" for h in headers)
    assert all(h["x-token"] == "hidden-too" for h in headers)
    assert "***" in out
    everything = out + err + text + more
    for file in (tmp_path / "run").rglob("*"):
        everything += file.read_bytes().decode("latin-1")
    assert KEY not in everything
    assert "hidden-too" not in everything


def test_a_key_shows_in_no_traceback(monkeypatch):
    from bstar.measure.keys import KeySource, Secret, hide

    monkeypatch.setenv("MY_KEY", KEY)
    secret = KeySource(variable="MY_KEY").read()
    assert KEY not in f"{secret!r} {secret} {secret:>40}"
    assert hide(f"x {KEY} y", secret) == "x *** y"
    with pytest.raises(TypeError, match="API key"):
        __import__("pickle").dumps(Secret("x"))


@pytest.mark.parametrize("key", ["bad\nkey-1234", "ключ-1234"])
def test_a_key_that_no_header_can_hold_is_one_line_without_it(key, tmp_path):
    with FakeServer(good) as server:
        code, out, err = call("--url", server.url, *LOAD, "--no-out", key=key)
    assert code == 2
    assert err.startswith("error: OPENAI_API_KEY: ")
    assert len(err.strip().splitlines()) == 1
    assert "1234" not in out + err


@pytest.mark.parametrize(("arguments", "said"), [
    (("--url", "ftp://x", *LOAD), "--url"), (("--url", "http://user:pw@x", *LOAD), "environment"),
    (("--url", "http://127.0.0.1:9", *LOAD), "nothing answers"), (LOAD, "--url"),
    (("--url", "http://127.0.0.1:9", "--input", "3", "--output", "2"), "--rate"),
    (("--url", "http://x", *LOAD, "--sweep", "rate=1,2"), "--rate"),
    (("--url", "http://x", *LOAD, "--sweep", "batch=1,2"), "--sweep"),
    (("--url", "http://x", *LOAD, "--header", "nonsense"), "--header"),
    (("--url", "http://x", *LOAD, "--extra-body", "[1]"), "--extra-body"),
    (("--url", "http://x", *LOAD, "--workers", "many"), "--workers"),
    (("--url", "http://x", *LOAD, "--dataset", "no-such.json"), "--input"),
    (("--url", "http://x", "--rate", "3", "--dataset", "no-such.json"), "no-such.json"),
    (("--url", "http://x", *LOAD, "--no-out", "--out", "x"), "--no-out"),
    (("--url", "http://x", *LOAD, "--timeout", "0s"), "timeout"),
    (("--url", "http://x", *LOAD, "--until", "magic=2%"), "--until"),
    (("--url", "http://x", *LOAD, "--api-key-env", "NOT_SET_ANYWHERE"), "--api-key-env"),
    (("--url", "http://x", *LOAD, "--workers", "100000"), "--workers"),
    (("--url", "http://x", *LOAD, "--max-error-fraction", "7"), "--max-error-fraction"),
    (("--url", "http://x", *LOAD, "--out", "/dev/null/nowhere/run"), "--out"),
    (("--url", "http://x", "--input", "3", "--output", "2", "--concurrency", "20000000"), "--concurrency"),
    (("--url", "http://x", "--input", "3", "--output", "2", "--rate", "1", "--num-requests", "9" * 20), "--num-req"),
    (("--url", "http://x", "--input", "3", "--output", "2", "--rate", "5", "--duration", "1e12s"), "--duration"),
    (("--url", "http://x", "--input", "0", "--output", "2", "--rate", "5"), "error: --input: "),
    (("--url", "http://x", "--input", "3", "--output", "uniform:9-2", "--rate", "5"), "error: --output: "),
    (("--url", "http://x", "--input", "3", "--output", "2", "--rate-curve", "up"), "error: --rate-curve: "),
    (("--url", "http://x", "--input", "3", "--output", "2", "--concurrency", "2", "--think", "x"), "error: --think: "),
    (("--url", "http://x", *LOAD, "--warmup-requests", "500"), "error: --warmup-requests: "),
    (("--url", "http://x", "--trace", "no-such.csv"), "error: --trace: "),
    (("--url", "http://x", "--rate", "3", "--dataset", "no-such.json"), "error: --dataset: "),
    (("--url", "http://x", "--input", "3", "--output", "2", "--concurrency", "2", "--max-in-flight", "1"),
     "error: --max-in-flight: "),
    (("--url", "http://x", "--input", "3", "--output", "2", "--sweep", "concurrency=1,2", "--max-in-flight", "1"),
     "error: --max-in-flight: "),
])
def test_bad_input_is_one_line_and_exit_code_2(arguments, said, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from bstar.interfaces.cli.main import cli

    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    found = CliRunner().invoke(cli, ["bench", "--allow-client-limited", *arguments])
    signal.signal(signal.SIGTERM, before)
    assert found.exit_code == 2, found.output
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last


@slow
def test_prompts_of_files(tmp_path):
    file = tmp_path / "share.json"
    file.write_text(json.dumps([
        {"conversations": [{"from": "human", "value": "one two three four"}, {"from": "gpt", "value": "a b c d e"}]},
        {"conversations": [{"from": "human", "value": "no answer"}]},
        {"conversations": [{"from": "system", "value": "x"}, {"from": "human", "value": "five six"},
                           {"from": "gpt", "value": "yes"}]},
    ]))  # fmt: skip
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"prompt": "hello there", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
                     '{"prompt_token_ids": [5, 6, 7], "output_tokens": 2}\n')
    with FakeServer(good) as server:
        code, out, err = call("--url", server.url, "--dataset", str(file), "--concurrency", "1", "--json", "--no-out")
        assert code == 0, err
        assert json.loads(out)["num_finished"] == 2
        prompts = [b["prompt"] for b in server.bodies[-2:]]
        assert prompts == ["one two three four", "five six"]
        code, out, err = call("--url", server.url, "--dataset", str(lines), "--concurrency", "1", "--output", "5",
                              "--json", "--no-out")
        assert code == 0, err
        assert [(b["prompt"], b["max_tokens"]) for b in server.bodies[-3:]] == [
            ("hello there", 3), ("hi", 5), ([5, 6, 7], 2)]
        code, _, err = call("--url", server.url, "--dataset", str(lines), "--concurrency", "1", "--no-out")
        assert code == 2
        assert "--output" in err


@slow
def test_conversations_from_the_command(tmp_path):
    with FakeServer(good) as server:
        code, out, err = call("--url", server.url, "--api", "chat", "--turns", "3", "--input", "10", "--output", "3",
                              "--concurrency", "2", "--num-requests", "4", "--think", "10ms", "--json", "--no-out")
    assert code == 0, err
    assert json.loads(out)["num_finished"] == 12


@slow
def test_nothing_is_left_behind_when_the_server_dies(tmp_path):
    """The server goes away in the middle: the run ends by itself, with what was measured."""
    async def dies(answer, body):
        if len(server.bodies) > 15:
            threading.Thread(target=server.__exit__, args=(None, None, None)).start()
        await good(answer, body, gap_s=0.03)

    server = FakeServer(dies)
    with server:
        code, out, err = call("--url", server.url, "--input", "10", "--output", "4", "--rate", "40", "--num-requests",
                              "80", "--json", "--out", str(tmp_path / "run"))
    assert code == 1, err
    found = json.loads(out)
    assert set(found["errors"]) <= {"refused", "reset", "closed_early"}
    assert found["num_finished"] > 5
    assert (tmp_path / "run" / "summary.json").is_file()
