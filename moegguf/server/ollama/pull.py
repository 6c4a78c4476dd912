"""/api/pull: downloads a model and reports progress; a disconnect stops the download, unless others wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.models.entry import PullStatus
from moegguf.models.pull import pull as fetch
from moegguf.server.common.body import read_body
from moegguf.server.common.streams import Lines, NdjsonResponse, WholeResponse, json_line
from moegguf.server.ollama.schema import PullRequest

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

SUCCESS = "success"


async def pull(request: Request) -> Response:
    """Downloads a model; the last line, or the only object, has the status `success`."""
    body = await read_body(request, PullRequest)
    catalog = request.app.state.catalog

    async def lines() -> Lines:
        async with aclosing(statuses(body.model_name, catalog)) as found:
            async for status in found:
                if status.status != SUCCESS:
                    yield json_line(status_object(status))
        yield json_line({"status": SUCCESS})

    async def whole() -> dict[str, Any]:
        async with aclosing(statuses(body.model_name, catalog)) as found:
            async for _ in found:
                pass
        return {"status": SUCCESS}

    return WholeResponse(whole()) if body.stream is False else NdjsonResponse(lines())


async def statuses(name: str, catalog: Catalog) -> AsyncGenerator[PullStatus, None]:
    """The progress of a download, which runs on a daemon thread. Raises what `moegguf.models.pull.pull` raises.

    Closing it stops the download; the received part is kept.
    """
    loop, cancelled = asyncio.get_running_loop(), threading.Event()
    items: asyncio.Queue[PullStatus | BaseException | None] = asyncio.Queue()

    def put(item: PullStatus | BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(items.put_nowait, item)

    def work() -> None:
        try:
            fetch(name, catalog, put, cancelled)
        except BaseException as error:  # raised again by the consumer
            put(error)
        else:
            put(None)

    threading.Thread(target=work, name="moegguf-pull", daemon=True).start()
    try:
        while (item := await items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        cancelled.set()


def status_object(status: PullStatus) -> dict[str, Any]:
    """A status as Ollama writes it; `completed` is absent before the first bytes."""
    found: dict[str, Any] = {"status": status.status}
    if status.digest or status.file:
        found |= {"digest": status.digest, "total": status.total_bytes}
    if status.file:
        found["file"] = status.file
    if status.completed_bytes is not None:
        found["completed"] = status.completed_bytes
    return found


routes = [Route("/api/pull", pull, methods=["POST"])]
