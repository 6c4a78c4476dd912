"""The target of a request, before access checks and routes: the form that they know, whatever form a client sends."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from moegguf.server.common.errors import HttpError, error_response

URL = re.compile(rb"https?://([^/@]+)(/.*)?", re.IGNORECASE | re.DOTALL)  # the query was cut off before
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
"""llama-server's other paths of endpoints."""


def with_plain_target(app: ASGIApp) -> ASGIApp:
    """Middleware that makes a path of a target. Of a whole URL (RFC 9112, 3.2.2) the authority counts in place of the
    Host header, as the standard says. A slash at the end of a path means nothing, and an alias becomes its endpoint."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not scope["path"].startswith("/") and scope["path"] != "*":
                found = URL.fullmatch(scope["raw_path"])
                if found is None:
                    error = HttpError(400, "the target of a request is a path or a whole URL, such as /api/version")
                    return await error_response(error, "")(scope, receive, send)
                others = [header for header in scope["headers"] if header[0] != b"host"]
                path = found[2] or b"/"
                headers = [*others, (b"host", found[1])]
                scope.update(raw_path=path, path=unquote(path.decode("latin-1")), headers=headers)
            root = scope.get("root_path", "")
            path = scope["path"].removeprefix(root).rstrip("/") or "/"
            scope["path"] = root + ALIASES.get(path, path)
        await app(scope, receive, send)

    return handle
