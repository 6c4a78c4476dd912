"""JSON schemas as grammars in llguidance's Lark dialect.

JSON schemas, which are untrusted, follow JSON Schema 2020-12, except that
- an object that names its properties has no others, unless `additionalProperties` or `patternProperties` allow them;
- properties come in the order of the schema;
- a schema without `type` has the type that its other keywords apply to;
- `prefixItems` without `items` and `minItems` is a tuple: all of its items and no others;
- `oneOf` is `anyOf`;
- unknown keywords and formats, and `not`, `uniqueItems`, `minProperties`, `maxProperties` and the like, are ignored.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moegguf.errors import SchemaError

MAX_GRAMMAR_BYTES = 1 << 20  # all schemas of a request: those of its tools, too
MAX_SUBSCHEMAS = 10_000  # of a request, each counted as often as it is used

WHITESPACE = r" |\n[ \t]{0,20}"
"""Allowed once between the parts of JSON: without a bound some models write blanks until the token limit."""


@functools.cache
def _json_options() -> Mapping[str, Any]:
    """Options of %json. llguidance before 1.9 can bound only the blanks that are part of a separator."""
    from importlib.metadata import version  # for requests with a schema only: it takes a while

    major, minor, *_ = version("llguidance").split(".")
    if (int(major), int(minor)) >= (1, 9):
        blanks: _Json = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
    else:
        after = f"({WHITESPACE})?"
        blanks = {"whitespace_flexible": False, "item_separator": "," + after, "key_separator": ":" + after}
    return {**blanks, "lenient": True}  # ignores unknown formats, and reads oneOf as anyOf


_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_COMBINING = ("allOf", "anyOf", "oneOf")
_KEPT = {"type", "enum", "const", "$ref", *_COMBINING}.union(*_KEYWORDS.values())
_OPEN = {"additionalProperties", "patternProperties"}
_Json = dict[str, Any]


class Schemas:
    """Rewrites the JSON schemas of one request so that llguidance reads them as the module's docstring says.

    What combines others (`$ref`, `allOf`, `anyOf`) has all of them hold in one place, and only all of them together
    name the properties of an object, and its type. So there is a schema in a place of its own (of a property, an item),
    which gets what they lack, and one that is part of another. References become definitions, one of each kind.
    """

    def __init__(self) -> None:
        self._n_parts = 0
        self._root: Any = None  # of the schema that is rewritten
        self._names: dict[tuple[str, bool], str] = {}  # references, and whether in a place of their own: definitions
        self._undefined: list[tuple[str, bool]] = []

    def grammar(self, schema: Any) -> str:
        """The grammar of JSON that follows `schema`. Raises SchemaError for one that is invalid, or too large."""
        self._root = schema
        self._names.clear()
        try:
            form, definitions = {"allOf": [self._place(schema)]}, _Json()
            while self._undefined:
                reference, is_place = key = self._undefined.pop()
                rewrite = self._place if is_place else self._part
                definitions[self._names[key]] = rewrite(self._resolve(reference))
            return f"%json {json.dumps({**form, '$defs': definitions, 'x-guidance': _json_options()}, allow_nan=False)}"
        except RecursionError:
            raise SchemaError("the JSON schema nests too deep, or its references do; simplify it.") from None
        except SchemaError:
            raise
        except (TypeError, ValueError) as error:
            raise SchemaError(f"the JSON schema is not JSON ({error}).") from error

    def _place(self, schema: Any) -> Any:
        """A schema in a place of its own."""
        kept = _kept(schema)
        if not isinstance(kept, dict) or kept.keys() == {"$ref"}:
            return self._part(schema, is_place=True)
        for key in ("anyOf", "oneOf"):  # each alternative is in that place, with what stands beside it
            if key in kept:
                rest = {name: value for name, value in kept.items() if name != key}
                wholes = [{**rest, "allOf": [*rest.get("allOf", ()), part]} if rest else part for part in kept[key]]
                return {"anyOf": [self._place(whole) for whole in wholes]}
        together = list(self._together(kept, set()))
        keys = set[str]().union(*together)
        lacking: _Json = {}
        if not keys & {"type", "enum", "const"}:
            kinds = (kind for kind, keywords in _KEYWORDS.items() if keys.intersection(keywords))
            if kind := next(kinds, None):
                lacking["type"] = kind
        names = dict.fromkeys(itertools.chain.from_iterable(map(_property_names, together)), True)
        if names and not keys & _OPEN:
            lacking |= {"properties": names, "additionalProperties": False}
        form = self._part(kept)
        if len(together) > 1:
            return {"allOf": [form, lacking]}
        both = {"properties": names | form.get("properties", {})} if "properties" in lacking else {}
        return {**lacking, **form, **both}

    def _part(self, schema: Any, is_place: bool = False) -> Any:
        """A schema that is part of another. is_place: it has nothing but a reference, and is none."""
        form = _kept(schema)
        self._n_parts += 1
        if self._n_parts > MAX_SUBSCHEMAS:
            raise SchemaError(f"the JSON schemas of a request have up to {MAX_SUBSCHEMAS} parts, counting repetitions.")
        if not isinstance(form, dict):
            return form
        if "$ref" in form:
            self._resolve(form["$ref"])
            key = form["$ref"], is_place
            if key not in self._names:
                self._names[key] = str(len(self._names))
                self._undefined.append(key)
            form["$ref"] = f"#/$defs/{self._names[key]}"
        for name in ("properties", "patternProperties"):
            if isinstance(form.get(name), Mapping):
                form[name] = {key: self._place(part) for key, part in form[name].items()}
        if isinstance(form.get("items"), list):  # a tuple in drafts before 2020-12
            form["prefixItems"] = form.pop("items")
        if isinstance(form.get("prefixItems"), list):
            form["prefixItems"] = [self._place(item) for item in form["prefixItems"]]
            form = {"minItems": len(form["prefixItems"]), "items": False, **form}
        for name in ("items", "additionalProperties"):
            if name in form:
                form[name] = self._place(form[name])
        for name in _COMBINING:
            if name in form:
                form[name] = [self._part(part) for part in form[name]]
        return form

    def _together(self, schema: Any, seen: set[str]) -> Iterator[_Json]:
        """The schemas that hold in one place: this one, and those that it combines. `seen`: references."""
        kept = _kept(schema)
        if not isinstance(kept, dict):
            return
        yield kept
        for part in itertools.chain.from_iterable(kept.get(key, ()) for key in _COMBINING):
            yield from self._together(part, seen)
        if "$ref" in kept:
            target = self._resolve(kept["$ref"])
            if kept["$ref"] not in seen:
                seen.add(kept["$ref"])
                yield from self._together(target, seen)

    def _resolve(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(f"references in a JSON schema are local (#/...), but one is {str(reference)[:80]!r}.")
        target = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            inside = target.get(step) if isinstance(target, Mapping) else None
            if isinstance(target, list) and step.isdigit() and int(step) < len(target):
                inside = target[int(step)]
            if inside is None:
                raise SchemaError(f"the JSON schema refers to {reference[:80]!r}, which it does not have.")
            target = inside
        return target


def _kept(schema: Any) -> bool | _Json:
    """The supported keywords; null counts as absent, because some clients send it."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise SchemaError(f"a JSON schema consists of objects, but one part is {str(schema)[:50]!r}.")
    kept = {key: value for key, value in schema.items() if key in _KEPT and (value is not None or key == "const")}
    for key in _COMBINING:
        if key in kept and not (isinstance(kept[key], list | tuple) and kept[key]):
            raise SchemaError(f"`{key}` of a JSON schema is a list of schemas.")
    return kept


def _property_names(schema: _Json) -> Iterable[str]:
    """The properties that a schema names, described ones first."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    texts = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not isinstance(properties, Mapping) or not texts:
        raise SchemaError("`properties` of a JSON schema is an object and `required` a list of names.")
    return [*properties, *required]
