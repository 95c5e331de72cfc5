"""Fetch a model's config.json from a Hub: the only network access of the planner, and a polite one.

Used only for a Hub id that the catalog does not hold. `HF_HUB_OFFLINE=1` forbids it; `HF_ENDPOINT`
names a mirror. No code of a repository is fetched or run, only two JSON files are read.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from bstar.errors import ConfigError

TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*$")

_REMEDY = "download its config.json and give the path, or describe it with --layers, --hidden-size, …"


def is_offline() -> bool:
    """Whether the environment forbids the network (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    return any(os.environ.get(k, "").strip().upper() in ("1", "ON", "YES", "TRUE")
               for k in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def fetch_config(hub_id: str) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """(config.json, hf_quant_config.json or None, address) of a Hub repository.

    Raises ConfigError in one line: offline, unreachable, gated, missing, or not a JSON object.
    """
    if is_offline():
        raise ConfigError(f"model: {hub_id!r} is not in the catalog and HF_HUB_OFFLINE forbids the network; {_REMEDY}")
    base = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{hub_id}/resolve/main"
    if not base.startswith(("https://", "http://")):
        raise ConfigError(f"HF_ENDPOINT: {base!r} is not an http(s) address")
    config = _get_json(f"{base}/config.json", hub_id, required=True)
    assert config is not None
    quant = _get_json(f"{base}/hf_quant_config.json", hub_id, required=False)
    return config, quant, f"{base}/config.json"


def _get_json(url: str, hub_id: str, *, required: bool) -> dict[str, Any] | None:
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    request = Request(url, headers={"User-Agent": "bstar"})
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:
            body = response.read(MAX_BYTES + 1)
    except HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(f"model: {hub_id!r} is gated or does not exist (HTTP {error.code}); {_REMEDY}") from None
        if error.code == 404:
            if not required:
                return None
            raise ConfigError(f"model: the Hub has no config.json for {hub_id!r} (HTTP 404); {_REMEDY}") from None
        raise ConfigError(f"model: the Hub answered HTTP {error.code} for {hub_id!r}; {_REMEDY}") from None
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"model: {hub_id!r} is not in the catalog and the Hub cannot be reached ({reason}); {_REMEDY}") from None
    if len(body) > MAX_BYTES:
        raise ConfigError(f"model: config.json of {hub_id!r} is over {MAX_BYTES >> 20} MiB; {_REMEDY}")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError(f"model: what the Hub sent for {hub_id!r} is not JSON; {_REMEDY}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model: config.json of {hub_id!r} is not a JSON object; {_REMEDY}")
    return found
