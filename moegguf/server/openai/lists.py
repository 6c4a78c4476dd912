"""Lists in pages, as OpenAI's files and batches have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from moegguf.server.common.errors import HttpError


def page(request: Request, objects: Sequence[dict[str, Any]], most: int, default: int) -> dict[str, Any]:
    """The page of `objects` that the query's `after` and `limit` ask for. Raises HttpError 400."""
    limit = limit_of(request, most, default)
    start = 0
    if after := request.query_params.get("after"):
        places = [i for i, each in enumerate(objects) if each["id"] == after]
        if not places:
            raise HttpError(400, f"after: there is no {after:.80} in this list")
        start = places[0] + 1
    data = list(objects[start : start + limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(objects),
    }


def limit_of(request: Request, most: int, default: int) -> int:
    """The query's `limit`. Raises HttpError 400."""
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= most):
        raise HttpError(400, f"limit: must be a whole number from 1 to {most}, but is {text[:40]!r}")
    return int(text)
