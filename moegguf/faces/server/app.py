"""The ASGI application: every route, one guard before them, one map of errors behind them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware

from moegguf.faces.server import (
    live,
    metrics,
    native,
    ollama_chat,
    ollama_create,
    ollama_embed,
    ollama_models,
    ollama_pull,
    ollama_show,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_models,
    page,
)
from moegguf.faces.server.errors import HANDLERS
from moegguf.faces.server.guard import Guard

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog
    from moegguf.serving.pool import Pool
    from moegguf.settings import Settings

OLLAMA = (ollama_chat, ollama_models, ollama_show, ollama_embed, ollama_pull, ollama_create)
OPENAI = (openai_chat, openai_completions, openai_embeddings, openai_models)
OURS = (native, metrics, live, page)


def make_app(pool: Pool, catalog: Catalog, settings: Settings) -> Starlette:
    """The application; the pool lives from its start to its end. Handlers find all three in `app.state`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with pool:
            yield

    app = Starlette(
        routes=[route for module in (*OLLAMA, *OPENAI, *OURS) for route in module.routes],
        middleware=[
            Middleware(Guard, loopback=settings.host.is_loopback, origins=settings.origins, api_key=settings.api_key)
        ],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.pool, app.state.catalog, app.state.settings = pool, catalog, settings
    app.state.totals = metrics.Totals()
    app.state.ending = threading.Event()  # set when the server is told to end: what has no end of its own ends
    return app
