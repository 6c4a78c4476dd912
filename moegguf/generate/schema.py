"""A JSON schema becomes a grammar: whatever the grammar accepts, the schema does.

Objects have their properties in the order in which the schema names them, and others only where
`additionalProperties` asks for them. What a grammar cannot hold (uniqueItems, multipleOf, not, ...) is passed over.
References stay inside the schema.
"""

from __future__ import annotations

import graphlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moegguf.errors import SchemaError
from moegguf.generate.gbnf import Rules, character_class, literal
from moegguf.generate.json_texts import CHARACTER, ESCAPED, FORMATS, NUMBER, SPACE
from moegguf.generate.numbers import integers_between, numbers_between
from moegguf.generate.patterns import pattern_rule
from moegguf.generate.schema_words import bounds_of, check_schema, count_of, guessed_type, parts_of, says_something

MAX_STEPS = 10_000  # sub-schemas looked at, each as often as it is used
MAX_CHOICES = 1_000
MAX_MERGES = 64  # references in a row


class Converter:
    """Adds the rules of schemas to `rules`. A method gives a body."""

    def __init__(self, rules: Rules, schema: Any) -> None:
        check_schema(schema)
        self._rules = rules
        self._root = schema
        self._by_reference: dict[str, str] = {}
        self._begins_with: dict[str, set[str]] = {}  # references, to those their texts may begin with
        self._within = ""  # the reference whose text begins here
        self._n_steps = 0
        self.space = rules.add("space", SPACE)
        self._character = rules.add("character", CHARACTER)
        self.text = rules.add("text", f'"\\"" {self._character}* "\\""')
        self._value = ""
        self._kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._text,
            "number": lambda schema: numbers_between(*bounds_of(schema)),
            "integer": lambda schema: integers_between(*bounds_of(schema)),
            "boolean": lambda schema: '"true" | "false"',
            "null": lambda schema: '"null"',
        }

    def convert(self) -> str:
        """The whole schema."""
        body = self._schema(self._root)
        try:
            graphlib.TopologicalSorter(self._begins_with).prepare()
        except graphlib.CycleError:
            raise SchemaError("the JSON schema refers to itself without an object or a list between.") from None
        return body

    def any_object(self) -> str:
        return self._list("{", f'{self.text} {self.space} ":" {self.space} {self._any()}', "}")

    def _schema(self, schema: Any) -> str:
        self._n_steps += 1
        if self._n_steps > MAX_STEPS:
            raise SchemaError(f"the JSON schema has more than {MAX_STEPS} parts, with those it repeats; simplify it.")
        if isinstance(schema, bool) or schema == {}:
            if schema is False:
                raise SchemaError("a part of the JSON schema is `false`, which nothing satisfies.")
            return self._any()
        if not isinstance(schema, Mapping):
            raise SchemaError(f"a JSON schema consists of objects, but one part is {str(schema)[:50]!r}.")
        for key, rule in (("$ref", self._reference), ("const", self._constant), ("enum", self._choice)):
            if key in schema:
                return rule(schema[key])
        if "allOf" in schema:
            return self._schema(self._merged(schema, *parts_of(schema, "allOf"), without="allOf"))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._alternatives(self._merged(schema, part, without=key) for part in parts_of(schema, key))
        kind = schema.get("type", guessed_type(schema))
        if isinstance(kind, list):
            return self._alternatives({**schema, "type": one} for one in kind)
        if kind is None:
            return self._any()
        if not isinstance(kind, str) or kind not in self._kinds:
            raise SchemaError(f"a JSON schema has the type {str(kind)[:50]!r}; known are {', '.join(self._kinds)}.")
        return self._kinds[kind](schema)

    def _rule(self, hint: str, schema: Any) -> str:
        return self._rules.add(hint, self._schema(schema))

    def _later_rule(self, hint: str, schema: Any) -> str:
        """A rule for what comes after a bracket or a colon."""
        return self._rules.add(hint, self._inside("", schema))

    def _alternatives(self, schemas: Iterable[Any]) -> str:
        bodies = dict.fromkeys(self._rule("choice", schema) for schema in schemas)
        if not 0 < len(bodies) <= MAX_CHOICES:
            raise SchemaError(f"a JSON schema gives 1 to {MAX_CHOICES} alternatives, not {len(bodies)}.")
        return " | ".join(bodies)

    def _reference(self, reference: Any) -> str:
        target = self._resolve(reference)
        if self._within:
            self._begins_with.setdefault(self._within, set()).add(reference)
        if reference not in self._by_reference:
            name = self._by_reference[reference] = self._rules.reserve("ref")
            self._rules.define(name, self._inside(reference, target))
        return self._by_reference[reference]

    def _inside(self, reference: str, schema: Any) -> str:
        before, self._within = self._within, reference
        body = self._schema(schema)
        self._within = before
        return body

    def _resolve(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(
                f"references in a JSON schema stay inside it (#/...), but one is {str(reference)[:80]!r}."
            )
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

    def _merged(self, base: Mapping[str, Any], *parts: Any, without: str) -> Mapping[str, Any]:
        """All of them at once; the later one's word counts where only one can."""
        out = {key: value for key, value in base.items() if key != without}
        for part in parts:
            for _ in range(MAX_MERGES):
                if not (isinstance(part, Mapping) and "$ref" in part and (len(parts) > 1 or says_something(out))):
                    break
                part = {**self._resolve(part["$ref"]), **{k: v for k, v in part.items() if k != "$ref"}}
            if not isinstance(part, Mapping):
                continue
            self._n_steps += len(part)
            for key, value in part.items():
                if key == "properties" and isinstance(out.get(key), Mapping) and isinstance(value, Mapping):
                    out[key] = {**out[key], **value}
                elif key in ("required", "allOf") and isinstance(out.get(key), list) and isinstance(value, list):
                    out[key] = [*out[key], *value]
                else:
                    out[key] = value
        return out

    def _constant(self, value: Any) -> str:
        return literal(json.dumps(value, ensure_ascii=False))

    def _choice(self, values: Any) -> str:
        if not isinstance(values, list) or not 0 < len(values) <= MAX_CHOICES:
            raise SchemaError(f"an enum of a JSON schema is a list of 1 to {MAX_CHOICES} values.")
        return " | ".join(dict.fromkeys(map(self._constant, values)))

    def _text(self, schema: Mapping[str, Any]) -> str:
        if "pattern" in schema:
            return f'"\\"" ({pattern_rule(self._rules, schema["pattern"])}) "\\""'
        if (form := FORMATS.get(str(schema.get("format")))) is not None:
            return f'"\\"" {self._rules.add("format", form)} "\\""'
        least, most = count_of(schema, "minLength"), count_of(schema, "maxLength")
        if least is None and most is None:
            return self.text
        return f'"\\"" {self._rules.repeat("text", self._character, least or 0, most)} "\\""'

    def _array(self, schema: Mapping[str, Any]) -> str:
        items = schema.get("items", {})
        firsts = schema.get("prefixItems", items if isinstance(items, list) else [])
        if not isinstance(firsts, list):
            raise SchemaError("`prefixItems` of a JSON schema is a list of schemas.")
        if firsts:
            rules = f' {self.space} "," {self.space} '.join(self._later_rule("item", item) for item in firsts)
            return f'"[" {self.space} {rules} {self.space} "]"'
        least, most = count_of(schema, "minItems") or 0, count_of(schema, "maxItems")
        return self._list("[", self._inside("", items), "]", least, most)

    def _list(self, first: str, item: str, last: str, least: int = 0, most: int | None = None) -> str:
        inside = self._rules.repeat("item", item, least, most, f'{self.space} "," {self.space}')
        return f"{literal(first)} {self.space} {inside} {self.space} {literal(last)}"

    def _any(self) -> str:
        if not self._value:
            self._value = self._rules.reserve("value")
            kinds = [
                self.any_object(),
                self._list("[", self._value, "]"),
                self.text,
                NUMBER,
                '"true" | "false" | "null"',
            ]
            self._rules.define(self._value, " | ".join(kinds))
        return self._value

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, more = schema.get("properties") or {}, schema.get("additionalProperties")
        required = schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list) or not all(map(_is_text, required)):
            raise SchemaError("`properties` of a JSON schema is an object and `required` a list of names.")
        properties = {**properties, **{name: True for name in required if name not in properties}}
        if not properties and more in (None, True, {}):
            return self.any_object()
        pairs = [(self._pair(name, part), name in required) for name, part in properties.items()]
        extra = "" if more in (None, False) else self._extra_pair(list(properties), more)
        return f'"{{" {self.space} {self._pairs(pairs, extra)} {self.space} "}}"'

    def _pair(self, name: str, schema: Any) -> str:
        key = literal(json.dumps(name, ensure_ascii=False))
        return self._rules.add("pair", f'{key} {self.space} ":" {self.space} {self._later_rule("value", schema)}')

    def _extra_pair(self, names: list[str], schema: Any) -> str:
        key = self._rules.add("key", self._other_key(names))
        return self._rules.add("pair", f'{key} {self.space} ":" {self.space} {self._later_rule("value", schema)}')

    def _other_key(self, names: list[str]) -> str:
        """A text that is none of these, by its first character that none of them has there."""
        plain = character_class(ESCAPED, negate=True)

        def rest(prefix: str) -> str:
            nexts = list(
                dict.fromkeys(name[len(prefix)] for name in names if name.startswith(prefix) and name != prefix)
            )
            ways = [f"{character_class([*ESCAPED, *nexts], negate=True)} {plain}*"]
            ways += [f"{literal(c)} {self._rules.add('key', rest(prefix + c))}" for c in nexts if c not in '"\\']
            return " | ".join([*ways, *([] if prefix in names else ['""'])])

        return f'"\\"" {self._rules.add("key", rest(""))} "\\""'

    def _pairs(self, pairs: Sequence[tuple[str, bool]], extra: str) -> str:
        """In their order, with the commas that those present need."""
        comma = f'{self.space} "," {self.space}'
        after = self._rules.add("more", f"({comma} {extra})*" if extra else '""')
        first = self._rules.add("none", f"({extra} {after})?" if extra else '""')
        for pair, required in reversed(pairs):
            first = self._rules.add("first", f"{pair} {after}" if required else f"{pair} {after} | {first}")
            after = self._rules.add("after", f"{comma} {pair} {after}" if required else f"({comma} {pair})? {after}")
        return first


def _is_text(value: object) -> bool:
    return isinstance(value, str)
