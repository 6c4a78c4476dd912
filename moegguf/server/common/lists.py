"""Lists in pages, as OpenAI's and Anthropic's APIs have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from moegguf.server.common.errors import HttpError


def page(
    request: Request, objects: Sequence[dict[str, Any]], most: int, default: int, suffix: str = ""
) -> dict[str, Any]:
    """The page of `objects` that the query asks for: `limit` of them, after or before the id in `after` or `before`,
    whose names in the query end with `suffix`. Raises HttpError 400."""
    query = request.query_params
    text = query.get("limit") or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= most):
        raise HttpError(400, f"limit: must be a whole number from 1 to {most}, but is {text[:40]!r}")
    after, before = query.get(f"after{suffix}"), query.get(f"before{suffix}")
    if after and before:
        raise HttpError(400, f"a page lies after{suffix} or before{suffix}, but both were given; leave one out")
    if before:
        rest = objects[: _position(objects, before)]
        data = rest[-int(text) :]
    else:
        rest = objects[_position(objects, after) + 1 :] if after else objects
        data = rest[: int(text)]
    return {
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(rest) > len(data),
    }


def _position(objects: Sequence[dict[str, Any]], name: str) -> int:
    position = next((i for i, each in enumerate(objects) if each["id"] == name), None)
    if position is None:
        raise HttpError(400, f"after: there is no {name:.80} in this list")
    return position
