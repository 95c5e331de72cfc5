"""Engine command lines, read as the engines read them, and given back (`format_command`).

    vllm serve MODEL …   ·  python -m vllm.entrypoints.openai.api_server --model …  ·  docker run … vllm/vllm-openai …
    python -m sglang.launch_server --model-path …  ·  sglang serve …  ·  trtllm-serve [serve] MODEL …

Around the launcher anything that people paste is allowed: a prompt, environment variables, line
continuations, comments, `bash -c "…"`, redirections, other commands joined with `&&`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bstar.codec import engine_meanings, engine_settings
from bstar.codec.engine_flags import Argument, read_arguments
from bstar.codec.engine_launch import format_command
from bstar.codec.masking import masked
from bstar.errors import ConfigError, SpecError

__all__ = ["ParsedCommand", "format_command", "parse_command"]

MAX_COMMAND_CHARACTERS = 100_000
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_SEPARATORS = frozenset({"&&", "||", ";", "|", "&", "\n"})
_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm", "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.launchers.api_server": "vllm", "vllm.entrypoints.cli.main": "vllm",
    "sglang.launch_server": "sglang", "sglang_router.launch_server": "sglang",
    "tensorrt_llm.commands.serve": "trtllm",
}  # fmt: skip
_IMAGE = re.compile(r"^(?:[\w.\-]+(?::\d+)?/)*(vllm-openai|vllm|sglang|tritonserver|release|vllm-[\w.\-]+)"
                    r"(?::([\w.\-]+))?(?:@sha256:[0-9a-f]+)?$")
_TAG_VERSION = re.compile(r"v?(\d+\.\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCommand:
    """What a launch command says.

    engine       "vllm", "sglang" or "trtllm"; version where an image tag gives it
    model        as written, or None where the command names none
    settings     keywords of `bstar.deployment`
    unmodelled   flags of the engine that bstar does not model, as written
    without_effect  those of `unmodelled` that change neither memory nor speed
    unknown      flags that the engine does not have, as written
    environment  NAME=value words before the launcher
    Secrets are masked in all of them.
    """

    engine: str
    model: str | None
    version: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    unmodelled: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    @property
    def engine_at_version(self) -> str:
        """ "vllm" or "vllm@0.19.0"."""
        return self.engine if self.version is None else f"{self.engine}@{self.version}"


def parse_command(text: str) -> ParsedCommand:
    """The engine, model and settings of a launch command.

    Raises ConfigError where there is no launcher or the quotes do not match, SpecError for a value that its
    flag does not take. Flags that are not modelled or not known are listed, never dropped.
    """
    words = _words(text)
    launch = _find_launcher(words)
    if launch is None:
        raise ConfigError(
            "command: no engine is launched in it; give a line like `vllm serve MODEL --flag …`, "
            "`python -m sglang.launch_server …` or `trtllm-serve MODEL …`")
    engine, version, rest, environment = launch
    rest = _up_to_separator(rest)
    arguments, positional = read_arguments(engine, rest)
    if engine == "vllm":
        arguments = _with_config_file(arguments)
    found = engine_settings.apply(engine_settings.HANDLERS[engine], arguments)
    settings, unmodelled = found.settings, found.unmodelled
    engine_settings.from_environment(environment, settings)
    if engine == "sglang":
        engine_meanings.finish_sglang(settings, unmodelled)
    elif engine == "trtllm":
        _trtllm_files(arguments, settings, unmodelled)
        engine_meanings.finish_trtllm(settings)
    model = settings.pop("model", None)
    if model is None and positional:
        model = positional.pop(0)
    return ParsedCommand(
        engine=engine, model=model, version=version, settings=settings, unmodelled=tuple(unmodelled),
        without_effect=tuple(found.without_effect), unknown=(*found.unknown, *positional),
        environment=tuple(masked(word) for word in environment))


def _words(text: str) -> list[str]:
    """Shell words; newlines that are not continuations separate commands."""
    if len(text) > MAX_COMMAND_CHARACTERS:
        raise ConfigError(f"command: {len(text)} characters are not a launch command; "
                          f"at most {MAX_COMMAND_CHARACTERS}")
    joined = re.sub(r"[\\^][ \t]*\r?\n", " ", text.replace("\u00a0", " "))
    try:
        return _split(joined)
    except ValueError:
        pass
    try:  # a quote in a comment ("# don't") is none
        return _split(re.sub(r"(?m)(?:^|(?<=\s))#[^\n]*$", "", joined))
    except ValueError as error:
        raise ConfigError(f"command: {str(error).lower()}; quote values like '{{\"a\": 1}}' in full") from None


def _split(text: str) -> list[str]:
    """Words and separators; a word that begins with # ends the line, as in a shell (one with # inside does not)."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    in_comment = False
    for token in lexer:
        is_separator = not token.strip(";&|\n")
        in_comment = token.startswith("#") if not in_comment else "\n" not in token
        if token and not in_comment:
            words.append((token.strip("\n") or "\n") if is_separator else token)
    return words


def _up_to_separator(words: list[str]) -> list[str]:
    """The words of the launched command: up to `&&`, `|`, `;`, a new line or a redirection."""
    out: list[str] = []
    for word in words:
        if word in _SEPARATORS or (word and not word.strip(";&|\n")) or re.match(r"^\d?[<>]", word):
            break
        out.append(word)
    return out


def _find_launcher(words: list[str]) -> tuple[str, str | None, list[str], list[str]] | None:
    """(engine, version, words after the launcher, NAME=value words before it), or None."""
    environment: list[str] = []
    version: str | None = None
    image: tuple[str, int] | None = None
    for index, word in enumerate(words):
        if word in _SEPARATORS:
            continue
        base = word.rsplit("/", 1)[-1]
        after = words[index + 1:]
        if base == "vllm" and after[:1] == ["serve"]:
            return "vllm", version, after[1:], environment
        if base == "sglang" and after[:1] == ["serve"]:
            return "sglang", version, after[1:], environment
        if base == "trtllm-serve":
            return "trtllm", version, after[1:] if after[:1] == ["serve"] else after, environment
        module = word if word in _MODULES else _script_module(word)
        if module is not None:
            tail = after[1:] if module.endswith("cli.main") and after[:1] == ["serve"] else after
            return _MODULES[module], version, tail, environment
        if " " in word and (inner := _inner_command(word)) is not None:
            return inner[0], version or inner[1], inner[2], environment + inner[3]
        found = _IMAGE.match(word) if image is None and _in_container(words[:index]) else None
        if found is not None and ("/" in word or ":" in word):  # a bare word may be a container's --name
            image = (found.group(1), index)
            tag = _TAG_VERSION.search(found.group(2) or "")
            version = tag.group(1) if tag and found.group(1) != "tritonserver" else None
            continue
        if _ASSIGNMENT.match(word):
            environment.append(word)
    if image is not None and image[0].startswith("vllm"):  # the image's entry point is the server
        return "vllm", version, words[image[1] + 1:], environment
    return None


def _in_container(words: list[str]) -> bool:
    """Whether a container is started by the words before."""
    return bool({w.rsplit("/", 1)[-1] for w in words} & {"docker", "podman", "nerdctl", "srun", "enroot"})


def _script_module(word: str) -> str | None:
    """The module of a path such as …/vllm/entrypoints/openai/api_server.py."""
    if not word.endswith(".py"):
        return None
    dotted = word.removesuffix(".py").replace("/", ".")
    return next((m for m in _MODULES if dotted.endswith(m)), None)


def _inner_command(word: str) -> tuple[str, str | None, list[str], list[str]] | None:
    """The launcher inside a quoted command (`bash -c "vllm serve …"`)."""
    if not any(name in word for name in ("vllm", "sglang", "trtllm-serve")):
        return None
    try:
        return _find_launcher(_words(word))
    except ConfigError:
        return None


def _with_config_file(arguments: list[Argument]) -> list[Argument]:
    """vLLM's --config FILE.yaml: its keys come before the flags, so that the flags win."""
    files = [a for a in arguments if a.dest == "config" and isinstance(a.value, str)]
    if not files:
        return arguments
    tokens: list[str] = []
    for key, value in _read_yaml(str(files[-1].value), "--config").items():
        name = "--" + str(key).replace("_", "-")
        if isinstance(value, bool):
            tokens.append(name if value else "--no-" + name.removeprefix("--"))
        elif isinstance(value, list):
            tokens += [name, *(str(v) for v in value)]
        elif isinstance(value, Mapping):
            import json

            tokens.append(f"{name}={json.dumps(value)}")
        elif value is not None:
            tokens.append(f"{name}={value}")
    from_file, _ = read_arguments("vllm", tokens)
    return from_file + [a for a in arguments if a not in files]


def _trtllm_files(arguments: list[Argument], settings: dict[str, Any], unmodelled: list[str]) -> None:
    for argument in arguments:
        if argument.dest == "extra_llm_api_options" and isinstance(argument.value, str):
            options = _read_yaml(argument.value, argument.text.split(" ", 1)[0])
            engine_meanings.trtllm_options(options, settings, unmodelled)


def _read_yaml(path: str, flag: str) -> dict[str, Any]:
    from bstar.codec.spec_files import read_mapping

    if not Path(path).expanduser().exists():
        raise SpecError(f"{flag}: the file {path[:120]!r} of the command is not here; "
                        "bring it along, or put its settings on the command line")
    return read_mapping(Path(path).expanduser(), what=f"the file of {flag}")
