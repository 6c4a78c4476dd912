"""Grammars of tool calls, in llguidance's Lark dialect. A call has the format that
`call_format.py` found for the model's chat template.

If all arguments are one JSON object, the grammar enforces the tool's schema as far as
`json_schema.py` can. In other formats the grammar enforces the names of parameters,
required parameters, types, and enumerated scalars.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moegguf.generate.call_format import ID, NAME, Written
from moegguf.generate.tool_calls import Parameter

Json = Callable[..., str]
"""A function that takes a JSON schema and returns the name of the grammar rule for JSON
values that satisfy the schema. `root` is the document in which references are looked
up; None: the schema itself."""
Member = Callable[[str, Parameter], str]
"""A function that takes the name and the schema of a property, and returns the grammar
of an object's member with this name. For the name "", any name is allowed."""

# Levels of nested objects and lists in "elements" and "relaxed"; deeper ones may be any
# text.
MAX_NESTING = 12
CALL_ID = "call00001"
_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"


def quoted(text: str) -> str:
    """Returns a literal of the grammar that matches `text`, or "" if the text is
    empty."""
    return json.dumps(text) if text else ""


def until(mark: str) -> str:
    """Returns the body of a lazy rule, which matches any text up to and including the
    first `mark`."""
    return f"/(?s:.*)/ {quoted(mark)}"


@dataclass
class CallGrammar:
    """Writes the grammar of calls in the format `written`. `json_grammar` writes the
    rules for JSON values, and `rules` collects all other rules of the calls written so
    far."""

    written: Written
    json_grammar: Json
    rules: list[str] = field(default_factory=list)

    def call(self, name: str, parameters: Mapping[str, Any]) -> str:
        """Returns the grammar of a call to the tool `name`. `parameters`: the JSON
        schema of its arguments."""
        written = self.written
        before = written.before.replace(NAME, name)
        opened = f"{before}{name}{written.between}".replace(ID, CALL_ID)
        arguments = self._arguments(Parameter(parameters, parameters))
        return " ".join(
            [quoted(opened), arguments, quoted(written.after.replace(ID, CALL_ID))]
        ).strip()

    def _arguments(self, whole: Parameter) -> str:
        styles = {
            "json": lambda: self.json_grammar({"type": "object", **whole.schema}),
            "tagged": lambda: self._members(whole, self._tagged),
            "elements": lambda: self._members(whole, self._element),
            "python": lambda: self._members(whole, self._keyword),
            "relaxed": lambda: self._members(whole, self._pair),
        }
        return styles[self.written.style]()

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _members(self, whole: Parameter, member: Member) -> str:
        """Returns the grammar of an object's members with separators between them, in
        the order of the schema or, in the style "relaxed", sorted by name. If the
        schema names no property, allows any members, or no members if the schema is
        closed (`_is_open`)."""
        found = list(_properties(whole))
        # Templates of this style sort the members by name.
        if self.written.style == "relaxed":
            found.sort()
        if not found:
            return self._any_members(member) if _is_open(whole) else ""
        required = _required(whole)
        divider = quoted(self.written.separator)
        # Both rules match the members from the current one to the last. `later` is used
        # if another member was written before them, otherwise `first`.
        first = later = ""
        for key in reversed(found):
            one = self._rule(member(key, whole.property(key)))
            beginning = f"{one} {later}".strip()
            following = f"{divider} {beginning}".strip()
            if key in required:
                first, later = self._rule(beginning), self._rule(following)
            else:
                empty = f" | {first}" if first else ""
                first = self._rule(
                    f"({beginning}){empty}" if first else f"({beginning})?"
                )
                later = self._rule(
                    f"({following}) | {later}" if later else f"({following})?"
                )
        return first

    def _any_members(self, member: Member) -> str:
        one = self._rule(member("", Parameter()))
        divider = quoted(self.written.separator)
        return f"({one} ({divider} {one})*)?" if divider else f"({one})*"

    # Values as text between delimiters

    def _text(self, parameter: Parameter, close: str) -> str:
        """Returns the grammar of a string value with the delimiter `close` after it. If
        the schema lists strings by `enum` or `const`, only these strings are
        allowed."""
        texts = [value for value in _choices(parameter) if isinstance(value, str)]
        if texts:
            return f"({' | '.join(map(json.dumps, texts))}) {quoted(close)}"
        return self._rule(until(close), lazy=True)

    def _as_json(self, parameter: Parameter) -> str:
        return self.json_grammar(
            {} if parameter.schema is None else parameter.schema, root=parameter.root
        )

    def _tagged(self, key: str, parameter: Parameter) -> str:
        written, kinds = self.written, parameter.kinds()
        signs = written.key_close
        is_text = not kinds or "string" in kinds
        kind = (
            "string" if is_text else next(iter(sorted(kinds & signs.keys())), "number")
        )
        between = signs.get(kind, next(iter(signs.values())))
        name = (
            f"{quoted(written.key_open + key + between)}"
            if key
            else self._any_key(written.key_open, between)
        )
        if is_text:
            return f"{name} {self._text(parameter, written.value_close)}"
        return f"{name} {self._as_json(parameter)} {quoted(written.value_close)}"

    def _any_key(self, before: str, after: str) -> str:
        return f"{quoted(before)} {_ANY_KEY} {quoted(after)}".strip()

    # Values as nested elements, <name>value</name>

    def _element(self, key: str, parameter: Parameter, depth: int = 0) -> str:
        sign = self.written.key_open
        if not key:
            value = self._rule(until(f"{sign}</"), lazy=True)
            return f"{quoted(f'{sign}<')} {_ANY_KEY} {quoted('>')} {value} {_ANY_KEY} {quoted('>')}"
        opened, close = f"{sign}<{key}>", f"{sign}</{key}>"
        kinds = parameter.kinds()
        if (
            depth < MAX_NESTING
            and "object" in kinds
            and "string" not in kinds
            and list(_properties(parameter))
        ):
            inner = self._members(
                parameter, lambda name, value: self._element(name, value, depth + 1)
            )
            return f"{quoted(opened)} {inner} {quoted(close)}"
        if depth < MAX_NESTING and "array" in kinds and "string" not in kinds:
            item = self._rule(self._element("item", parameter.items(), depth + 1))
            return f"{quoted(opened)} ({item})* {quoted(close)}"
        if kinds and not kinds & {"string", "object", "array"}:
            return f"{quoted(opened)} {self._as_json(parameter)} {quoted(close)}"
        return f"{quoted(opened)} {self._text(parameter, close)}"

    # Values as in Python and in Gemma's calls

    def _keyword(self, key: str, parameter: Parameter) -> str:
        name = quoted(f"{key}=") if key else self._any_key("", "=")
        kinds = parameter.kinds()
        if not self.written.quote or (kinds and "string" not in kinds):
            return f"{name} {self._as_json(parameter)}"
        texts = [
            value
            for value in _choices(parameter)
            if isinstance(value, str) and "'" not in value
        ]
        choices = [quoted(f"'{text}'") for text in texts] or [
            r"""/'[^']*'/""",
            r"""/"[^"]*"/""",
        ]
        return f"{name} ({' | '.join(choices)})"

    def _pair(self, key: str, parameter: Parameter, depth: int = 0) -> str:
        name = quoted(f"{key}:") if key else self._any_key("", ":")
        return f"{name} {self._relaxed(parameter, depth)}"

    def _relaxed(self, parameter: Parameter, depth: int) -> str:
        kinds, quote = parameter.kinds(), self.written.quote
        if depth < MAX_NESTING and "object" in kinds and "string" not in kinds:
            inner = self._members(
                parameter, lambda key, value: self._pair(key, value, depth + 1)
            )
            return f'"{{" {inner} "}}"'
        if depth < MAX_NESTING and "array" in kinds and "string" not in kinds:
            item = self._rule(self._relaxed(parameter.items(), depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kinds and not kinds & {"string", "object", "array"}:
            return self._as_json(parameter)
        return f"{quoted(quote)} {self._text(parameter, quote)}"


def _properties(whole: Parameter) -> Iterator[str]:
    """Yields the names of the properties that the schema describes or requires, each
    once, in the order of the schema. Includes the properties of the schemas that this
    schema combines or refers to."""
    names = dict[str, None]()
    for part in whole.parts():
        properties, required = part.get("properties"), part.get("required")
        names |= dict.fromkeys(properties if isinstance(properties, Mapping) else ())
        if isinstance(required, list):
            names |= dict.fromkeys(name for name in required if isinstance(name, str))
    yield from names


def _required(whole: Parameter) -> set[str]:
    """Returns the names of the properties that are required by the schema itself, or by
    a schema that it includes with `allOf` or "$ref"."""
    found = set[str]()
    for part in whole.parts(("allOf",)):
        required = part.get("required")
        if isinstance(required, list):
            found.update(name for name in required if isinstance(name, str))
    return found


def _is_open(whole: Parameter) -> bool:
    """Returns True if any property is allowed: no part of the schema has the keyword
    `properties` or sets `additionalProperties` to False."""
    return all(
        part.get("additionalProperties") is not False and "properties" not in part
        for part in whole.parts()
    )


def _choices(parameter: Parameter) -> list[Any]:
    """Returns the values of the first `enum` or `const` in the schema or in a schema
    that it includes with `allOf` or "$ref". Returns [] if there is none."""
    for part in parameter.parts(("allOf",)):
        if isinstance(part.get("enum"), list):
            return list(part["enum"])
        if "const" in part:
            return [part["const"]]
    return []
