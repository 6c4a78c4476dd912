"""GET /v1/models and /v1/models/{id}: the available models, with llama-server's `meta`.

An id has a tag and may contain slashes and colons, escaped or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.models.entry import ModelEntry
from moegguf.server.common.lookup import details_or_none, find

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

DEFAULT_OWNER = "library"  # as in Ollama, for names without a namespace


def model_object(entry: ModelEntry) -> dict[str, Any]:
    """OpenAI's model object, with metadata unless its file cannot be read."""
    *owners, _ = entry.name.split("/")
    return {
        "id": entry.name,
        "object": "model",
        "created": int(entry.modified.timestamp()),
        "owned_by": owners[-1] if owners else DEFAULT_OWNER,
        **_metadata(entry),
    }


def _metadata(entry: ModelEntry) -> Mapping[str, Any]:
    known = details_or_none(entry)
    if known is None:
        return {}
    meta = {
        "n_ctx_train": known.n_ctx_train,
        "n_embd": known.n_embd,
        "n_params": known.n_parameters,
        "n_expert": known.n_expert,
        "n_expert_used": known.n_expert_used,
        "size": entry.size_bytes,
    }
    return {"context_length": known.n_ctx_train, "meta": meta}


async def list_models(request: Request) -> Response:
    """All models of the catalog."""
    catalog: Catalog = request.app.state.catalog
    data = await asyncio.to_thread(lambda: [model_object(entry) for entry in catalog.entries()])
    return JSONResponse({"object": "list", "data": data})


async def retrieve_model(request: Request) -> Response:
    """One model. Raises HttpError 404."""
    catalog, name = request.app.state.catalog, request.path_params["model"]
    return JSONResponse(await asyncio.to_thread(lambda: model_object(find(catalog, name))))


routes = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
]
