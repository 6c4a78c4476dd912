"""/api/create and /api/blobs: a new name for a model, from another name or from uploaded files."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.errors import ModelFormatError
from moegguf.models.recipe import Recipe, left_out
from moegguf.server.common import limits
from moegguf.server.common.body import read_body, refuse_compressed
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import find
from moegguf.server.common.streams import Lines, NdjsonResponse, WholeResponse, json_line
from moegguf.server.ollama.schema import CreateRequest

CHUNK_BYTES = 1 << 20


async def create(request: Request) -> Response:
    """Creates the name; the statuses are Ollama's."""
    body = await read_body(request, CreateRequest)
    catalog = request.app.state.catalog
    recipe = recipe_of(body)

    def make() -> None:
        if recipe.from_:
            find(catalog, recipe.from_)
        try:
            catalog.create(body.model_name, recipe)
        except ModelFormatError as error:
            raise HttpError(400, str(error)) from None

    async def lines() -> Lines:
        await asyncio.to_thread(make)
        for digest in recipe.files.values():
            yield json_line({"status": f"using existing layer {digest}"})
        for sentence in left_out(recipe):
            yield json_line({"status": f"warning: {sentence}"})
        yield json_line({"status": "writing manifest"})
        yield json_line({"status": "success"})

    async def whole() -> dict[str, Any]:
        await asyncio.to_thread(make)
        warnings = left_out(recipe)
        return {"status": "success", **({"warnings": warnings} if warnings else {})}

    return WholeResponse(whole()) if body.stream is False else NdjsonResponse(lines())


def recipe_of(body: CreateRequest) -> Recipe:
    """The recipe of a body. Raises HttpError 400 for unsupported fields."""
    if not body.from_ and not body.files:
        raise HttpError(400, "neither 'from' or 'files' was specified")
    if body.adapters:
        raise HttpError(400, "adapters are not supported; use a model with the adapters merged")
    if body.quantize:
        raise HttpError(400, "quantize is not supported; use files that are already quantised")
    return Recipe(
        from_=body.from_ or "",
        files=body.files or {},
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
    refuse_compressed(request)
    length = request.headers.get("content-length", "")
    size_bytes = int(length) if length.isdecimal() and len(length) < 19 else None
    writer = await asyncio.to_thread(catalog.blobs.writer, digest, size_bytes)
    with writer:
        await _write(request, writer.write)
        try:
            await asyncio.to_thread(writer.commit)
        except ModelFormatError as error:
            raise HttpError(400, str(error)) from None
    return Response(status_code=201)


async def _write(request: Request, write: Any) -> None:
    """Writes the body in large parts, off the event loop. Raises HttpError when the client disconnects or stalls."""
    parts, size_bytes = [], 0
    try:
        async with asyncio.timeout(limits.READ_S) as timeout:
            async for part in request.stream():
                timeout.reschedule(asyncio.get_running_loop().time() + limits.READ_S)
                parts.append(part)
                size_bytes += len(part)
                if size_bytes >= CHUNK_BYTES or not part:
                    await asyncio.to_thread(write, b"".join(parts))
                    parts, size_bytes = [], 0
    except TimeoutError:
        raise HttpError(408, f"no data of the blob arrived for {limits.READ_S:.0f} s") from None
    except ClientDisconnect:
        raise HttpError(499, "request canceled") from None


routes = [
    Route("/api/create", create, methods=["POST"]),
    Route("/api/blobs/{digest:path}", has_blob, methods=["HEAD"]),
    Route("/api/blobs/{digest:path}", add_blob, methods=["POST"]),
]
