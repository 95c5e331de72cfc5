"""Where requests go: the parts of a URL, the API, TLS and timeouts."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from bstar.errors import ConfigError, SpecError
from bstar.measure.keys import KeySource, Secret

Api = Literal["completions", "chat"]
PATHS: Final[dict[str, str]] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits of one request, seconds.

    connect_s   to open a connection
    stall_s     without a byte, from the request on
    request_s   for the whole answer
    """

    connect_s: float = 10.0
    stall_s: float = 300.0
    request_s: float = 3600.0

    def __post_init__(self) -> None:
        flags = {"connect_s": "connect timeout", "stall_s": "--stall-timeout", "request_s": "--timeout"}
        for name, flag in flags.items():
            if not 0 < getattr(self, name) < float("inf"):
                raise SpecError(f"{flag}: must be positive and finite, is {getattr(self, name)}; give a time like 60s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An OpenAI-compatible server.

    base        path before /v1 ("" mostly)
    headers     further request headers; their values appear in no file
    verify      False: take any certificate
    """

    scheme: str
    host: str
    port: int
    base: str = ""
    model: str = ""
    api: Api = "completions"
    headers: tuple[tuple[str, str], ...] = ()
    key: KeySource = field(default_factory=KeySource)
    verify: bool = True
    ca_file: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def url(self) -> str:
        """Without credentials: those are refused."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"

    @property
    def path(self) -> str:
        return self.base + PATHS[self.api]

    @property
    def netloc(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == usual else f"{host}:{self.port}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """None for plain HTTP. Raises ConfigError for a certificate file that cannot be read."""
        if self.scheme != "https":
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca-file: {self.ca_file} cannot be read as certificates ({error})") from None
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def header_lines(self, secret: Secret | None) -> bytes:
        """The headers that every request to the server has, each with its line end; the key is in them."""
        lines = [f"Host: {self.netloc}", "User-Agent: bstar", "Accept-Encoding: identity"]
        if secret is not None:
            lines.append(f"Authorization: Bearer {secret.reveal()}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "".join(line + "\r\n" for line in lines).encode("latin-1", "replace")

    def request(self, path: str, body: bytes, secret: Secret | None, *, accept: str = "text/event-stream") -> bytes:
        """A whole POST request."""
        return self.post_head(path, secret, accept=accept) + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def post_head(self, path: str, secret: Secret | None, *, accept: str = "text/event-stream") -> bytes:
        """A POST request up to its length."""
        return (f"POST {path} HTTP/1.1\r\n".encode("ascii") + self.header_lines(secret)
                + f"Content-Type: application/json\r\nAccept: {accept}\r\n".encode("ascii"))

    def to_dict(self) -> dict[str, object]:
        """What may be written: names of headers, never values."""
        return {
            "url": self.url, "api": self.api, "model": self.model, "headers": [name for name, _ in self.headers],
            "verify_tls": self.verify, "timeouts": {"connect_s": self.timeouts.connect_s,
                                                    "stall_s": self.timeouts.stall_s,
                                                    "request_s": self.timeouts.request_s},
        }  # fmt: skip


def parse_endpoint(
    url: str, *, model: str = "", api: Api = "completions", headers: tuple[str, ...] = (),
    key_variable: str | None = None, verify: bool = True, ca_file: str | Path | None = None,
    timeouts: Timeouts | None = None,
) -> Endpoint:  # fmt: skip
    """The server of a URL like http://127.0.0.1:8000 (a trailing /v1 or API path is left off).

    Raises SpecError naming --url, --header or --api-key-env.
    """
    text = url.strip()
    if "://" not in text:
        text = "http://" + text
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise SpecError(f"--url: {error}; write it like http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SpecError(f"--url: {parts.scheme or 'it'} is no HTTP address; write it like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise SpecError("--url: has a user or password in it; put the key into the environment (OPENAI_API_KEY)")
    if parts.query or parts.fragment:
        raise SpecError("--url: has a query; give scheme, host, port and path only")
    if any(c <= " " or ord(c) > 126 for c in parts.path + parts.hostname):
        raise SpecError("--url: holds characters that no URL has")
    base = parts.path.rstrip("/")
    for tail in (*PATHS.values(), "/v1"):
        base = base.removesuffix(tail)
    return Endpoint(
        scheme=parts.scheme, host=parts.hostname, port=port or (443 if parts.scheme == "https" else 80), base=base,
        model=model, api=api, headers=tuple(_header(h) for h in headers), key=KeySource(variable=key_variable),
        verify=verify, ca_file=None if ca_file is None else str(ca_file),
        timeouts=timeouts if timeouts is not None else Timeouts(),
    )  # fmt: skip


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not sign or not _HEADER.fullmatch(name):
        raise SpecError(f"--header: {name!r} is not understood; write it like 'X-Name: value'")
    if any(ord(c) < 32 or ord(c) > 255 for c in value):
        raise SpecError(f"--header: the value of {name} holds a character that no header can")
    if name.lower() in ("content-length", "host", "transfer-encoding", "connection", "accept-encoding"):
        raise SpecError(f"--header: {name} is set by the client itself")
    return name, value
