"""GET /v1/models and /v1/models/{id}: the available models in OpenAI's format, with
llama-server's `meta`.

A client that sends Anthropic's header gets Anthropic's format. An id in the list is a
name with a tag. In a path, the id may contain slashes and colons, escaped or not. The
reply about one model repeats the id in the request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.models.entry import ModelEntry
from moegguf.server.common.errors import MODELS_PATH, lists_for_anthropic
from moegguf.server.common.options import details_or_none, find
from moegguf.server.common.replies import page

DEFAULT_OWNER = "library"  # owner of a model whose name has no namespace, as in Ollama
# Default and maximum number of models on one page in Anthropic's API.
DEFAULT_LISTED, MAX_LISTED = 20, 1000


def _described(entry: ModelEntry, is_anthropic: bool) -> dict[str, Any]:
    """Returns a model in Anthropic's or OpenAI's format. If the model's file cannot be
    read, facts from the file are None in Anthropic's format and absent in OpenAI's."""
    known = details_or_none(entry)
    if is_anthropic:
        return {
            "type": "model",
            "id": entry.name,
            "display_name": entry.name,
            "created_at": entry.modified.isoformat(),
            "lifecycle": "active",
            "max_input_tokens": known.n_ctx_train if known else None,
            "max_tokens": known.n_ctx_train if known else None,
        }
    *owners, _ = entry.name.split("/")
    found: dict[str, Any] = {
        "id": entry.name,
        "object": "model",
        "created": int(entry.modified.timestamp()),
        "owned_by": owners[-1] if owners else DEFAULT_OWNER,
    }
    if known:
        meta = {
            "n_ctx_train": known.n_ctx_train,
            "n_embd": known.n_embd,
            "n_params": known.n_parameters,
            "n_expert": known.n_expert,
            "n_expert_used": known.n_expert_used,
            "size": entry.size_bytes,
        }
        found |= {"context_length": known.n_ctx_train, "meta": meta}
    return found


def _list_models(request: HttpRequest) -> Response:
    """Replies with all models of the catalog, newest first. Clients of Anthropic's API
    get one page: at most `limit` models after `after_id` or before `before_id`.
    Starlette calls this function on a thread."""
    catalog, is_anthropic = request.app.state.catalog, lists_for_anthropic(request)
    models = [_described(entry, is_anthropic) for entry in catalog.entries()]
    if not is_anthropic:
        return JSONResponse({"object": "list", "data": models})
    found = page(request, models, MAX_LISTED, DEFAULT_LISTED, "_id")
    return JSONResponse(
        {name: found[name] for name in ("data", "has_more", "first_id", "last_id")}
    )


def _retrieve_model(request: HttpRequest) -> Response:  # called on a thread
    name = request.path_params["model"]
    entry = replace(find(request.app.state.catalog, name), name=name)
    return JSONResponse(_described(entry, lists_for_anthropic(request)))


routes = [
    Route(MODELS_PATH, _list_models),
    Route(f"{MODELS_PATH}/{{model:path}}", _retrieve_model),
]
