"""Reduces the target of an HTTP request (a path or a whole URL) to a path, before
access checks and routing."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from moegguf.server.common.errors import HttpError, error_response

# Matches a target without its query.
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


def with_plain_target(app: ASGIApp) -> ASGIApp:
    """Middleware that reduces a request's target to a path. The host in a whole URL
    replaces the Host header (RFC 9112, 3.2.2). Slashes at the end of a path other than
    "/" are removed, and an alias becomes the path of its endpoint. A target that is
    neither a path, a whole URL nor "*" gets a reply with status 400."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not scope["path"].startswith("/") and scope["path"] != "*":
                found = URL.fullmatch(scope["raw_path"])
                if found is None:
                    given = scope["raw_path"][:80].decode("latin-1")
                    error = HttpError(
                        f"the target of a request must be a path such as /api/version, or a whole URL, but is {given!r}"
                    )
                    return await error_response(error, "")(scope, receive, send)
                others = [header for header in scope["headers"] if header[0] != b"host"]
                path = found[2] or b"/"
                headers = [*others, (b"host", found[1])]
                scope.update(
                    raw_path=path, path=unquote(path.decode("latin-1")), headers=headers
                )
            root = scope.get("root_path", "")
            path = scope["path"].removeprefix(root).rstrip("/") or "/"
            scope["path"] = root + ALIASES.get(path, path)
        await app(scope, receive, send)

    return handle
