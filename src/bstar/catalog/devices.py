"""The device catalog: one TOML file a device, found by id, alias or common spelling.

`_index.json` maps every spelling to its file, so that one lookup parses one file; `python -m
bstar.catalog.devices` rewrites it and a test keeps it true. A user's own devices come first: a path to a
TOML file in place of a name, or files `<id>.toml` in `$BSTAR_CATALOG/devices`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, get_args

from bstar.errors import ConfigError, InputError, NotInCatalogError
from bstar.specs.device import DeviceSpec, LinkSpec, Price, Provenance

# Devices without a datasheet: what they do is measured, once per machine (`bstar.catalog.probe`).
PROBED_IDS = ("cpu",)
INDEX_NAME = "_index.json"

_VENDOR_WORDS = ("nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "intel", "google", "aws", "graphics")
_MAX_FILE_BYTES = 1 << 20
_T = TypeVar("_T")


def get_device(name: str) -> DeviceSpec:
    """The device called `name`: an id, an alias, a driver's product name, "cpu", or a path to a TOML file.

    Case, spaces, hyphens, underscores, a vendor's name and a remark in brackets do not matter.
    Raises NotInCatalogError with close names, ConfigError for a file that does not describe a device.
    """
    if name.endswith(".toml"):
        return read_device(Path(name).expanduser())
    user = _user_devices()
    for key in _keys(name):
        if key in user:
            return user[key]
        if key in PROBED_IDS:
            from bstar.catalog.probe import cpu_device  # may measure this machine: only when it is asked for

            return cpu_device()
        device_id = _index().get(key)
        if device_id is not None:
            return _shipped(device_id)
    raise NotInCatalogError(
        "gpu", name, suggestions=_suggestions(name, user),
        remedy="`bstar catalog devices` lists them; a path to a TOML file describes another one",
    )  # fmt: skip


def device_ids() -> tuple[str, ...]:
    """Ids of the shipped devices and of the user's own, sorted ("cpu" is measured and not listed)."""
    own = {device.id for device in _user_devices().values()}
    return tuple(sorted(own | {file.name.removesuffix(".toml") for file in _shipped_files()}))


def all_devices() -> tuple[DeviceSpec, ...]:
    """Every device of the catalog, by id; parses every file."""
    return tuple(get_device(device_id) for device_id in device_ids())


def with_overrides(
    device: DeviceSpec,
    *,
    price_usd_per_hour: float | None = None,
    memory_bytes: int | None = None,
    bandwidth_bytes_per_s: float | None = None,
    devices_per_node: int | None = None,
) -> DeviceSpec:
    """The device with the user's own figures; None keeps the catalog's.

    `memory_bytes` is what the engine sees: it replaces the driver's figures as well. What the user says is no longer
    unverified.
    """
    changes: dict[str, Any] = {}
    if price_usd_per_hour is not None:
        changes["price"] = Price(usd_per_hour=price_usd_per_hour, source="given by the user", date="")
    if memory_bytes is not None:
        changes |= dict.fromkeys(("memory_bytes", "usable_memory_bytes", "nvml_memory_bytes"), memory_bytes)
    if bandwidth_bytes_per_s is not None:
        changes["bandwidth_bytes_per_s"] = bandwidth_bytes_per_s
    if devices_per_node is not None:
        changes["devices_per_node"] = devices_per_node
    if any(name in changes for name in device.unverified):
        changes["unverified"] = tuple(name for name in device.unverified if name not in changes)
    return dataclasses.replace(device, **changes) if changes else device


def read_device(path: Path) -> DeviceSpec:
    """The device that a user's TOML file describes. Raises ConfigError naming the file and the key at fault."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"gpu file {str(path)!r}: larger than 1 MiB; a device takes about 40 lines")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"gpu file {str(path)!r}: cannot be read ({reason})") from None
    return _parse(text, str(path))


def normalized(name: str) -> str:
    """Lower case letters and digits of `name`: "RTX 4090" and "rtx_4090" are one key."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


# --- parsing ------------------------------------------------------------------------------------------


def _parse(text: str, name: str) -> DeviceSpec:
    where = f"gpu file {name!r}"
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML ({error})") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    for key, kind in (("link", LinkSpec), ("pcie", LinkSpec), ("inter_node", LinkSpec), ("price", Price)):
        if key in raw:
            raw[key] = _build(kind, raw[key], f"{where}: [{key}]")
    return _build(DeviceSpec, raw, where)


def _build(kind: type[_T], raw: Any, where: str) -> _T:
    """A spec from a TOML table: every key known, every value of the field's type."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: must be a table, is {_shown(raw)}")
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in raw:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {_shown(key)}{hint}")
    missing = [
        f.name for f in known.values()
        if f.name not in raw and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"{where}: lacks {', '.join(missing)}")
    values = {key: _converted(value, str(known[key].type), f"{where}: {key}") for key, value in raw.items()}
    try:
        return kind(**values)
    except InputError as error:
        raise ConfigError(f"{where}: {error}") from None


def _converted(value: Any, declared: str, where: str) -> Any:
    kind = declared.split("[")[0].split(" |")[0]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30  # NaN fails too
    if kind == "tuple" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind == "Mapping" and isinstance(value, dict):
        return {key: _converted(item, "float", f"{where}.{key}") for key, item in value.items()}
    if kind == "float" and number:
        return float(value)
    if kind == "int" and number and value == int(value):
        return int(value)
    if (kind == "bool" and isinstance(value, bool)) or (kind == "str" and isinstance(value, str)):
        return value
    if kind == "Provenance" and value in get_args(Provenance):
        return value
    if kind in ("LinkSpec", "Price"):
        return value
    wanted = "one of " + ", ".join(get_args(Provenance)) if kind == "Provenance" else declared
    raise ConfigError(f"{where}: must be {wanted}, is {_shown(value)}")


def _shown(value: Any) -> str:
    """`value` for a message: one short line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- finding ------------------------------------------------------------------------------------------


def _keys(name: str) -> Iterator[str]:
    """Spellings to look up, the most literal first."""
    yield normalized(name)
    without_remark = re.sub(r"\([^)]*\)", " ", name)
    yield normalized(without_remark)
    words = [w for w in re.split(r"[^a-z0-9]+", without_remark.lower()) if w and w not in _VENDOR_WORDS]
    yield "".join(words)


def _folder() -> Traversable:
    return files("bstar.catalog") / "devices"


def _shipped_files() -> tuple[Traversable, ...]:
    return tuple(file for file in _folder().iterdir() if file.name.endswith(".toml"))


@cache
def _shipped(device_id: str) -> DeviceSpec:
    file = _folder() / f"{device_id}.toml"
    return _parse(file.read_text(encoding="utf-8"), file.name)


@cache
def _index() -> Mapping[str, str]:
    loaded: dict[str, str] = json.loads((_folder() / INDEX_NAME).read_text(encoding="utf-8"))
    return loaded


def _user_devices() -> dict[str, DeviceSpec]:
    """Spelling -> device of `$BSTAR_CATALOG/devices/*.toml`; a user's file may stand in for a shipped one."""
    root = os.environ.get("BSTAR_CATALOG")
    if not root:
        return {}
    found: dict[str, DeviceSpec] = {}
    for path in sorted((Path(root) / "devices").glob("*.toml")):
        device = read_device(path)
        for spelling in (device.id, path.stem, *device.aliases):
            found[normalized(spelling)] = device
    return found


def _suggestions(name: str, user: Mapping[str, DeviceSpec]) -> tuple[str, ...]:
    """Up to four ids whose spelling is near `name`, the nearest first."""
    wanted = list(_keys(name))[-1] or normalized(name)
    spellings = {**_index(), **{key: device.id for key, device in user.items()}}
    near = difflib.get_close_matches(wanted, spellings, n=12, cutoff=0.6)
    near += [key for key in spellings if len(wanted) >= 2 and wanted in key]
    return tuple(dict.fromkeys(spellings[key] for key in near))[:4]


def build_index() -> dict[str, str]:
    """Spelling -> id over all shipped files. Raises ConfigError where two devices share a spelling."""
    index: dict[str, str] = {}
    for file in sorted(_shipped_files(), key=lambda f: f.name):
        device = _parse(file.read_text(encoding="utf-8"), file.name)
        if file.name != f"{device.id}.toml":
            raise ConfigError(f"gpu file {file.name!r}: its id is {device.id!r}; the file must be called after it")
        for spelling in (device.id, device.name, *device.aliases):
            key = normalized(spelling)
            if index.setdefault(key, device.id) != device.id:
                raise ConfigError(f"gpu file {file.name!r}: {spelling!r} already means {index[key]!r}")
    return dict(sorted(index.items()))


if __name__ == "__main__":
    target = Path(str(_folder())) / INDEX_NAME
    target.write_text(json.dumps(build_index(), indent=0) + "\n", encoding="utf-8")
