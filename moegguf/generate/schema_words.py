"""Reading the words of a JSON schema, each checked. Makes no grammar."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from moegguf.errors import SchemaError

MAX_BYTES = 64 << 10
MAX_DEPTH = 64
MAX_BOUND = 10**15 - 1


def check_schema(schema: object) -> None:
    """Raises SchemaError when it is too large or deep, or not JSON."""
    if _depth(schema) > MAX_DEPTH:
        raise SchemaError(f"a JSON schema nests lists and objects up to {MAX_DEPTH} deep; this one is deeper.")
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode(errors="replace"))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the JSON schema is not JSON ({error}).") from error
    if size > MAX_BYTES:
        raise SchemaError(f"a JSON schema has up to {MAX_BYTES} bytes; this one has {size}.")


def _depth(value: object, depth: int = 0) -> int:
    """Of lists and objects, as far as the limit."""
    if depth > MAX_DEPTH or not isinstance(value, Mapping | list | tuple):
        return depth
    items = value.values() if isinstance(value, Mapping) else value
    return max((_depth(item, depth + 1) for item in items), default=depth + 1)


def parts_of(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema[key]
    if not isinstance(parts, list) or not parts:
        raise SchemaError(f"`{key}` of a JSON schema is a list of schemas.")
    return parts


def says_something(schema: Mapping[str, Any]) -> bool:
    """More than a title or a default."""
    return any(key in schema for key in ("properties", "required", "type", "items", "additionalProperties"))


def guessed_type(schema: Mapping[str, Any]) -> str | None:
    """The type of a schema that names none, by its other words."""
    words = {"object": "properties required additionalProperties", "array": "items prefixItems minItems maxItems",
             "string": "pattern minLength maxLength format", "number": "minimum maximum"}  # fmt: skip
    return next((kind for kind, keys in words.items() if any(key in schema for key in keys.split())), None)


def count_of(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise SchemaError(f"`{key}` of a JSON schema is a whole number from 0 on, but is {str(value)[:50]}.")
    return value


def bounds_of(schema: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The least and the greatest, exclusive ones moved by one: the nearest that can be said."""
    low, high = schema.get("minimum"), schema.get("maximum")
    over, under = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    step = 1 if schema.get("type") == "integer" else 1e-9
    for value in (low, high, over, under):
        if value is not None and not (isinstance(value, int | float) and abs(value) <= MAX_BOUND):
            raise SchemaError(f"bounds of a JSON schema are numbers of up to 15 digits, but one is {str(value)[:50]}.")
    if over is not None:
        low = math.floor(over) + 1 if step == 1 else max(low if low is not None else over + step, over + step)
    if under is not None:
        high = math.ceil(under) - 1 if step == 1 else min(high if high is not None else under - step, under - step)
    return low, high
