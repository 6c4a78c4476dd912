"""The ASGI application: all routes, access checks before them, error handlers behind them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware

from moegguf.server import anthropic, budget, live, llama_server, metrics, ollama, openai, page
from moegguf.server.common.access import AccessControl
from moegguf.server.common.body import Bodies
from moegguf.server.common.errors import HANDLERS

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog
    from moegguf.serving.manager import ModelManager
    from moegguf.settings import Settings

MODULES = (ollama, openai, anthropic, llama_server, metrics, live, budget, page)


def make_app(manager: ModelManager, catalog: Catalog, settings: Settings) -> Starlette:
    """The application, which enters `manager` at startup and exits it at shutdown. `app.state` has all arguments."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with manager:
            yield

    app = Starlette(
        routes=[route for module in MODULES for route in module.routes],
        middleware=[
            Middleware(
                AccessControl,
                loopback=settings.host.is_loopback,
                origins=settings.origins,
                api_key=settings.api_key,
                trusted=settings.trusted,
            ),
            Middleware(Bodies),
        ],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.manager, app.state.catalog, app.state.settings = manager, catalog, settings
    app.state.totals = metrics.Totals()
    app.state.ending = threading.Event()  # set at shutdown: ends endless streams
    return app
