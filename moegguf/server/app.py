"""The ASGI application: all routes, access checks before them, error handlers behind them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from moegguf.server import anthropic, live, llama_completion, llama_server, metrics, model_list, ollama, openai, page
from moegguf.server.common.access import AccessControl
from moegguf.server.common.body import Bodies
from moegguf.server.common.errors import HANDLERS
from moegguf.server.common.request_log import RequestLog
from moegguf.server.openai.in_process import InProcess, new_state
from moegguf.serving.batch.batches import Batches
from moegguf.settings import data_folder

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog
    from moegguf.serving.model_manager import ModelManager
    from moegguf.serving.ray.application import ReplicaManager
    from moegguf.serving.ray.config import ConfiguredCatalog
    from moegguf.settings import Settings

MODULES = (ollama, anthropic, openai, model_list, llama_server, llama_completion, metrics, live, page)


def make_app(
    manager: ModelManager | ReplicaManager,
    catalog: Catalog | ConfiguredCatalog,
    settings: Settings,
    routes: Sequence[BaseRoute] | None = None,
) -> Starlette:
    """The application, which enters `manager` at startup and exits it at shutdown. `routes`: by default all of them.
    `app.state` has the other arguments.

    Batches that a server before did not finish go on, where all routes are.
    """
    state = new_state(manager, catalog, settings.share_contexts)
    state.settings = settings
    state.ending = threading.Event()  # set at shutdown: ends endless streams
    state.batches = Batches(
        data_folder() / "batches",
        InProcess(state),
        max_bytes=settings.storage_bytes,
        n_parallel=settings.batch_parallel,
        window_s=settings.batch_window_s,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with manager, state.batches if routes is None else nullcontext():
            yield

    app = Starlette(
        routes=[route for module in MODULES for route in module.routes] if routes is None else routes,
        middleware=[
            Middleware(RequestLog),
            Middleware(
                AccessControl,
                loopback=settings.host.is_loopback,
                origins=settings.origins,
                api_keys=settings.api_keys,
                trusted=settings.trusted,
            ),
            Middleware(Bodies),
        ],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state = state
    return app
