"""Checks that replies have the fields and types that the client packages declare;
`client_of` creates an OpenAI client.

The clients do not check this themselves. Types that pydantic can convert are accepted.
"""

import functools
import typing
from typing import Any

import openai
from pydantic import BaseModel, TypeAdapter


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def kinds_of(union: Any) -> dict[str, type[BaseModel]]:
    """Returns {value of the field `type`: class} for the classes of a union."""
    while typing.get_origin(union) is typing.Annotated:
        union = typing.get_args(union)[0]
    return {
        typing.get_args(kind.model_fields["type"].annotation)[0]: kind
        for kind in typing.get_args(union)
    }


adapter_of = functools.cache(TypeAdapter)


def check(kind: Any, value: Any) -> None:
    """Fails unless `value` has all required fields of `kind`, with types that pydantic
    can convert."""
    adapter_of(kind).validate_python(value, strict=False)
