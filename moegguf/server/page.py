"""`/`: the web page for browsers, a line of text for other clients; and the files of the page. No build step.

The page requests nothing but this server, which its content security policy enforces. Its data come from /api and
/live.
"""

from __future__ import annotations

import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).with_name("static")
GREETING = "Ollama is running"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",  # revalidated each time, by ETag
}
_QUALITY = re.compile(r";\s*q\s*=\s*([01](?:\.\d{0,3})?)\s*(?:;|$)", re.IGNORECASE)


def prefers_html(accept: str) -> bool:
    """Whether an Accept header prefers text/html to text/plain. `*/*` does not count as text/html."""
    quality: dict[str, float] = {}
    for part in accept.split(","):
        kind, _, rest = part.strip().partition(";")
        found = _QUALITY.search(f";{rest}")
        quality[kind.strip().lower()] = float(found[1]) if found else 1.0
    html = max(quality.get("text/html", 0.0), quality.get("application/xhtml+xml", 0.0))
    return html > 0 and html >= quality.get("text/plain", 0.0)


async def root(request: Request) -> Response:
    """The page for a browser; Ollama's greeting for other clients and for HEAD."""
    if request.method == "GET" and prefers_html(request.headers.get("accept", "")):
        return FileResponse(FOLDER / "index.html", headers={**HEADERS, "vary": "Accept"})
    return PlainTextResponse(GREETING, headers={"vary": "Accept", "x-content-type-options": "nosniff"})


class PageFiles(StaticFiles):
    """The files of the page, with HEADERS."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The response of StaticFiles, with HEADERS."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


routes = [Route("/", root), Mount("/page", PageFiles(directory=FOLDER))]
