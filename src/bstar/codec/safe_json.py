"""Files that users hand in, read without trusting them: one regular file, a size cap, strict JSON.

Every function raises `ConfigError` with one line that names the file, what is wrong and what to do. A
FIFO or a device never blocks, a symlink loop or a 100 MB file is refused by its `stat`, nothing in a
file is ever executed or imported.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from bstar.errors import ConfigError
from bstar.units import MIB, format_bytes

# The largest real config.json is under 1 MB; weight indexes of the largest models are under 30 MB.
MAX_CONFIG_BYTES = 16 * MIB
MAX_DEPTH = 100
# Ten times the digits of any parameter count; Python's own int() of millions of digits is quadratic.
MAX_INTEGER_DIGITS = 100
MAX_SHOWN = 200

_OS_ERRORS = {
    errno.ENOENT: "does not exist; check the path",
    errno.ENOTDIR: "does not exist (a part of the path is not a folder); check the path",
    errno.EACCES: "may not be read (permission denied); change its permissions or copy it",
    errno.EPERM: "may not be read (permission denied); change its permissions or copy it",
    errno.ELOOP: "is a symbolic link that leads back to itself; give the real file",
    errno.ENAMETOOLONG: "has too long a name; check the path",
    errno.ENXIO: "is not a regular file; give a plain file",
}


def shown(value: object) -> str:
    """`value` as one printable line of at most `MAX_SHOWN` characters, for an error message."""
    text = str(value)
    if not text.isprintable() or not text:
        text = repr(text) if text else "(empty)"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def open_regular(path: Path | str, *, what: str) -> tuple[BinaryIO, int]:
    """An open binary file and its size in bytes; refuses everything that is not a regular file.

    Opened without blocking and checked after opening, so that a FIFO cannot hang the caller and a file
    that is swapped between check and use cannot slip in.
    """
    try:
        before = Path(path).stat()  # stat first: opening some devices has effects
        _refuse_irregular(before.st_mode, path, what)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        reason = _OS_ERRORS.get(error.errno or 0, f"cannot be read ({error.strerror}); check the path")
        raise ConfigError(f"{what}: {shown(path)} {reason}") from None
    except ValueError:
        raise ConfigError(f"{what}: {shown(path)} is not a usable path (it holds a NUL character)") from None
    handle = os.fdopen(descriptor, "rb")
    status = os.fstat(descriptor)
    try:
        _refuse_irregular(status.st_mode, path, what)
    except ConfigError:
        handle.close()
        raise
    return handle, status.st_size


def _refuse_irregular(mode: int, path: Path | str, what: str) -> None:
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{what}: {shown(path)} is a folder; give the file inside it")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{what}: {shown(path)} is not a regular file (a pipe, socket or device); give a plain file")


def read_bytes(path: Path | str, *, what: str, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """The whole file. Raises ConfigError above `max_bytes`, without reading it."""
    handle, size = open_regular(path, what=what)
    with handle:
        # A file may grow while it is read, and some regular files (/proc) state size 0: bound the read too.
        data = b"" if size > max_bytes else _read(handle, max_bytes + 1, path, what)
    if size > max_bytes or len(data) > max_bytes:
        held = format_bytes(max(size, len(data)), binary=False)
        limit = format_bytes(max_bytes, binary=False)
        raise ConfigError(f"{what}: {shown(path)} is too large ({held}; at most {limit}); is it the right file?")
    return data


def _read(handle: BinaryIO, count: int, path: Path | str, what: str) -> bytes:
    try:
        return handle.read(count)
    except OSError as error:
        raise ConfigError(f"{what}: {shown(path)} cannot be read ({error.strerror}); check the disk") from None


def read_text(path: Path | str, *, what: str, max_bytes: int = MAX_CONFIG_BYTES, strict: bool = True) -> str:
    """The file as text. `strict`: bytes that are not UTF-8 are an error; otherwise they become U+FFFD (logs)."""
    data = read_bytes(path, what=what, max_bytes=max_bytes)
    return _decode(data, what, path) if strict else data.decode("utf-8-sig", errors="replace")


def read_json(
    path: Path | str, *, what: str, max_bytes: int = MAX_CONFIG_BYTES, max_depth: int = MAX_DEPTH
) -> dict[str, Any]:
    """The JSON object in the file `path`; `what` names it in messages ("model config").

    NaN and ±Infinity are accepted as numbers (real configs hold `Infinity`); a consumer that needs a size
    rejects them. Raises ConfigError: missing, a folder, unreadable, a link loop, a pipe or device, larger than
    `max_bytes`, not UTF-8, not JSON, empty, not an object, nested deeper than `max_depth`, one key with two
    values, a whole number of absurd length.
    """
    data = read_bytes(path, what=what, max_bytes=max_bytes)
    return parse_json(data, what=what, where=path, max_depth=max_depth)


def parse_json(data: bytes, *, what: str, where: Path | str, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The JSON object in `data`, by the rules of `read_json`; `where` names its origin in messages."""
    text = _decode(data, what, where)
    start = text.lstrip()[:1]
    if not start:
        raise ConfigError(f"{what}: {shown(where)} is empty; it should hold a JSON object")
    if start != "{":
        # Refused before parsing: a large array is not worth building.
        raise ConfigError(f"{what}: {shown(where)} is not a JSON object (it starts with {start!r}, not '{{')")
    decoder = json.JSONDecoder(
        object_pairs_hook=lambda pairs: _unique(pairs, what, where), parse_int=lambda digits: _int(digits, what, where)
    )
    try:
        found: dict[str, Any] = decoder.decode(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{what}: {shown(where)} is not valid JSON ({error.msg} at {place}); repair it") from None
    except RecursionError:
        _too_deep(what, where, max_depth)
    _check_tree(found, what, where, max_depth)
    return found


def _decode(data: bytes, what: str, where: Path | str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what}: {shown(where)} is not UTF-8 text (byte {error.start}); save it as UTF-8, or is it a binary file?"
        ) from None


def _unique(pairs: list[tuple[str, Any]], what: str, where: Path | str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            # The same value twice is untidy but says nothing wrong.
            if key in seen and seen[key] != value:
                raise ConfigError(f"{what}: {shown(where)} gives {shown(repr(key))} two values; keep one")
            seen[key] = value
    return found


def _int(digits: str, what: str, where: Path | str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ConfigError(f"{what}: {shown(where)} holds a whole number of {len(digits)} digits; no size is that large")
    return int(digits)


def _check_tree(root: dict[str, Any], what: str, where: Path | str, max_depth: int) -> None:
    """Refuse nesting deeper than `max_depth` and text that cannot be written out again (lone surrogates)."""
    level: list[Any] = [root]
    for _ in range(max_depth):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                _check_text(item, what, where)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str):
                _check_text((item,), what, where)
        if not below:
            return
        level = below
    _too_deep(what, where, max_depth)


def _check_text(texts: Iterable[str], what: str, where: Path | str) -> None:
    for text in texts:
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{what}: {shown(where)} holds half of a surrogate pair ({shown(repr(text))}); repair it")


def _too_deep(what: str, where: Path | str, max_depth: int) -> NoReturn:
    message = f"{what}: {shown(where)} is nested deeper than {max_depth} levels; is it the right file?"
    raise ConfigError(message) from None
