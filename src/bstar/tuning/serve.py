"""Starts a server for one value, waits until it is ready, and stops it with everything that it started."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from bstar.codec.masking import masked, secrets_of, without_secrets
from bstar.errors import ConfigError, InfeasibleError, SpecError
from bstar.tuning.state import InterruptedTuningError

PLACEHOLDERS: Final = ("max_num_seqs", "max_num_batched_tokens")
_HEALTH: Final = ("/health", "/v1/models")
_STOP_S: Final = ((signal.SIGINT, 20.0), (signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0))
_TAIL_LINES: Final = 400
# A line that names what went wrong: "ValueError: …", "Value error, …", "error: …".
_NAMES_ERROR: Final = re.compile(r"(error|exception)[:,]\s+\S|out of memory", re.IGNORECASE)
# Last words of launchers: the cause stands above them.
_LAST_WORDS: Final = ("root cause above", "for further information", "initialization failed")


def command_for(template: str, values: Mapping[str, int]) -> list[str]:
    """The words of the command with its placeholders filled. Raises SpecError for an unknown or missing one."""
    words = []
    for word in _split(template):
        for name in PLACEHOLDERS:
            if "{" + name + "}" in word:
                if name not in values:
                    raise SpecError(f"--serve: {{{name}}} needs --{'values' if name == 'max_num_seqs' else 'budgets'}")
                word = word.replace("{" + name + "}", str(values[name]))
        words.append(word)
    return words


def default_command(template: str) -> list[str]:
    """The command without the flags that hold a placeholder: the engine's own defaults."""
    words: list[str] = []
    for word in _split(template):
        if not any("{" + name + "}" in word for name in PLACEHOLDERS):
            words.append(word)
        elif word.startswith("{") and words and words[-1].startswith("-"):
            words.pop()
    return words


def check_template(template: str) -> None:
    """Raises SpecError where the command has no placeholder, or cannot be read."""
    if not any("{max_num_seqs}" in word for word in _split(template)):
        raise SpecError("--serve: the command needs {max_num_seqs} where the value goes, like "
                        '"vllm serve MODEL --max-num-seqs {max_num_seqs}"')


def url_of(template: str) -> str:
    """Where the server will listen: its --host and --port, or the engine's usual port."""
    words = _split(template)
    host, port = _flag(words, "--host"), _flag(words, "--port")
    usual = "30000" if any("sglang" in w for w in words) else "8080" if any("llama" in w for w in words[:1]) else "8000"
    return f"http://{'127.0.0.1' if host in (None, '0.0.0.0', '::') else host}:{port or usual}"


def _flag(words: list[str], name: str) -> str | None:
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


def _split(template: str) -> list[str]:
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise SpecError(f"--serve: cannot read the command: {error}") from None
    if not words:
        raise SpecError("--serve: the command is empty")
    return words


@contextlib.contextmanager
def served(
    words: list[str], url: str, log: Path, *, ready_s: float, say: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """A server that runs while the block does. `say` is told when Ctrl-C stops it, which may take a while.

    Raises ConfigError where it cannot be started or something else listens there already, InfeasibleError where it
    ends (out of memory, a bad flag) or is not ready within `ready_s`.
    """
    if _answers(url):
        raise ConfigError(f"--serve: something answers at {url} already; stop it, or give the command another --port")
    environment, secrets = dict(os.environ), secrets_of(words)
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words[0].partition("=")
        environment[name], words = value, words[1:]
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment,
                                       start_new_session=True)
        except OSError as error:
            raise ConfigError(f"--serve: cannot run {masked(words[0])!r}: {error.strerror or error}") from None
    interrupted = False
    with _ended_by_sigterm():
        try:
            _wait(process, url, log, ready_s, secrets)
            yield
        except (KeyboardInterrupt, InterruptedTuningError):
            interrupted = True
            raise
        finally:
            _stop(process, interrupted, say)
            _gone(url, process.pid)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that no server is left over."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, ready_s: float, secrets: tuple[str, ...]) -> None:
    end = time.monotonic() + ready_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise InfeasibleError(f"--serve: the server ended with {process.returncode}; its log {log} says: "
                                  f"{without_secrets(_said(log), secrets)}")
        if _answers(url):
            return
        time.sleep(0.25)
    raise InfeasibleError(f"--serve: not ready after {ready_s:g} s (--ready-timeout); its log {log} says: "
                          f"{without_secrets(_said(log), secrets)}")


def _answers(url: str) -> bool:
    for path in _HEALTH:
        try:
            with urllib.request.urlopen(url + path, timeout=3) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError, ValueError) as error:
            # Something listens there; whether its certificate or its lack of TLS is a fault the client says.
            if isinstance(getattr(error, "reason", None), ssl.SSLError):
                return True
    return False


def _said(log: Path) -> str:
    """The line of the log that says why, as well as can be told: the last that names an error, else the last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-_TAIL_LINES:]
    telling = [line for line in lines if not any(words in line.lower() for words in _LAST_WORDS)]
    named = [line for line in telling if _NAMES_ERROR.search(line)]
    return (named or [line for line in telling if "error" in line.lower()] or lines or ["nothing"])[-1][:300]


def _stop(process: subprocess.Popen[bytes], interrupted: bool, say: Callable[[str], None]) -> None:
    """End the server and everything in its group: engines run workers of their own. Another Ctrl-C kills at once."""
    try:
        if interrupted:
            say("stopping the server … (Ctrl-C again kills it)")
        for how, seconds in _STOP_S:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            try:
                process.wait(timeout=seconds)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _gone(url: str, group: int, seconds: float = 20.0) -> None:
    """Until the port is free again and none of the group lives: a GPU's memory is free only then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and (_answers(url) or _lives(group)):
        time.sleep(0.2)


def _lives(group: int) -> bool:
    """Whether a process of the group is more than a zombie; False where there is no /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                return True
    return False
