"""Files that appear whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bstar.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A place to write to; what is there at the end of the block becomes `path`, and nothing after an error.

    A link is followed. What exists and is no regular file (a pipe, /dev/stdout) is written to as it is. Raises OSError.
    """
    if path.exists() and not path.is_file():  # as it is: a pipe behind /dev/fd has no path to resolve to
        yield path
        return
    target = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=".tmp")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, *, what: str = "file") -> None:
    """Write text (UTF-8) or bytes to `path`. Raises ConfigError, which begins with `what`, where it cannot."""
    try:
        with whole_file(path) as place:
            place.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ConfigError(f"{what}: {str(path)!r} cannot be written ({error.strerror or error}); choose another place"
                          ) from None


def check_writable(path: Path, *, what: str = "file") -> None:
    """Raises ConfigError where `path` cannot be written, before work is spent on what goes there."""
    special = path.exists() and not path.is_file() and not path.is_dir()
    target = path if special else path.resolve()
    above = target.parent
    if target.is_dir():
        reason = "it is a folder"
    elif not above.is_dir():
        reason = f"there is no folder {str(above)!r}"
    elif not os.access(above if not target.exists() else target, os.W_OK):
        reason = "not permitted"
    else:
        return
    raise ConfigError(f"{what}: {str(path)!r} cannot be written ({reason}); choose another place")
