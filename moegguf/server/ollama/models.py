"""/api/version, tags, ps, copy and delete; and push, which is not supported."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.models.entry import ModelEntry
from moegguf.package import __version__
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import details_or_none, find
from moegguf.server.common.objects import moe_object
from moegguf.server.ollama.objects import details_object, time_text
from moegguf.server.ollama.schema import CopyRequest, ModelBody
from moegguf.serving.events import LoadedModel, LoadedName

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

OLLAMA_VERSION = "0.33.0"  # of the API; clients parse it as numbers and refuse old ones


async def version(request: Request) -> Response:
    """The version of Ollama's API, and of moegguf."""
    return JSONResponse({"version": OLLAMA_VERSION, "moegguf": __version__})


async def tags(request: Request) -> Response:
    """All models, newest first."""
    catalog: Catalog = request.app.state.catalog
    return JSONResponse({"models": await asyncio.to_thread(lambda: [tag_object(each) for each in catalog.entries()])})


def tag_object(entry: ModelEntry) -> dict[str, Any]:
    """An entry of the list; with empty details when its file cannot be read."""
    known = details_or_none(entry)
    more = {"context_length": known.n_ctx_train, "embedding_length": known.n_embd} if known else {}
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": time_text(entry.modified),
        "size": entry.size_bytes,
        "digest": entry.digest,
        "details": details_object(known, entry.parent) | more,
        "capabilities": list(known.capabilities) if known else [],
        **({"missing": [str(path) for path in entry.missing]} if entry.missing else {}),
    }


async def ps(request: Request) -> Response:
    """Names of the models in memory, latest expiry first."""
    state = request.app.state

    def found(loaded: list[LoadedModel]) -> list[dict[str, Any]]:
        return [loaded_object(state.catalog, model, name) for model in loaded for name in model.names]

    return JSONResponse({"models": await asyncio.to_thread(found, state.manager.loaded())})


def loaded_object(catalog: Catalog, model: LoadedModel, loaded: LoadedName) -> dict[str, Any]:
    """A name of a model in memory; `size`: the model's memory in bytes, `size_vram`: the part of it on GPUs. Names with
    the same `pid` share them."""
    try:
        entry = find(catalog, loaded.name)
    except HttpError:  # removed while loaded
        entry = None
    known = details_or_none(entry) if entry else None
    return {
        "name": loaded.name,
        "model": loaded.name,
        "size": model.size_bytes,
        "digest": loaded.digest,
        "details": details_object(known, entry.parent if entry else ""),
        "expires_at": time_text(loaded.expires),
        "size_vram": model.vram_bytes,
        "context_length": model.n_ctx,
        "moe": moe_object(model.stats)
        | {"pid": model.pid, "busy": model.busy, "stopping": model.stopping, "queue": model.queue},
    }


async def copy(request: Request) -> Response:
    """Adds a name for a model; no file is copied."""
    body = await read_body(request, CopyRequest)
    catalog = request.app.state.catalog

    def work() -> None:
        find(catalog, body.source)
        catalog.copy(body.source, body.destination)

    await asyncio.to_thread(work)
    return Response()


async def delete(request: Request) -> Response:
    """Unloads a model, then removes its name."""
    body = await read_body(request, ModelBody)
    state = request.app.state
    entry = await asyncio.to_thread(find, state.catalog, body.model_name, even_missing=True)
    await state.manager.unload(entry.name)
    await asyncio.to_thread(state.catalog.remove, entry.name)
    return Response()


async def unsupported(request: Request) -> Response:
    """Raises HttpError 501: an operation that needs ollama.com."""
    raise HttpError(501, f"{request.url.path.rpartition('/')[2]} is not supported")


routes = [
    Route("/api/version", version, methods=["GET"]),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/copy", copy, methods=["POST"]),
    Route("/api/delete", delete, methods=["DELETE"]),
    Route("/api/push", unsupported, methods=["POST"]),
]
