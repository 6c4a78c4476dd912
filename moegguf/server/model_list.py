"""GET /v1/models and /v1/models/{id}: the available models as OpenAI describes them, with llama-server's `meta`, and as
Anthropic does for its clients, which send a header.

An id has a tag and may contain slashes and colons, escaped or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry
from moegguf.server.common.errors import MODELS_PATH, lists_for_anthropic
from moegguf.server.common.lookup import details_or_none, find
from moegguf.server.common.objects import page

DEFAULT_OWNER = "library"  # as in Ollama, for names without a namespace
DEFAULT_LISTED, MAX_LISTED = 20, 1000  # for Anthropic's clients

Describe = Callable[[ModelEntry], dict[str, Any]]


def openai_object(entry: ModelEntry) -> dict[str, Any]:
    """OpenAI's model object, with metadata unless its file cannot be read."""
    *owners, _ = entry.name.split("/")
    found = {
        "id": entry.name,
        "object": "model",
        "created": int(entry.modified.timestamp()),
        "owned_by": owners[-1] if owners else DEFAULT_OWNER,
    }
    known = details_or_none(entry)
    if known is None:
        return found
    meta = {
        "n_ctx_train": known.n_ctx_train,
        "n_embd": known.n_embd,
        "n_params": known.n_parameters,
        "n_expert": known.n_expert,
        "n_expert_used": known.n_expert_used,
        "size": entry.size_bytes,
    }
    return {**found, "context_length": known.n_ctx_train, "meta": meta}


def anthropic_object(entry: ModelEntry) -> dict[str, Any]:
    """Anthropic's model object, with the context's length unless the file cannot be read."""
    known = details_or_none(entry)
    return {
        "type": "model",
        "id": entry.name,
        "display_name": entry.name,
        "created_at": entry.modified.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": known.n_ctx_train if known else None,
        "max_tokens": known.n_ctx_train if known else None,
    }


async def list_models(request: Request) -> Response:
    """All models of the catalog, newest first; for Anthropic's clients a page of them: `limit` after `after_id`, or
    before `before_id`."""
    catalog: Catalog = request.app.state.catalog
    is_anthropic = lists_for_anthropic(request)
    describe: Describe = anthropic_object if is_anthropic else openai_object
    models = await asyncio.to_thread(lambda: list(map(describe, catalog.entries())))
    if not is_anthropic:
        return JSONResponse({"object": "list", "data": models})
    found = page(request, models, MAX_LISTED, DEFAULT_LISTED, "_id")
    return JSONResponse({name: found[name] for name in ("data", "has_more", "first_id", "last_id")})


async def retrieve_model(request: Request) -> Response:
    """One model, by any of its names. Raises HttpError 404."""
    catalog, name = request.app.state.catalog, request.path_params["model"]
    describe: Describe = anthropic_object if lists_for_anthropic(request) else openai_object
    return JSONResponse(await asyncio.to_thread(lambda: describe(find(catalog, name))))


routes = [
    Route(MODELS_PATH, list_models, methods=["GET"]),
    Route(f"{MODELS_PATH}/{{model:path}}", retrieve_model, methods=["GET"]),
]
