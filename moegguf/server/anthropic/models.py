"""GET /v1/models and /v1/models/{id} for Anthropic's clients, which OpenAI's share: told apart by a header."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from moegguf.models.entry import ModelEntry
from moegguf.server.common.errors import ANTHROPIC_PATH, ERRORS_AS
from moegguf.server.common.lists import page
from moegguf.server.common.lookup import details_or_none, find

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

VERSION_HEADER = b"anthropic-version"
DEFAULT_LISTED, MAX_LISTED = 20, 1000


class AnthropicRoute(Route):
    """A route for requests with the header `anthropic-version`, which all of Anthropic's clients send. Errors have
    Anthropic's form: the path alone says OpenAI's."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Route's; no match without the header."""
        if scope["type"] != "http" or all(name != VERSION_HEADER for name, _ in scope["headers"]):
            return Match.NONE, {}
        match, found = super().matches(scope)
        return match, {**found, ERRORS_AS: ANTHROPIC_PATH}


def model_object(entry: ModelEntry) -> dict[str, Any]:
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
    """A page of the catalog, the newest models first: `limit` of them after `after_id`, or before `before_id`."""
    catalog: Catalog = request.app.state.catalog
    models = await asyncio.to_thread(lambda: [model_object(entry) for entry in catalog.entries()])
    found = page(request, models, MAX_LISTED, DEFAULT_LISTED, "_id")
    return JSONResponse({name: found[name] for name in ("data", "has_more", "first_id", "last_id")})


async def retrieve_model(request: Request) -> Response:
    """One model, by any of its names."""
    catalog: Catalog = request.app.state.catalog
    name = request.path_params["model"]
    return JSONResponse(await asyncio.to_thread(lambda: model_object(find(catalog, name))))


routes = [
    AnthropicRoute("/v1/models", list_models, methods=["GET"]),
    AnthropicRoute("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
]
