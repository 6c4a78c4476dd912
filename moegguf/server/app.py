"""The ASGI application: all routes, the access checks before them, the error handlers,
and a log of requests.

In front of Ray Serve's replicas (`moegguf.serving.ray`) some endpoints are missing,
such as endpoints that change models. The paths in `INSTEAD` then reply with status 501
and with advice.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moegguf.server import (
    anthropic,
    batches,
    embeddings,
    live,
    llama_server,
    metrics,
    model_list,
    ollama,
    openai,
    page,
    pdf,
)
from moegguf.server.common.access import AccessControl
from moegguf.server.common.body import Bodies
from moegguf.server.common.errors import HANDLERS, HttpError
from moegguf.server.common.replies import present
from moegguf.serving.batch.batches import Batches
from moegguf.serving.responses import ResponseStore
from moegguf.settings import data_folder, read_settings

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog
    from moegguf.serving.model_manager import ModelManager
    from moegguf.serving.ray.application import ReplicaManager
    from moegguf.serving.ray.config import ConfiguredCatalog
    from moegguf.settings import Settings

log = logging.getLogger(__name__)

APIS = (ollama, anthropic, openai, batches, embeddings, model_list, llama_server)
MODULES = (*APIS, metrics, live, page, pdf)

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
CHANGES = (
    "/api/pull",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/blobs/{digest:path}",
)
FILES = "files would lie on one of the machines; `moegguf batch` sends the lines of a file to a server"
INSTEAD = {  # {path that is missing in front of Ray: what to do instead}
    **dict.fromkeys((route.path for route in batches.routes), FILES),
    "/slots/{slot}": "each replica has slots of its own; computed contexts are kept on the disk of each",
    "/v1/responses/{response}": "responses are not stored; send the whole conversation as input",
    **dict.fromkeys(
        CHANGES,
        "Ray's config file lists the models; change this file, and deploy it again with `serve deploy`",
    ),
    "/metrics": "metrics are exported by Ray, on each of its nodes; scrape these (docs/deployment.md)",
    "/live": "replicas send no snapshots of their experts; `moegguf serve` does",
}


def request_log(app: ASGIApp) -> ASGIApp:
    """Middleware that logs each HTTP request when its response has ended: client,
    number of the key (if there are several keys), method, path, status, seconds and
    bytes."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            return await app(scope, receive, send)
        start_s, status, n_bytes = time.perf_counter(), 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, n_bytes
            status = message.get("status", status)
            n_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, counted)
        except Exception:
            # Starlette sends this reply, outside of this middleware.
            status = status or 500
            raise
        finally:
            key = present(key=scope.get("key"))
            request = {
                "client": scope["client"][0] if scope["client"] else "-",
                **key,
                "method": scope["method"],
                "path": scope["path"],
                # 0: no status was sent here, for example because the client
                # disconnected.
                "status": status,
                "seconds": round(time.perf_counter() - start_s, 3),
                "bytes": n_bytes,
            }
            who = "%(client)s key %(key)d" if key else "%(client)s"
            text = (
                f"{who} %(method)s %(path)s %(status)d %(seconds).3fs %(bytes)d bytes"
            )
            log.info(text, request, extra={"request": request})

    return logged


def make_app(
    manager: ModelManager | ReplicaManager,
    catalog: Catalog | ConfiguredCatalog,
    settings: Settings,
    routes: Sequence[BaseRoute] | None = None,
) -> Starlette:
    """Returns the application, which enters `manager` at startup and exits it at
    shutdown.

    Without `routes`, the application has all routes and a store of responses, and
    continues batches that an earlier server did not finish. `app.state` holds the other
    arguments.
    """
    state = batches.new_state(manager, catalog, settings)
    # Set by the server when it shuts down, so that endless streams end.
    state.ending = threading.Event()
    state.batches = Batches(
        data_folder() / "batches",
        partial(batches.reply_in_process, state),
        max_bytes=settings.storage_bytes,
        n_parallel=settings.batch_parallel,
        window_s=settings.batch_window_s,
    )

    if routes is not None:
        # Not supported: scales set in this process would not reach the replicas.
        state.lora_scales = None
    else:
        state.responses = ResponseStore(
            data_folder() / "responses", settings.responses_age_s
        )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if routes is not None:
            async with manager:
                yield
            return
        await asyncio.to_thread(state.responses.start)
        with closing(state.responses):
            async with manager, state.batches:
                yield

    app = Starlette(
        routes=[route for module in MODULES for route in module.routes]
        if routes is None
        else routes,
        middleware=[
            Middleware(request_log),
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


def make_http(manager: ReplicaManager, catalog: ConfiguredCatalog) -> Starlette:
    """Returns the application for Ray. Ray chooses the address on which its proxy
    listens. Therefore only this machine may use the application unless the environment
    sets an API key or trusted networks. Raises OptionError for invalid values in the
    environment."""
    settings = read_settings()
    settings = replace(settings, host=replace(settings.host, host="0.0.0.0"))
    if not settings.api_keys and not settings.trusted:
        settings = replace(
            settings, host=replace(settings.host, host="127.0.0.1"), trusted=LOOPBACK
        )
    kept = [
        route for module in APIS for route in module.routes if route.path not in INSTEAD
    ]
    refused = [
        Route(path, _refuse, methods=["GET", "POST", "DELETE", "HEAD"])
        for path in INSTEAD
    ]
    return make_app(manager, catalog, settings, [*kept, *refused, Route("/", _greet)])


async def _refuse(request: HttpRequest) -> Response:
    path = next(
        path for path in INSTEAD if request.url.path.startswith(path.partition("{")[0])
    )
    raise HttpError(INSTEAD[path], 501)


async def _greet(request: HttpRequest) -> Response:
    # Ollama clients expect this text from a running server.
    return PlainTextResponse(page.GREETING)
