"""Serves `/` (the web page for browsers, a line of text for other clients) and the
files of the page, which need no build step.

The content security policy lets the page load resources only from this server, and
pictures also from data URLs. It stops the page's scripts from parsing text as HTML. The
page gets its data from /api, /live, /budget, /props and /pdf-text.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).with_name("static")
GREETING = "Ollama is running"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # A browser checks each time, by ETag, whether its copy is current.
    "cache-control": "no-cache",
}

# Python's own table has this type only since version 3.14.
mimetypes.add_type("font/woff2", ".woff2")


async def root(request: HttpRequest) -> Response:
    """Replies with the page to a browser, and with Ollama's greeting to other clients
    and to HEAD requests."""
    if (
        request.method == "GET"
        and "text/html" in request.headers.get("accept", "").lower()
    ):
        return FileResponse(
            FOLDER / "index.html", headers={**HEADERS, "vary": "Accept"}
        )
    return PlainTextResponse(
        GREETING, headers={"vary": "Accept", "x-content-type-options": "nosniff"}
    )


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


routes = [Route("/", root), Mount("/page", _PageFiles(directory=FOLDER))]
