"""The APIs in front of Ray Serve's replicas (`moegguf.serving.ray`): what `moegguf serve` offers, without what changes
models, which the config file does, and without metrics and the live map, which are a replica's.
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from moegguf.server import anthropic, llama_server, model_list, ollama, openai, page
from moegguf.server.app import make_app
from moegguf.server.common.errors import HttpError
from moegguf.settings import read_settings

if TYPE_CHECKING:
    from moegguf.serving.ray.application import ReplicaManager
    from moegguf.serving.ray.config import ConfiguredCatalog

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
CHANGES = ("/api/pull", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{digest:path}")
BATCHES = (
    "/v1/files", "/v1/files/{file}", "/v1/files/{file}/content",
    "/v1/batches", "/v1/batches/{batch}", "/v1/batches/{batch}/cancel",
)  # fmt: skip
INSTEAD = {
    **dict.fromkeys(
        BATCHES, "files would lie on one of the machines; `moegguf batch` sends the lines of a file to a server"
    ),
    **dict.fromkeys(CHANGES, "models are those of the config file; change it, then `serve deploy` it"),
    "/metrics": "metrics are exported by Ray, on each of its nodes; scrape these (docs/deployment.md)",
    "/live": "replicas send no snapshots of their experts; `moegguf serve` does",
}


def make_http(manager: ReplicaManager, catalog: ConfiguredCatalog) -> Starlette:
    """The application. Without an API key or trusted networks in the environment only this machine may use it: which
    address Ray's proxy listens on is Ray's matter. Raises OptionError for values in the environment."""
    settings = read_settings()
    settings = replace(settings, host=replace(settings.host, host="0.0.0.0"))
    if not settings.api_keys and not settings.trusted:
        settings = replace(settings, host=replace(settings.host, host="127.0.0.1"), trusted=LOOPBACK)
    return make_app(manager, catalog, settings, routes())


def routes() -> list[BaseRoute]:
    """The routes: those of the APIs, and an error for each path that only `moegguf serve` has."""
    offered = [route for module in (ollama, anthropic, openai, model_list, llama_server) for route in module.routes]
    kept = [route for route in offered if route.path not in INSTEAD]
    refused = [Route(path, refuse, methods=["GET", "POST", "DELETE", "HEAD"]) for path in INSTEAD]
    return [*kept, *refused, Route("/", greet)]


async def refuse(request: Request) -> Response:
    """Raises HttpError 501 that names what does it instead."""
    path = next(path for path in INSTEAD if request.url.path.startswith(path.partition("{")[0]))
    raise HttpError(501, INSTEAD[path])


async def greet(request: Request) -> Response:
    """Ollama's greeting, for clients that look whether a server runs."""
    return PlainTextResponse(page.GREETING)
