"""GET /v1/models and /v1/models/{id} for Anthropic's clients, which OpenAI's share: told apart by `anthropic-version`.

A list has pages, as Anthropic's: `limit` models after `after_id`, or before `before_id`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from moegguf.models.entry import ModelEntry
from moegguf.server.common.errors import ANTHROPIC_PATH, ERRORS_AS, HttpError
from moegguf.server.common.lookup import details_or_none, find

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

VERSION_HEADER = b"anthropic-version"
DEFAULT_LIMIT, MOST_LIMIT = 20, 1000  # models of a page, as in Anthropic's API


class AnthropicRoute(Route):
    """A route for requests with the header `anthropic-version`, which all of Anthropic's clients send. Errors have
    Anthropic's form: the path alone says OpenAI's."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Of Route; no match without the header."""
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


def page_of(entries: Sequence[ModelEntry], query: dict[str, str]) -> dict[str, Any]:
    """The page of `entries` that the query asks for. Raises HttpError 400 for a bad limit or id, or both ids."""
    limit = _limit(query.get("limit", ""))
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise HttpError(400, "a page lies after_id or before_id, but both were given; leave one out")
    if before is not None:
        rest = entries[: _position(entries, before)]
        chosen = rest[-limit:]
    else:
        rest = entries if after is None else entries[_position(entries, after) + 1 :]
        chosen = rest[:limit]
    return {
        "data": [model_object(entry) for entry in chosen],
        "has_more": len(rest) > len(chosen),
        "first_id": chosen[0].name if chosen else None,
        "last_id": chosen[-1].name if chosen else None,
    }


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_LIMIT:
        raise HttpError(400, f"limit must be a whole number from 1 to {MOST_LIMIT}, but is {text[:20]!r}")
    return int(text)


def _position(entries: Sequence[ModelEntry], name: str) -> int:
    position = next((i for i, entry in enumerate(entries) if entry.name == name), None)
    if position is None:
        raise HttpError(400, f"there is no model {name[:100]!r} to begin a page at; take an id of the list")
    return position


async def list_models(request: Request) -> Response:
    """A page of the catalog, the newest models first."""
    catalog: Catalog = request.app.state.catalog
    query = dict(request.query_params)
    return JSONResponse(await asyncio.to_thread(lambda: page_of(catalog.entries(), query)))


async def retrieve_model(request: Request) -> Response:
    """One model, by any of its names."""
    catalog: Catalog = request.app.state.catalog
    name = request.path_params["model"]
    return JSONResponse(await asyncio.to_thread(lambda: model_object(find(catalog, name))))


routes = [
    AnthropicRoute("/v1/models", list_models, methods=["GET"]),
    AnthropicRoute("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
]
