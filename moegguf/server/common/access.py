"""Access control before any route: target, headers Host and Origin, API key, network,
and size of the headers.

The module is plain ASGI middleware for speed, since its time is part of the time to the
first token. A web page of another site can reach a server on loopback by DNS rebinding
(CVE-2024-28224) or by a cross-site POST. The Host and Origin headers reveal both.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from moegguf.server.common import limits
from moegguf.server.common.errors import BodyRefusedError, HttpError, error_response
from moegguf.serving.clients import BACKGROUND, current_client, current_owner, owner_of
from moegguf.settings import Network

# Ollama's default origins (envconfig/config.go). Hosts are allowed with any port.
ORIGINS = (
    *(
        f"{scheme}://{host}{port}"
        for scheme in ("http", "https")
        for host in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
        for port in ("", ":*")
    ),
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
)
# Paths that need no key: the page, Ollama's greeting and the health check.
OPEN_PATHS = ("/", "/health")
OPEN_PREFIX = "/page/"
# Matches names of headers that proxies, load balancers, CDNs and tunnels add to a
# request. Most of these names refer to the original client or request, or to a product.
FORWARDED = re.compile(
    rb"forward|proxy|(?:client|connecting|originating|real|remote|source|src|user)-?(?:addr|ip)"
    rb"|^via$|-via$|^x-amz(?:-cf|n-trace)-id$|^x-(?:rewrite-url|scheme)$"
    rb"|^(?:x-)?(?:akamai|appengine|arr|azure|cdn|cf|cloudfront|envoy|fastly|fly|goog-iap|l5d|nf|ngrok|original|pomerium"
    rb"|railway|tailscale|varnish|vercel)(?:-|$)"
)
# Lowest urgency in the header Priority (RFC 9218).
IN_BACKGROUND = re.compile(rb"(^|,)\s*u=7\s*(,|;|$)")
# Matches the target of a request if it is a whole URL, without its query.
URL = re.compile(rb"https?://([^/@]+)(/.*)?", re.IGNORECASE | re.DOTALL)
ALIASES = {
    **{
        path: f"/v1{path}"
        for path in (
            "/chat/completions", "/chat/completions/input_tokens", "/models", "/responses", "/responses/input_tokens",
        )
    },
    "/embedding": "/embeddings",
    "/v1/health": "/health",
}  # fmt: skip
"""{path that llama-server also accepts: path of the same endpoint here}"""
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS")


@dataclass
class AccessControl:
    """ASGI middleware that refuses requests that may not use this server. It reduces
    the targets of the other requests to paths.

    With `loopback`, the server accepts connections only from this machine, and every
    request is refused unless `is_own_host` accepts its Host header.

    If there are `api_keys` or `trusted` networks, a request must have a key or come
    directly from a trusted network. OPEN_PATHS, files of the page and OPTIONS requests
    are exempt. This machine is trusted if there are trusted networks. A forwarded
    request is never trusted, because all clients of a proxy have the proxy's address.

    A web page in the browser of a trusted machine can send requests that differ from
    the user's own only in the Host header. Therefore a trusted request without a key
    needs one of these hosts: a host that `is_own_host` accepts, a name without dots, or
    a host in `origins`.
    """

    app: ASGIApp
    loopback: bool
    origins: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    trusted: Sequence[Network] = ()

    def __post_init__(self) -> None:
        self._origins = origin_pattern((*ORIGINS, *self.origins))
        self._own_origins = origin_pattern(self.origins)
        self._cors = CORSMiddleware(
            self.app,
            allow_origin_regex=self._origins.pattern,
            allow_methods=METHODS,
            # A page may send any header: only its origin is checked.
            allow_headers=("*",),
            allow_private_network=True,
        )
        self._keys = [
            (
                (b"authorization", f"Bearer {key}".encode()),
                (b"x-api-key", key.encode()),
                owner_of(key),
            )
            for key in dict.fromkeys(self.api_keys)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        wrong = reduce_target(scope)
        # If a header is repeated, the first one is used.
        headers = dict(reversed(scope["headers"]))
        origin = headers.get(b"origin", b"").decode("latin-1")
        # Index of the key that was sent; all keys are compared, so that timing reveals
        # no key.
        key = None
        for number, (*forms, _) in enumerate(self._keys):
            for name, value in forms:
                if hmac.compare_digest(headers.get(name, b""), value):
                    key = number
        refusal = wrong or self._refusal(scope, headers, origin, key is not None)
        if refusal:
            return await error_response(refusal, scope["path"])(scope, receive, send)
        # Waiting clients take turns. A client is identified by its key and its address,
        # so two machines with one key have separate turns. A proxy's headers about its
        # clients are ignored, since anyone can write such headers.
        owner = "" if key is None else self._keys[key][-1]
        current_owner.set(owner)
        client = f"{owner} {scope['client'][0] if scope['client'] else ''}"
        current_client.set(
            BACKGROUND
            if IN_BACKGROUND.search(headers.get(b"priority", b""))
            else client
        )
        if len(self._keys) > 1:
            # Number of the key in the log, counted from 1.
            scope["key"] = None if key is None else key + 1
        await (self._cors if origin else self.app)(scope, receive, send)

    def _refusal(
        self, scope: Scope, headers: dict[bytes, bytes], origin: str, has_key: bool
    ) -> HttpError | None:
        # A proxy may use one of the two headers and this server the other. They would
        # then find different requests in the same bytes.
        if b"content-length" in headers and b"transfer-encoding" in headers:
            return BodyRefusedError(
                "a body must have a Content-Length or a Transfer-Encoding, but not both; leave one out",
                headers={"connection": "close"},
            )
        if (
            sum(len(name) + len(value) for name, value in scope["headers"])
            > limits.HEADER_BYTES
        ):
            return HttpError(
                f"request headers too large: at most {limits.HEADER_BYTES} bytes are accepted",
                431,
            )
        host, path = headers.get(b"host", b"").decode("latin-1"), scope["path"]
        if self.loopback and not is_own_host(host):
            return HttpError(
                f"the Host header {host[:100]!r} is not allowed; use an address of this machine",
                403,
            )
        # Origins of this server's page.
        own = (f"http://{host.lower()}", f"https://{host.lower()}") if host else ()
        if origin and origin.lower() not in own and not self._origins.fullmatch(origin):
            return HttpError(
                f"the Origin {origin[:100]!r} is not allowed; add it to MOEGGUF_ORIGINS to allow it",
                403,
            )
        is_open = (
            scope["method"] == "OPTIONS"
            or path in OPEN_PATHS
            or path.startswith(OPEN_PREFIX)
        )
        if is_open or has_key or not (self._keys or self.trusted):
            return None
        if self._is_trusted(scope["client"]) and not any(
            map(FORWARDED.search, headers)
        ):
            name = _strip_port(host.strip().lower())
            if (
                self._own_origins.fullmatch(f"http://{host}")
                or is_own_host(host)
                or (name is not None and "." not in name and ":" not in name)
            ):
                return None
            return HttpError(
                f"the Host header {host[:100]!r} is not allowed without a key; MOEGGUF_ORIGINS adds names",
                403,
            )
        if not self._keys:
            return HttpError(
                "the server accepts only requests that come directly from a trusted network (--trust-network); use"
                " such a network without a proxy",
                403,
            )
        return HttpError(
            "unauthorized: send the server's API key as a Bearer token or as x-api-key",
            401,
            "invalid_api_key",
        )

    def _is_trusted(self, client: tuple[str, int] | None) -> bool:
        if not client or not self.trusted:
            return False
        address = ipaddress.ip_address(client[0].partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or any(
            address in network for network in self.trusted
        )


def reduce_target(scope: Scope) -> HttpError | None:
    """Reduces a request's target to a path. The host in a whole URL replaces the Host
    header (RFC 9112, 3.2.2). Slashes at the end of a path other than "/" are removed,
    and an alias becomes the path of its endpoint. Returns the error for a target that
    is neither a path, a whole URL nor "*"."""
    if not scope["path"].startswith("/") and scope["path"] != "*":
        found = URL.fullmatch(scope["raw_path"])
        if found is None:
            given = scope["raw_path"][:80].decode("latin-1")
            return HttpError(
                f"the target of a request must be a path such as /api/version, or a whole URL, but is {given!r}"
            )
        others = [header for header in scope["headers"] if header[0] != b"host"]
        path = found[2] or b"/"
        headers = [*others, (b"host", found[1])]
        scope.update(
            raw_path=path, path=unquote(path.decode("latin-1")), headers=headers
        )
    root = scope.get("root_path", "")
    path = scope["path"].removeprefix(root).rstrip("/") or "/"
    scope["path"] = root + ALIASES.get(path, path)
    return None


def origin_pattern(origins: Sequence[str]) -> re.Pattern[str]:
    """Returns one regular expression for all `origins`, in which `*` stands for any
    text and `:*` for any port. The expression ignores case."""
    parts = (
        re.escape(origin.strip()).replace(r":\*", r":\d+").replace(r"\*", ".*")
        for origin in origins
    )
    return re.compile(f"(?i:{'|'.join(parts)})")


@lru_cache(maxsize=256)
def is_own_host(header: str) -> bool:
    """Returns True if a Host header may belong to this machine.

    Accepts this machine's addresses, all private addresses, this machine's name, and
    localhost. Also accepts names that end with .localhost, .local or .internal, which
    public DNS does not resolve. An empty or missing header is accepted, because the
    client cannot be a web page: browsers always send a host.
    """
    host = _strip_port(header.strip().lower())
    if host is None:
        return False
    try:
        address = ipaddress.ip_address(
            host.removeprefix("[").removesuffix("]").partition("%")[0]
        )
    except ValueError:
        own = ("", "localhost", socket.gethostname().lower())
        return host.rstrip(".") in own or host.rstrip(".").endswith(
            (".localhost", ".local", ".internal")
        )
    return (
        address.is_loopback
        or address.is_private
        or address.is_unspecified
        or str(address) in _local_addresses()
    )


def _strip_port(header: str) -> str | None:
    """Returns the host in `host`, `[v6]`, `host:port` or `[v6]:port`. Returns None for
    any other string, and for a string with capital letters."""
    match = re.fullmatch(r"(\[[0-9a-z:.%]*\]|[a-z0-9._-]*)(?::\d{1,5})?", header)
    return match[1] if match else None


@lru_cache(maxsize=1)
def _local_addresses() -> frozenset[str]:
    import psutil

    return frozenset(
        each.address.partition("%")[0]
        for found in psutil.net_if_addrs().values()
        for each in found
    )
