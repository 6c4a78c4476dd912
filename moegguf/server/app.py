"""The ASGI application: every route, one guard before them, one map of errors behind them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware

from moegguf.server import live, llama_server, metrics, ollama, openai, page
from moegguf.server.common.errors import HANDLERS
from moegguf.server.common.guard import Guard

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog
    from moegguf.serving.manager import ModelManager
    from moegguf.settings import Settings

OURS = (llama_server, metrics, live, page)


def make_app(manager: ModelManager, catalog: Catalog, settings: Settings) -> Starlette:
    """The application; the pool lives from its start to its end. Handlers find all three in `app.state`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with manager:
            yield

    app = Starlette(
        routes=[*ollama.routes, *openai.routes, *(route for module in OURS for route in module.routes)],
        middleware=[
            Middleware(Guard, loopback=settings.host.is_loopback, origins=settings.origins, api_key=settings.api_key)
        ],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.manager, app.state.catalog, app.state.settings = manager, catalog, settings
    app.state.totals = metrics.Totals()
    app.state.ending = threading.Event()  # set when the server is told to end: what has no end of its own ends
    return app
