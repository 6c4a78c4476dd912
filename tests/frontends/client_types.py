"""Checks replies against the types of the client packages; `client_of` makes an OpenAI client.

The clients themselves accept any reply, so they would not notice a wrong one.
"""

import typing
from typing import Any

import openai
from pydantic import BaseModel, TypeAdapter


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def kinds_of(union: Any) -> dict[str, type[BaseModel]]:
    """Returns the classes of a union by the value of their field `type`."""
    while typing.get_origin(union) is typing.Annotated:
        union = typing.get_args(union)[0]
    return {typing.get_args(kind.model_fields["type"].annotation)[0]: kind for kind in typing.get_args(union)}


def check(kind: Any, value: Any) -> None:
    """Fails unless `value` has all required fields of `kind`, each with its type."""
    TypeAdapter(kind).validate_python(value, strict=False)
