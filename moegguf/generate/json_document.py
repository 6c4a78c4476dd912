"""Combines JSON schemas: determines which values several schemas allow together.

A *goal* is a set of schemas that must all hold for one value. `Document.alternatives`
splits a goal into alternatives that have only keywords for single types. References are
followed, and `anyOf` becomes alternatives. `oneOf`, `not` and `if` are replaced with
combinations of schemas and their complements. (The complement of a schema allows all
values that the schema does not allow.) Most keywords have a complement. If a keyword
has none, a `oneOf`, `not` or `if` that needs the complement is not fully enforced, and
`Document.ignored` has an entry for the keyword.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.errors import SchemaError
from moegguf.generate.json_numbers import Numbers, decimal_of
from moegguf.generate.json_references import References

Json = dict[str, Any]

TYPES = ("object", "array", "string", "number", "boolean", "null")
STRING_KEYWORDS = ("pattern", "minLength", "maxLength", "format")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPE = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "contains", "minContains", "maxContains", "uniqueItems"),
    "string": STRING_KEYWORDS,
    "number": _BOUNDS,
}  # fmt: skip
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_KEPT = {"type", "enum", "unevaluatedItems", *_COMBINING}.union(*_OF_TYPE.values())
_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties"}

# Keywords that only schemas of this module (`Made`) have. In a user's schema they are
# ignored.
EXCLUDED, FRACTIONAL = "excluded", "fractional"

MAX_ALTERNATIVES = 100  # a oneOf with more alternatives is treated as anyOf
# An alternative of a oneOf that needs more combinations does not exclude the other
# alternatives.
MAX_COMPLEMENTS = 64
# Levels of nested values that are compared to decide whether two alternatives exclude
# each other.
_DEPTH = 3


class Made(dict[str, Any]):
    """A schema that this module made. The exceptions that json_schema.py makes for
    users' schemas do not apply to such a schema."""


def _any_of(*schemas: Any) -> Made:
    return Made({"anyOf": list(schemas)})


def _all_of(*schemas: Any) -> Made:
    return Made({"allOf": list(schemas)})


def _not(schema: Any) -> Made:
    return Made({"not": schema})


def _lacking(name: str) -> Made:
    """Returns a schema that forbids the property `name`."""
    return Made(properties={name: False})


class _NoComplementError(Exception):
    """Raised if no schema allows exactly the values that a keyword forbids."""


@dataclass(eq=False)
class Schema:
    """A schema of a document. `kept`: its supported keywords, in the form of JSON
    Schema 2020-12. The other fields are set when they are needed."""

    kept: Json
    complement: Made | None = None
    # The schemas that must hold in addition to the keywords for single types.
    together: Goal | None = None
    options: Goal | None = None  # the alternatives of `anyOf`; None without `anyOf`

    @functools.cached_property
    def plain(self) -> Json:
        """The keywords for single types, without combining keywords such as `anyOf`,
        and without an `enum` that lists objects or arrays."""
        left_out = {*_COMBINING, "enum"} if _has_composites(self.kept) else _COMBINING
        return type(self.kept)(
            (key, value) for key, value in self.kept.items() if key not in left_out
        )


Goal = tuple[Schema, ...]
"""A value must satisfy all of these schemas. An empty tuple allows any value."""


@dataclass(frozen=True)
class Facts:
    """One alternative of a goal: the values that have one of `types` and satisfy all of
    `parts`.

    `whole`: True if numbers must be integers. `values`: {key: scalar}, the only values
    that are allowed; None: the values are not listed.
    """

    parts: tuple[Json, ...]
    types: tuple[str, ...]
    whole: bool
    values: Mapping[Any, Any] | None

    def each(self, keyword: str) -> Iterator[Any]:
        """Returns the values that the parts have for this keyword."""
        return (part[keyword] for part in self.parts if keyword in part)

    def least(self, keyword: str, default: int = 0) -> int:
        """Returns the strictest lower limit: the largest value of this keyword, or
        `default` if no part has it."""
        return max(self.each(keyword), default=default)

    def most(self, keyword: str) -> int | None:
        """Returns the strictest upper limit: the smallest value of this keyword, or
        None if no part has it."""
        return min(self.each(keyword), default=None)

    @functools.cached_property
    def excluded(self) -> Mapping[Any, Any]:
        """The scalars that the parts' keyword EXCLUDED forbids, as {`key_of(scalar)`:
        scalar}."""
        return {
            key_of(value): value for values in self.each(EXCLUDED) for value in values
        }

    def values_of(self, kind: str) -> list[Any] | None:
        """Returns the scalars of the type `kind` that are listed and allowed. Returns
        None if `values` is None."""
        if self.values is None:
            return None
        values = [
            value
            for key, value in self.values.items()
            if key[0] == kind and key not in self.excluded
        ]
        return (
            [value for value in values if self.numbers.allows(value)]
            if kind == "number"
            else values
        )

    @functools.cached_property
    def numbers(self) -> Numbers:
        """The numbers that the keywords of all parts allow."""
        found = Numbers(self.whole, fractional=any(self.each(FRACTIONAL)))
        for keyword in _BOUNDS:
            for value in self.each(keyword):
                found.restrict(keyword, value)
        found.excluded = [
            decimal_of(value)
            for key, value in self.excluded.items()
            if key[0] == "number"
        ]
        return found

    @functools.cached_property
    def property_names(self) -> Sequence[str]:
        """The names of all properties that the parts name in `properties` or
        `required`."""
        described = itertools.chain.from_iterable(self.each("properties"))
        return tuple(
            dict.fromkeys(
                [*described, *itertools.chain.from_iterable(self.each("required"))]
            )
        )

    @functools.cached_property
    def required(self) -> set[str]:
        """The names of the required properties."""
        return set().union(*self.each("required"))

    @functools.cached_property
    def patterns(self) -> tuple[str, ...]:
        """The patterns for names of properties, from `patternProperties` of all
        parts."""
        return tuple(
            dict.fromkeys(itertools.chain.from_iterable(self.each("patternProperties")))
        )

    @functools.cached_property
    def n_prefix(self) -> int:
        """The number of leading items that have their own schema."""
        return max(map(len, self.each("prefixItems")), default=0)

    @functools.cached_property
    def fewest_items(self) -> int:
        """The minimum number of items: the largest `minItems`, or the length of the
        longest tuple (a user's `prefixItems` without `items` or `minItems`) if this
        length is greater."""
        tuples = (
            len(part["prefixItems"])
            for part in self.parts
            if _is_tuple(part) and "minItems" not in part
        )
        return max([self.least("minItems"), *tuples])

    @functools.cached_property
    def is_closed(self) -> bool:
        """True if objects may have only the properties that are named: a user's schema
        names properties, and no user's schema has a keyword in _OPENING."""
        own = [part for part in self.parts if not isinstance(part, Made)]
        names = any("properties" in part or part.get("required") for part in own)
        return names and not any(part.keys() & _OPENING for part in own)


class Document:
    """The schemas of one root document. `count_steps` is called with the number of
    steps of work, and may raise an error to stop the work. `compares`: True for the
    document with which another document compares the alternatives of a `oneOf`. Such a
    document treats `oneOf` as `anyOf`, so that a schema may contain itself."""

    def __init__(
        self, root: Any, count_steps: Callable[[int], None], compares: bool = False
    ) -> None:
        # Keywords that the grammar does not enforce, some with their location.
        self.ignored: set[str] = set()
        self._references = References(root)
        self._count_steps = count_steps
        self._comparison = None if compares else Document(root, count_steps, True)
        # Keeps every schema alive, so that its id() stays unique.
        self._raw: list[Any] = []
        self._schemas: dict[int, Schema] = {}  # key: id() of the schema
        # The key is the type and repr() of the supported keywords, or the schema's id()
        # if a keyword contains an object or a nested list.
        self._equal: dict[Any, Schema] = {}
        self._alternatives: dict[Goal, list[Facts]] = {}

    def goal(self, *schemas: Any) -> Goal:
        """Returns the goal of values that all these schemas allow. Raises SchemaError
        for an invalid schema."""
        found = dict.fromkeys(map(self._followed, schemas))
        return tuple(schema for schema in found if schema.kept)

    def together(self, goal: Goal, *schemas: Any) -> Goal:
        """Returns the goal of values that `goal` and all these schemas allow."""
        return tuple(dict.fromkeys([*goal, *self.goal(*schemas)]))

    def _followed(self, raw: Any) -> Schema:
        """Returns a schema, or the schema that it refers to. A schema that only refers
        to itself allows nothing."""
        seen: set[Schema] = set()
        while (schema := self._schema(raw)) not in seen:
            if schema.kept.keys() != {"$ref"}:
                return schema
            seen.add(schema)
            raw = self._references.follow(schema.kept["$ref"])
        return self._schema(False)

    def _schema(self, raw: Any) -> Schema:
        if id(raw) not in self._schemas:
            kept = raw if isinstance(raw, Made) else _kept(raw)
            key = (type(kept), repr(kept)) if _has_no_schemas(kept) else id(raw)
            self._schemas[id(raw)] = self._equal.setdefault(key, Schema(kept))
            self._raw.append(raw)
        return self._schemas[id(raw)]

    # Alternatives

    def alternatives(self, goal: Goal) -> list[Facts]:
        """Returns the alternatives of a goal: a value satisfies the goal if it
        satisfies any of them."""
        if goal not in self._alternatives:
            self._alternatives[goal] = [_facts(parts) for parts in self._parts_of(goal)]
        return self._alternatives[goal]

    def _parts_of(self, goal: Goal) -> Iterator[list[Json]]:
        """Yields each alternative of a goal as a list of schemas that have only
        keywords for single types. An alternative is left out if it contains the schema
        False, or a schema that refers to itself without a nested value in between."""
        # (schema, schemas that combine it or refer to it), processed from the end.
        start = [(schema, frozenset[Schema]()) for schema in reversed(goal)]
        todo: list[tuple[list[tuple[Schema, frozenset[Schema]]], dict[Schema, None]]]
        todo = [(start, {})]
        seen: set[Any] = set()
        while todo:
            pending, done = todo.pop()
            while pending:
                schema, trail = pending.pop()
                if schema in trail:
                    break
                if schema in done:
                    continue
                self._count_steps(1 + len(trail) // 50)
                together, options = self._take_apart(schema)
                done[schema] = None
                trail |= {schema}
                pending += [(other, trail) for other in reversed(together)]
                if options is not None:
                    for option in reversed(options):
                        self._count_steps(1 + len(pending))
                        branch = [*pending, (option, trail)]
                        if (key := (tuple(branch), tuple(done))) not in seen:
                            seen.add(key)
                            todo.append((branch, dict(done)))
                    break
            else:
                self._count_steps(len(done))
                yield [schema.plain for schema in done if schema.plain]

    def _take_apart(self, schema: Schema) -> tuple[Goal, Goal | None]:
        """Returns the schemas that must hold in addition to the schema's own keywords
        for single types (from `$ref`, `allOf` and others), and the alternatives of
        `anyOf` (None without `anyOf`)."""
        if schema.together is None:
            schema.together = self.goal(*self._combined(schema.kept))
            if "anyOf" in schema.kept:
                schema.options = tuple(map(self._followed, schema.kept["anyOf"]))
        return schema.together, schema.options

    def _combined(self, kept: Json) -> Iterator[Any]:
        """Yields schemas that must all hold, for the combining keywords except `anyOf`,
        for dependencies, and for an `enum` that lists objects or arrays."""
        yield from kept.get("allOf", ())
        if "$ref" in kept:
            yield self._references.follow(kept["$ref"])
        if "oneOf" in kept:
            yield self._exactly_one(kept["oneOf"])
        if "not" in kept:
            yield self._complement(kept["not"])
        if "if" in kept:
            then, otherwise = kept.get("then", True), kept.get("else", True)
            unless = _all_of(self._complement(kept["if"]), otherwise)
            yield _any_of(_all_of(kept["if"], then), unless)
        for keyword in ("dependentRequired", "dependentSchemas"):
            for name, schema in _dependents(kept, keyword):
                present = _all_of(Made(required=[name]), schema)
                yield _any_of(_lacking(name), present)
        if _has_composites(kept):
            yield _any_of(*map(_equal_to, kept["enum"]))
        if "unevaluatedItems" in kept:
            self.ignored.add("unevaluatedItems")

    def _exactly_one(self, options: Sequence[Any]) -> Made:
        """Returns an `anyOf` that replaces a `oneOf`. Each alternative excludes the
        values of the alternatives that `_overlapping` lists for it, as far as these
        have a complement. It excludes none of them if this would need more than
        MAX_COMPLEMENTS combinations."""
        overlapping = self._overlapping(options)
        alternatives = []
        for option, others in zip(options, overlapping, strict=True):
            complements = [self._complement(other) for other in others]
            if math.prod(len(each["anyOf"]) for each in complements) > MAX_COMPLEMENTS:
                self.ignored.add("oneOf")
                complements = []
            alternatives.append(_all_of(option, *complements))
        return _any_of(*alternatives)

    def _overlapping(self, options: Sequence[Any]) -> list[list[Any]]:
        """Returns, for each alternative of a `oneOf`, the other alternatives that may
        allow some of its values. The lists are empty if there are more than
        MAX_ALTERNATIVES alternatives, or if this document compares alternatives."""
        found: list[list[Any]] = [[] for _ in options]
        if self._comparison is None:
            return found
        if len(options) > MAX_ALTERNATIVES:
            self.ignored.add("oneOf")
            return found
        for (n, one), (m, other) in itertools.combinations(enumerate(options), 2):
            both = self._comparison.goal(one, other)
            if not self._comparison._is_empty(both, _DEPTH):
                found[n].append(other)
                found[m].append(one)
        return found

    def _is_empty(self, goal: Goal | None, depth: int) -> bool:
        """Returns True if the goal is known to allow no value. Required nested values
        are checked in the same way, down to `depth` levels; deeper ones count as
        possible."""
        if goal is None:
            return True
        alternatives = self.alternatives(goal)
        return not any(
            self._may_be(facts, kind, depth)
            for facts in alternatives
            for kind in facts.types
        )

    def _may_be(self, facts: Facts, kind: str, depth: int) -> bool:
        if facts.values is not None:
            return bool(facts.values_of(kind))
        if kind == "number":
            return not facts.numbers.is_empty()
        inner: Iterable[Goal | None] = ()
        if kind == "object" and not facts.patterns:
            inner = (self.property_goal(facts, name) for name in facts.required)
        elif kind == "array":
            inner = (
                self.item_goal(facts, n)
                for n in range(min(facts.fewest_items, facts.n_prefix))
            )
        return depth == 0 or not any(self._is_empty(each, depth - 1) for each in inner)

    # Nested values

    def property_goal(
        self, facts: Facts, name: str | None, matched: Iterable[str] = ()
    ) -> Goal | None:
        """Returns the goal of a property's value, or None if the property is not
        allowed. `matched`: the patterns that the property's name matches. `name` is
        None for a property that no schema names."""
        self._count_steps(len(facts.parts))
        found, is_covered = list[Any](), False
        for part in facts.parts:
            own, patterns = (
                part.get("properties", {}),
                part.get("patternProperties", {}),
            )
            schemas = [own[name]] if name in own else []
            schemas += [patterns[pattern] for pattern in matched if pattern in patterns]
            if not schemas and "additionalProperties" in part:
                schemas.append(part["additionalProperties"])
            is_covered |= bool(schemas)
            found += schemas
        if not is_covered:
            found += facts.each("unevaluatedProperties")
            if name is None and facts.is_closed:
                return None
        return self._goal_of_all(found)

    def item_goal(self, facts: Facts, n: int) -> Goal | None:
        """Returns the goal of the item with index `n` of an array, or None if this item
        is not allowed."""
        self._count_steps(len(facts.parts))
        found = list[Any]()
        for part in facts.parts:
            prefix = part.get("prefixItems", ())
            if n < len(prefix):
                found.append(prefix[n])
            elif "items" in part or _is_tuple(part):
                found.append(part.get("items", False))
        return self._goal_of_all(found)

    def _goal_of_all(self, schemas: Iterable[Any]) -> Goal | None:
        goal = self.goal(*schemas)
        return None if self._schema(False) in goal else goal

    # Complements

    def _complement(self, schema: Any) -> Made:
        """Returns a schema that allows exactly the values that `schema` does not allow.
        If a keyword has no complement, the result allows every value, and `ignored` has
        an entry for the keyword."""
        found = self._followed(schema)
        if found.complement is None:
            try:
                options = [
                    option
                    for keyword in found.kept
                    for option in self._without(found.kept, keyword)
                ]
            except _NoComplementError as error:
                self.ignored.add(f"{error} inside not, if or oneOf")
                options = [True]
            found.complement = _any_of(*options)
        return found.complement

    def _without(self, kept: Json, keyword: str) -> Iterator[Any]:
        """Yields schemas that together allow exactly the values that a keyword forbids.
        Raises _NoComplementError if no schema does this."""
        value = kept[keyword]
        match keyword:
            case "type":
                others = [kind for kind in TYPES if kind not in value]
                if "integer" in value and "number" in others:
                    others.remove("number")
                    yield Made({"type": ["number"], FRACTIONAL: True})
                yield Made(type=others)
            case "enum":
                composites = [each for each in value if isinstance(each, dict | list)]
                scalars = [each for each in value if not isinstance(each, dict | list)]
                unlike = [_not(_equal_to(each)) for each in composites]
                yield _all_of(Made({EXCLUDED: scalars}), *unlike)
            case "$ref":
                yield _not(self._references.follow(value))
            case "allOf":
                yield from map(_not, value)
            case "anyOf":
                yield _all_of(*map(_not, value))
            case "oneOf":
                yield _all_of(*map(_not, value))
                yield from itertools.starmap(_all_of, itertools.combinations(value, 2))
            case "not":
                yield value
            case "if":
                yield _all_of(value, _not(kept.get("then", True)))
                yield _all_of(_not(value), _not(kept.get("else", True)))
            case "then" | "else" | "minContains" | "maxContains":
                return
            case "properties":
                for name, each in value.items():
                    yield Made(
                        type=["object"], required=[name], properties={name: _not(each)}
                    )
            case "required":
                for name in value:
                    yield _all_of(Made(type=["object"]), _lacking(name))
            case "dependentRequired" | "dependentSchemas":
                for name, each in _dependents(kept, keyword):
                    present = Made(type=["object"], required=[name])
                    yield _all_of(present, _not(each))
            case "prefixItems":
                for n, each in enumerate(value):
                    prefix = [*[True] * n, _not(each)]
                    yield Made(type=["array"], minItems=n + 1, prefixItems=prefix)
            case "items" if "prefixItems" not in kept:
                yield Made(type=["array"], contains=_not(value))
            case "contains" if not kept.keys() & {"minContains", "maxContains"}:
                yield Made(type=["array"], items=_not(value))
            case _ if keyword in _OPPOSITES:
                kind, opposite, step = _OPPOSITES[keyword]
                if step >= 0 or value > 0:
                    yield Made({"type": [kind], opposite: value + step})
            case (
                "items"
                | "additionalProperties"
                | "unevaluatedProperties"
                | "propertyNames"
            ) if value is True:
                return
            case "uniqueItems" if value is False:
                return
            case _:
                raise _NoComplementError(keyword)


# Keywords

_OPPOSITES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
"""{keyword: (type of the values to which the keyword applies, keyword of the
complement, step)}. The complement's keyword has the keyword's value plus `step`."""


def key_of(value: Any) -> tuple[str, Any]:
    """Returns a key that is the same for equal JSON values: the type and a normalized
    value. Inside lists and objects, 1 and 1.0 are not equal here."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean", value
    if isinstance(value, int | float):
        return "number", decimal_of(value)
    if isinstance(value, str):
        return "string", value
    return "array" if isinstance(value, list) else "object", json.dumps(
        value, sort_keys=True
    )


def _facts(parts: list[Json]) -> Facts:
    types, whole = list(TYPES), False
    for part in parts:
        if "type" in part:
            names = part["type"]
            types = [
                kind
                for kind in types
                if kind in names or (kind == "number" and "integer" in names)
            ]
            whole |= "integer" in names and "number" not in names
    own = [part for part in parts if not isinstance(part, Made)]
    if not any("enum" in part for part in parts) and not any(
        "type" in part for part in own
    ):
        implied = (
            kind
            for kind, keywords in _OF_TYPE.items()
            if any(part.keys() & {*keywords} for part in own)
        )
        if first := next(implied, None):
            types = [kind for kind in types if kind == first]
    values: dict[Any, Any] | None = None
    for part in parts:
        if "enum" in part:
            these = {key_of(value): value for value in part["enum"]}
            values = (
                these
                if values is None
                else {key: value for key, value in values.items() if key in these}
            )
    return Facts(tuple(parts), tuple(types), whole, values)


def _is_tuple(part: Json) -> bool:
    """Returns True if an array may have only the items in `prefixItems` of this part. A
    user's schema without `items` is read in this way, but a schema of this module
    (`Made`) is not."""
    return "prefixItems" in part and "items" not in part and not isinstance(part, Made)


def _has_no_schemas(kept: Json) -> bool:
    values = itertools.chain.from_iterable(
        value if isinstance(value, list) else [value] for value in kept.values()
    )
    return not any(isinstance(value, dict | list) for value in values)


def _has_composites(kept: Json) -> bool:
    return any(isinstance(value, dict | list) for value in kept.get("enum", ()))


def _dependents(kept: Json, keyword: str) -> Iterator[tuple[str, Any]]:
    """Yields (name, schema) from a keyword for dependencies. An object that has the
    property `name` must also satisfy the schema."""
    for name, value in kept.get(keyword, {}).items():
        is_list = keyword == "dependentRequired"
        yield name, Made(required=value) if is_list else value


def _equal_to(value: Any) -> Made:
    """Returns a schema that allows only `value`."""
    if isinstance(value, list):
        items, n = list(map(_equal_to, value)), len(value)
        return Made(type=["array"], prefixItems=items, minItems=n, maxItems=n)
    if isinstance(value, dict):
        properties = {name: _equal_to(item) for name, item in value.items()}
        return Made(
            type=["object"],
            properties=properties,
            required=[*value],
            additionalProperties=False,
        )
    return Made(enum=[value])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_names(value: Any, allowed: Sequence[str] = ()) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, str) and (not allowed or each in allowed) for each in value
    )


_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_RULES: Sequence[tuple[str, Callable[[Any], bool], Sequence[str]]] = (
    ("a number of 0 or more", lambda value: _is_number(value) and value >= 0 and value == int(value), _COUNTS),
    ("a number above 0", lambda value: _is_number(value) and value > 0, ("multipleOf",)),
    ("a number", _is_number, _BOUNDS),
    ("a text", lambda value: isinstance(value, str), ("pattern", "format", "$ref")),
    ("true or false", lambda value: isinstance(value, bool), ("uniqueItems",)),
    ("an object of schemas", lambda value: isinstance(value, Mapping),
     ("properties", "patternProperties", "dependentSchemas")),
    ("a list of schemas", lambda value: isinstance(value, list) and bool(value), ("allOf", "anyOf", "oneOf")),
    ("a list of schemas", lambda value: isinstance(value, list), ("prefixItems",)),
    ("a list of values", lambda value: isinstance(value, list), ("enum",)),
    ("a list of names", _are_names, ("required",)),
    ("lists of names", lambda value: isinstance(value, Mapping) and all(map(_are_names, value.values())),
     ("dependentRequired",)),
    ("a type, or a list of types", lambda value: _are_names(value, (*TYPES, "integer")), ("type",)),
)  # fmt: skip
"""(description of a valid value, function that checks a value, keywords whose values
must be valid in this way). If two rules contain the same keyword, the first rule
applies."""
_CHECKS = {
    keyword: (wanted, check)
    for wanted, check, keywords in reversed(_RULES)
    for keyword in keywords
}


def _kept(schema: Any) -> Json:
    """Returns a schema's supported keywords in the form of JSON Schema 2020-12. For
    False, returns an `anyOf` without alternatives. A keyword that is null is treated as
    absent (some clients send null), except `const`. Raises SchemaError for an invalid
    value of a keyword."""
    if isinstance(schema, bool):
        return {} if schema else {"anyOf": []}
    if not isinstance(schema, Mapping):
        raise SchemaError(
            f"every part of a JSON schema must be an object, true or false, but one is {str(schema)[:50]!r}; change it."
        )
    kept = _of_today(
        {
            key: value
            for key, value in schema.items()
            if value is not None or key == "const"
        }
    )
    for keyword, value in kept.items():
        wanted, check = _CHECKS.get(keyword, ("", None))
        if check and not check(value):
            raise SchemaError(
                f"`{keyword}` of a JSON schema must be {wanted}, but is {str(value)[:50]!r}; change it."
            )
        if keyword in _COUNTS:
            kept[keyword] = int(value)
    return kept


def _of_today(schema: Json) -> Json:
    """Returns a schema's supported keywords. Keywords of earlier drafts are converted
    to current keywords, and `const` is converted to `enum`."""
    schema = dict(schema)
    for old in ("$dynamicRef", "$recursiveRef"):
        if old in schema:
            schema.setdefault("$ref", schema[old])
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"]]
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema["additionalItems"]
    for exclusive, bound in (
        ("exclusiveMinimum", "minimum"),
        ("exclusiveMaximum", "maximum"),
    ):
        if isinstance(schema.get(exclusive), bool):
            is_strict = schema.pop(exclusive)
            if is_strict and bound in schema:
                schema[exclusive] = schema.pop(bound)
    dependencies = schema.get("dependencies")
    for name, dependency in (
        dependencies.items() if isinstance(dependencies, Mapping) else ()
    ):
        keyword = (
            "dependentRequired" if isinstance(dependency, list) else "dependentSchemas"
        )
        schema[keyword] = {**schema.get(keyword, {}), name: dependency}
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    if "const" in schema:
        others = schema.get("enum", [schema["const"]])
        is_among = isinstance(others, list) and key_of(schema["const"]) in map(
            key_of, others
        )
        schema["enum"] = [schema["const"]] if is_among else []
    return {key: value for key, value in schema.items() if key in _KEPT}
