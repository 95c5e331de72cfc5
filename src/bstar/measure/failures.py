"""Why a request got no whole answer: a few kinds, each telling who is at fault and what to do."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import Final

# kind -> what it means. The kinds of HTTP answers are http_429, http_500, … besides these.
KINDS: Final[dict[str, str]] = {
    "refused": "nothing listens at the address",
    "dns": "the host name is not known",
    "connect": "the connection could not be opened",
    "connect_timeout": "the connection was not opened in time",
    "client_ports": "this machine ran out of ports, files or buffers: the client is the limit, not the server",
    "tls": "the TLS handshake failed",
    "reset": "the server reset the connection",
    "closed_early": "the server closed the connection before the answer was whole",
    "stalled": "no byte came for longer than the stall timeout",
    "timeout": "the request took longer than its timeout",
    "malformed_http": "the answer is no HTTP",
    "malformed_sse": "the answer is no event stream of JSON objects",
    "server_error": "the server sent an error inside the stream",
    "not_streaming": "the server answered in one piece although streaming was asked for",
    "truncated": "the stream ended without a finish reason and without [DONE]",
    "empty": "the answer was complete and holds no token",
    "overrun": "the server went on far beyond the tokens that were asked for",
    "interrupted": "the run was stopped before the answer was whole",
    "worker_lost": "the process that sent the request died",
}
CLIENT_SIDE: Final = frozenset({"client_ports", "interrupted", "worker_lost"})

_EXHAUSTED = {errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRINUSE}


def of_exception(error: BaseException) -> tuple[str, str]:
    """(kind, one line) of what opening or using a connection raised."""
    text = " ".join((str(error) or type(error).__name__).split())[:300]
    if isinstance(error, ssl.SSLError | ssl.CertificateError):
        return "tls", text
    if isinstance(error, socket.gaierror):
        return "dns", text
    if isinstance(error, ConnectionRefusedError):
        return "refused", text
    if isinstance(error, TimeoutError):
        return "connect_timeout", text
    if isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return "reset", text
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        return "client_ports", text
    return "connect", text


# How OpenSSL's versions say that what came back is no TLS record.
_NO_TLS: Final = ("wrong version number", "http request", "unknown protocol", "record layer failure",
                  "packet length too long", "unexpected message")


def is_no_tls(error: BaseException) -> bool:
    """Whether a server answered a TLS handshake with something else: plain HTTP."""
    text = str(error).lower().replace("_", " ")
    return isinstance(error, ssl.SSLError) and any(words in text for words in _NO_TLS)


def tls_remedy(error: BaseException) -> str:
    """What to do about a failed handshake: "; use http://…" or another; "" for what is none."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "; give its certificates with --ca-file, or take any with --insecure"
    if is_no_tls(error):
        return "; the server does not speak TLS there: use http:// in --url"
    if isinstance(error, TimeoutError) and "handshake" in str(error).lower():
        return "; it may not speak TLS there: try http:// in --url"
    return ""


def meaning(kind: str) -> str:
    """What a kind says, in a few words."""
    if kind.startswith("http_"):
        return {"http_429": "too many requests", "http_503": "the server is overloaded or not ready",
                "http_401": "the API key is missing or wrong", "http_404": "no such model or path"}.get(
                    kind, f"the server answered with status {kind.removeprefix('http_')}")  # fmt: skip
    return KINDS.get(kind, kind)


def is_http(kind: str) -> bool:
    return kind.startswith("http_")
