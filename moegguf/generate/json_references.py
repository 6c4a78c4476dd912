"""Resolves references ("$ref") to parts of the JSON schema that contains them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from moegguf.errors import SchemaError

# Keywords whose values are data, not schemas.
_VALUES = ("enum", "const", "default", "examples")


class References:
    """Finds the parts of one schema by JSON pointer, anchor or identifier."""

    def __init__(self, root: Any) -> None:
        self._root = root

    @functools.cached_property
    def _named(self) -> Mapping[str, Any]:
        """All parts of the schema that have an anchor or identifier, as {name: part}.
        The name is "#" and the anchor, or the `$id`."""
        todo, named = [self._root], dict[str, Any]()
        while todo:
            part = todo.pop()
            if isinstance(part, Mapping):
                for keyword in ("$anchor", "$dynamicAnchor", "$id"):
                    if isinstance(name := part.get(keyword), str):
                        named[
                            name.removesuffix("#") if keyword == "$id" else "#" + name
                        ] = part
                todo += [value for key, value in part.items() if key not in _VALUES]
            elif isinstance(part, list | tuple):
                todo += part
        return named

    def follow(self, reference: str) -> Any:
        """Returns the part of the schema that `reference` refers to. `reference` is "#"
        with a JSON pointer or an anchor, or the `$id` of a part, or both. Raises
        SchemaError if there is no such part."""
        base, _, fragment = reference.partition("#")
        try:
            fragment = unquote(fragment, errors="strict")
        except ValueError:
            raise SchemaError(
                f"the JSON schema refers to {reference[:80]!r}, which is not UTF-8; correct the reference."
            ) from None
        target = self._root
        if base:
            target = self._named.get(base)
            if target is None:
                raise SchemaError(
                    f"references in a JSON schema must be local (#/...), but one is {reference[:80]!r}; copy its"
                    " target into the schema."
                )
        if fragment and not fragment.startswith("/"):
            target = self._named.get("#" + fragment)
            fragment = ""
        for step in fragment.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if (
                isinstance(target, list)
                and step.isascii()
                and step.isdigit()
                and int(step[:9]) < len(target)
            ):
                target = target[int(step[:9])]
            else:
                target = target.get(step) if isinstance(target, Mapping) else None
        if target is None:
            raise SchemaError(
                f"the JSON schema refers to {reference[:80]!r}, which is not in the schema; define it."
            )
        return target
