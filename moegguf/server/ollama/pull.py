"""/api/pull: fetches a model and tells how far it is; a client that leaves stops the download, unless others wait."""

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
from moegguf.server.common.streams import Lines, NdjsonResponse, WholeResponse, dumps
from moegguf.server.ollama.schema import PullRequest

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

SUCCESS = "success"


async def pull(request: Request) -> Response:
    """Fetches a model; the last line, or the only object, says `success`."""
    body = await read_body(request, PullRequest)
    catalog = request.app.state.catalog

    async def lines() -> Lines:
        async with aclosing(statuses(body.model_name, catalog)) as found:
            async for status in found:
                if status.status != SUCCESS:
                    yield dumps(status_object(status)).encode() + b"\n"
        yield dumps({"status": SUCCESS}).encode() + b"\n"

    async def whole() -> dict[str, Any]:
        async with aclosing(statuses(body.model_name, catalog)) as found:
            async for _ in found:
                pass
        return {"status": SUCCESS}

    return WholeResponse(whole()) if body.stream is False else NdjsonResponse(lines())


async def statuses(name: str, catalog: Catalog) -> AsyncGenerator[PullStatus, None]:
    """The steps of fetching `name`, on a thread of its own, which does not keep the process. Raises what `pull` does.

    Closing it stops the download; what has arrived stays.
    """
    loop, cancelled = asyncio.get_running_loop(), threading.Event()
    news: asyncio.Queue[PullStatus | BaseException | None] = asyncio.Queue()

    def tell(item: PullStatus | BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(news.put_nowait, item)

    def work() -> None:
        try:
            fetch(name, catalog, tell, cancelled)
        except BaseException as error:  # raised again by those who wait
            tell(error)
        else:
            tell(None)

    threading.Thread(target=work, name="moegguf-pull", daemon=True).start()
    try:
        while (item := await news.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        cancelled.set()


def status_object(status: PullStatus) -> dict[str, Any]:
    """A step in Ollama's words; `completed` is absent until bytes have come."""
    found: dict[str, Any] = {"status": status.status}
    if status.digest or status.file:
        found |= {"digest": status.digest, "total": status.total_bytes}
    if status.file:
        found["file"] = status.file
    if status.completed_bytes is not None:
        found["completed"] = status.completed_bytes
    return found


routes = [Route("/api/pull", pull, methods=["POST"])]
