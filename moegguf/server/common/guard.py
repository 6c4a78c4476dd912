"""Who may ask: the Host and Origin of a request, its key, and the size of its headers, before any route.

Plain ASGI, since it is on the way to every first token. A page of a foreign site reaches a server on loopback under
its own name (DNS rebinding, CVE-2024-28224), or posts to it without reading the answer: both are refused by name.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from functools import lru_cache

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moegguf.server.common import limits
from moegguf.server.common.errors import HttpError, error_response

# Ollama's defaults (envconfig/config.go); a port belongs to the first two forms.
ORIGINS = (
    *(f"{scheme}://{host}" for scheme in ("http", "https") for host in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")),
    *(
        f"{scheme}://{host}:*"
        for scheme in ("http", "https")
        for host in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
    ),
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
)
OPEN_PATHS = ("/", "/health")  # answered without a key: they tell nothing but that the server is there
OPEN_FOLDER = "/page/"
METHODS = "GET, POST, DELETE, HEAD, OPTIONS"
HEADERS = {"authorization", "content-type", "user-agent", "accept", "x-requested-with"}
HEADER_FAMILIES = ("x-stainless-", "openai-")


class Guard:
    """Middleware. `loopback`: the server is reached from this machine only, so foreign Host headers are refused."""

    def __init__(
        self, app: ASGIApp, *, loopback: bool, origins: Sequence[str] = (), api_key: str | None = None
    ) -> None:
        self._app = app
        self._loopback = loopback
        self._origins = origin_pattern((*ORIGINS, *origins))
        self._bearer = f"Bearer {api_key}".encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(reversed(scope["headers"]))  # of a header that comes twice the first
        origin = headers.get(b"origin", b"").decode("latin-1")
        refusal = self._refusal(scope, headers, origin)
        if refusal:
            return await error_response(refusal, scope["path"])(scope, receive, send)
        if scope["method"] == "OPTIONS":
            return await preflight(origin, headers)(scope, receive, send)
        await self._app(scope, receive, granting(send, origin) if origin else send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes], origin: str) -> HttpError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limits.HEADER_BYTES:
            return HttpError(431, f"request headers too large: at most {limits.HEADER_BYTES} bytes are taken")
        host = headers.get(b"host", b"").decode("latin-1")
        if self._loopback and not is_own_host(host):
            return HttpError(403, f"the Host header {host[:100]!r} is not allowed; ask by an address of this machine")
        if origin and not self._origins.fullmatch(origin) and not is_same(origin, host):
            return HttpError(403, f"the Origin {origin[:100]!r} is not allowed; OLLAMA_ORIGINS adds origins")
        path = scope["path"]
        if self._bearer is None or scope["method"] == "OPTIONS" or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self._bearer):
            return None
        return HttpError(401, "unauthorized: send the server's API key as a Bearer token", "invalid_api_key")


def origin_pattern(origins: Sequence[str]) -> re.Pattern[str]:
    """One expression for all; `*` stands for anything, and after a colon for a port."""
    parts = (re.escape(origin.strip()).replace(r":\*", r":\d+").replace(r"\*", ".*") for origin in origins)
    return re.compile("|".join(parts), re.IGNORECASE)


def is_same(origin: str, host: str) -> bool:
    """The page came from this very server."""
    return bool(host) and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


@lru_cache(maxsize=256)
def is_own_host(header: str) -> bool:
    """A Host header that may name this machine: an address that is not the internet's, or a name that no public DNS
    gives out. No Host at all comes from no browser."""
    host = strip_port(header.strip().lower())
    if host is None:
        return False
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        own = ("", "localhost", socket.gethostname().lower())
        return host.rstrip(".") in own or host.rstrip(".").endswith((".localhost", ".local", ".internal"))
    return address.is_loopback or address.is_private or address.is_unspecified or str(address) in local_addresses()


def strip_port(header: str) -> str | None:
    """The host of `host`, `host:port`, `[v6]:port`; None when it is none of them."""
    match = re.fullmatch(r"(\[[0-9a-z:.%]*\]|[^:\[\]/\\@\s]*)(?::\d{1,5})?", header)
    return match[1] if match else None


@lru_cache(maxsize=1)
def local_addresses() -> frozenset[str]:
    """The addresses of this machine's interfaces."""
    import psutil

    return frozenset(each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found)


def preflight(origin: str, headers: dict[bytes, bytes]) -> Response:
    """The answer to a browser that asks whether its page may ask."""
    asked = headers.get(b"access-control-request-headers", b"").decode("latin-1").lower()
    names = (name.strip() for name in asked.split(","))
    granted = HEADERS | {name for name in names if name.startswith(HEADER_FAMILIES)}
    allowed = {"allow": METHODS}
    if origin:
        allowed |= {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": ", ".join(sorted(granted)),
            "access-control-max-age": "600",
            "vary": "Origin",
        }
    return Response(status_code=204, headers=allowed)


def granting(send: Send, origin: str) -> Send:
    """`send`, with the grant to `origin` in the answer's headers."""
    grant = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]

    async def with_grant(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *grant]}
        await send(message)

    return with_grant
