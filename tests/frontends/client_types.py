"""Checks replies against the models of the real clients' packages, which themselves accept anything."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any

import httpx
from pydantic import BaseModel, TypeAdapter


def kinds_of(union: Any) -> dict[str, type[BaseModel]]:
    """The models of a union by the value of their `type`."""
    while typing.get_origin(union) is typing.Annotated:
        union = typing.get_args(union)[0]
    return {typing.get_args(kind.model_fields["type"].annotation)[0]: kind for kind in typing.get_args(union)}


def check(kind: Any, value: Any) -> None:
    """Fails unless `value` has all required fields of `kind`, each with its type."""
    TypeAdapter(kind).validate_python(value, strict=False)


def named_events(response: httpx.Response, kinds: dict[str, type[BaseModel]], skip: Iterable[str] = ()) -> list[Any]:
    """The events of a stream, each checked against its kind; fails unless each has its own type as its name."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = httpx.Response(200, text=data.removeprefix("data: ")).json()
        assert name == f"event: {event['type']}"
        if event["type"] not in skip:
            check(kinds[event["type"]], event)
        found.append(event)
    return found
