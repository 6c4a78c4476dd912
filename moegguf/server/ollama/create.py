"""/api/pull: downloads a model; a disconnect stops that, unless others wait for it. /api/create and /api/blobs: a new
name for a model, from another name or from uploaded files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.errors import ModelFormatError
from moegguf.models.catalog import Catalog
from moegguf.models.entry import PullStatus
from moegguf.models.pull import pull as fetch
from moegguf.models.recipe import Recipe, left_out
from moegguf.server.common.body import chunks, read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import find
from moegguf.server.common.streams import LineResponse, Lines, WholeResponse, json_line
from moegguf.server.ollama.schema import CreateRequest, PullRequest

CHUNK_BYTES = 1 << 20
SUCCESS = "success"


def told(body: PullRequest | CreateRequest, statuses: AsyncGenerator[dict[str, Any]]) -> Response:
    """The statuses, a line each; without `stream` the last one alone, which is `success`."""

    async def lines() -> Lines:
        async with aclosing(statuses):
            async for status in statuses:
                yield json_line(status)

    async def last() -> dict[str, Any]:
        async with aclosing(statuses):
            return [status async for status in statuses][-1]

    return WholeResponse(last()) if body.stream is False else LineResponse(lines())


async def pull(request: Request) -> Response:
    """Downloads a model."""
    body = await read_body(request, PullRequest)
    return told(body, pulling(body.model, request.app.state.catalog))


async def pulling(name: str, catalog: Catalog) -> AsyncGenerator[dict[str, Any]]:
    """The progress of a download, which runs on a daemon thread. Raises what `moegguf.models.pull.pull` raises. Closing
    it stops the download; the received part is kept."""
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
            if item.status != SUCCESS:  # which is said when all has ended
                yield status_object(item)
        yield {"status": SUCCESS}
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


async def create(request: Request) -> Response:
    """Creates the name; the statuses are Ollama's."""
    body = await read_body(request, CreateRequest)
    return told(body, creating(body, recipe_of(body), request.app.state.catalog))


async def creating(body: CreateRequest, recipe: Recipe, catalog: Catalog) -> AsyncGenerator[dict[str, Any]]:
    """The steps. Raises HttpError 400, 404."""

    def make() -> None:
        if recipe.from_:
            find(catalog, recipe.from_)
        try:
            catalog.create(body.model, recipe)
        except ModelFormatError as error:
            raise HttpError(400, str(error)) from None

    await asyncio.to_thread(make)
    for digest in (*recipe.files.values(), *recipe.adapters.values()):
        yield {"status": f"using existing layer {digest}"}
    warnings = left_out(recipe)
    for sentence in warnings:
        yield {"status": f"warning: {sentence}"}
    yield {"status": "writing manifest"}
    yield {"status": SUCCESS, **({"warnings": warnings} if warnings and body.stream is False else {})}


def recipe_of(body: CreateRequest) -> Recipe:
    """The recipe of a body. Raises HttpError 400 for unsupported fields."""
    if not body.from_ and not body.files:
        raise HttpError(400, "neither 'from' or 'files' was specified")
    if body.quantize:
        raise HttpError(400, "quantize is not supported; use files that are already quantised")
    return Recipe(
        from_=body.from_ or "",
        files=body.files or {},
        adapters=body.adapters or {},
        system=body.system,
        template=body.template,
        parameters=body.parameters or {},
        messages=tuple({"role": each.role, "content": each.content or ""} for each in body.messages or ()),
        license="\n".join(body.license) if isinstance(body.license, list) else body.license,
    )


async def has_blob(request: Request) -> Response:
    """200 if the blob with this digest exists. Raises HttpError 404."""
    digest = request.path_params["digest"]
    found = await asyncio.to_thread(request.app.state.catalog.blobs.has, digest)
    if not found:
        raise HttpError(404, f"blob {digest!r:.80} not found")
    return Response()


async def add_blob(request: Request) -> Response:
    """Stores the body under its digest: 201, or 200 if it exists."""
    digest, catalog = request.path_params["digest"], request.app.state.catalog
    if await asyncio.to_thread(catalog.blobs.has, digest):
        return Response()
    length = request.headers.get("content-length", "")
    size_bytes = int(length) if length.isdecimal() and len(length) < 19 else None
    writer = await asyncio.to_thread(catalog.blobs.writer, digest, size_bytes)
    with writer:
        parts, n_bytes = [], 0
        async for part in chunks(request):  # written in large parts, off the event loop
            parts.append(part)
            n_bytes += len(part)
            if n_bytes >= CHUNK_BYTES or not part:
                await asyncio.to_thread(writer.write, b"".join(parts))
                parts, n_bytes = [], 0
        try:
            await asyncio.to_thread(writer.commit)
        except ModelFormatError as error:
            raise HttpError(400, str(error)) from None
    return Response(status_code=201)


routes = [
    Route("/api/pull", pull, methods=["POST"]),
    Route("/api/create", create, methods=["POST"]),
    Route("/api/blobs/{digest:path}", has_blob, methods=["HEAD"]),
    Route("/api/blobs/{digest:path}", add_blob, methods=["POST"]),
]
