"""Reads the tool calls that models write: JSON objects, names with arguments between
delimiters, Python's and Gemma's forms.

A reader receives the text of a block of calls. It returns the calls, or None if the
text is not a call. Such a text is normal text, not an error. `call_format.py` learns
from a chat template which readers to use.
"""

from __future__ import annotations

import ast
import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moegguf.errors import SchemaError
from moegguf.generate.json_references import References
from moegguf.generate.request import Tool, ToolCall

Call = tuple[str, dict[str, Any]]
"""A tool call: (name, arguments)."""

NAME_PATTERN = r"[\w./-]{1,128}"
# Maximum levels of nested values in the formats of ElementCalls and RelaxedCalls.
MAX_NESTING = 64


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    """Returns the value of a JSON number. Raises ValueError for a number that is too
    large for a double, because inf is not valid JSON."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


_DECODER = json.JSONDecoder(
    strict=False, parse_constant=_reject_constant, parse_float=_finite
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def ends_within_string(text: str) -> bool:
    """Returns True if the text contains the beginning of a JSON object and ends within
    one of its strings."""
    begin = text.find("{")
    return begin >= 0 and '"' in _STRING.sub("", text[begin:])


def json_value(text: str) -> Any:
    """Returns the value of a JSON text. Returns None for null, and for a text that is
    not valid JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


FoundValue = tuple[Any, int] | None
"""The value at a position of a text and the position after it, or None if there is no
complete value at this position."""


def json_at(text: str, at: int) -> FoundValue:
    """Returns the JSON value that begins at position `at`."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def literal_value(text: str) -> Any:
    """Returns the value of a JSON or Python literal. Returns `text` itself if it is
    neither, or if JSON cannot represent the value."""
    stripped = text.strip()
    value = json_value(stripped)
    if value is not None or stripped == "null":
        return value
    try:
        value = ast.literal_eval(stripped)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value


# The schemas of parameters, for formats whose values are not JSON

_MAX_REFERENCES = 16
_COMBINING = ("anyOf", "oneOf", "allOf")
_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


@dataclass(frozen=True)
class Parameter:
    """A tool's parameter, or a part of one, with its JSON schema."""

    schema: Any = None
    root: Any = None  # the whole schema, in which references are resolved

    def parts(
        self, combining: Sequence[str] = _COMBINING
    ) -> Iterator[Mapping[str, Any]]:
        """Yields the schema itself, and the schemas that it includes, directly or
        indirectly, by one of the keywords `combining` or by "$ref"."""
        todo = [(self.schema, 0)]
        while todo:
            schema, depth = todo.pop()
            if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
                continue
            yield schema
            inner = list[Any]()
            for key in combining:
                if isinstance(parts := schema.get(key), list | tuple):
                    inner += parts
            if isinstance(reference := schema.get("$ref"), str):
                with suppress(SchemaError):
                    inner.append(References(self.root).follow(reference))
            todo += [(part, depth + 1) for part in reversed(inner)]

    def kinds(self) -> set[str]:
        """Returns the JSON types that the schema and its parts name or imply, or an
        empty set if there are none."""
        found = set[str]()
        for part in self.parts():
            kind = part.get("type")
            found.update(
                kind
                if isinstance(kind, list)
                else [kind]
                if isinstance(kind, str)
                else []
            )
            values = part["enum"] if isinstance(part.get("enum"), list) else []
            if "const" in part:
                values = [*values, part["const"]]
            found.update(_KINDS.get(type(value), "object") for value in values)
            found.update(
                kind
                for kind, key in (("object", "properties"), ("array", "items"))
                if key in part
            )
        return found

    def property(self, name: str) -> Parameter:
        """Returns the parameter for a property of an object. If no schema describes the
        property, the returned parameter has no schema."""
        for part in self.parts():
            properties = part.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return Parameter(properties[name], self.root)
        return Parameter()

    def items(self) -> Parameter:
        """Returns the parameter for the items of a list. If no schema describes the
        items, the returned parameter has no schema."""
        return Parameter(
            next((part["items"] for part in self.parts() if "items" in part), None),
            self.root,
        )


Types = Mapping[str, Parameter]
"""{name of a tool: all of its parameters, with their schema}"""
NO_TYPES: Types = {}


def types_of(tools: Sequence[Tool]) -> Types:
    """Returns the parameters of all tools, with their schemas."""
    types = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        types[str(function.get("name"))] = Parameter(parameters, parameters)
    return types


def parameter_value(text: str, parameter: Parameter) -> Any:
    """Converts the text of a parameter to its value. If the schema allows strings but
    no other type except null, the text stays a string; only the text "null" becomes
    None if null is allowed. Otherwise, and without a schema, a text that is JSON or a
    Python literal is converted."""
    kinds = parameter.kinds()
    if "string" in kinds and not kinds & {
        "integer",
        "number",
        "boolean",
        "object",
        "array",
    }:
        return None if "null" in kinds and text.strip() == "null" else text
    return literal_value(text)


# Calls as JSON


def call_of(value: Any, *, name_is_key: bool = False) -> Call | None:
    """Converts a JSON object to a call: {"name", "arguments"}, {"function": {...}} or
    variants of them. If `name_is_key` is True, also converts {NAME: arguments}. Returns
    None if `value` is not a call."""
    if not isinstance(value, dict):
        return None
    if name_is_key and len(value) == 1:
        ((key, arguments),) = value.items()
        if isinstance(arguments, dict) and key != "function":
            return key, arguments
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("tool_name", value.get("function")))
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, arguments


def calls_in(value: Any, *, name_is_key: bool = False) -> list[Call] | None:
    """Returns the calls in a JSON object or a list of objects, or None if any of these
    objects is not a call."""
    calls = [
        call_of(item, name_is_key=name_is_key)
        for item in (value if isinstance(value, list) else [value])
    ]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else None


# Readers of calls

_SEPARATORS = re.compile(r"[\s,;]*")


def _behind(pattern: str | re.Pattern[str], text: str, at: int) -> int:
    """Returns the position after the match of a pattern at position `at`, or `at`
    itself if the pattern does not match."""
    match = re.compile(pattern).match(text, at)
    return match.end() if match else at


def pattern_of(text: str) -> str:
    """Returns a regular expression for the delimiter `text`. Where `text` has
    whitespace, the expression matches any whitespace or none. Where `text` has a
    number, the expression matches any number."""
    parts = re.split(r"(\s+|\d+)", text)
    return "".join(
        r"\s*" if part.isspace() else r"\d+" if part.isdigit() else re.escape(part)
        for part in parts
    )


Found = tuple[list[Call], int] | None
"""The calls at a position of a text and the position after them, or None if there is no
complete call at this position."""


class Reader:
    """Base class: reads the calls in a block, which is given without its outer
    delimiters. Subclasses implement `_next`."""

    def __call__(
        self, text: str, types: Types = NO_TYPES, *, final: bool = False
    ) -> list[Call] | None:
        """Returns the calls in a block, or None if the text is not a call. `final`:
        True if the answer has ended, so that delimiters at the end of the text may be
        missing."""
        calls = list[Call]()
        at = 0
        while (at := _behind(_SEPARATORS, text, at)) < len(text):
            found = self._next(text, at, types, final)
            if found is None:
                return None
            more, at = found
            calls += more
        return calls or None

    def _next(self, text: str, at: int, types: Types, final: bool) -> Found:
        """Returns the calls that begin at position `at`. `final`: see `__call__`."""
        raise NotImplementedError

    def is_open(self, text: str) -> bool:
        """Returns True if the text ends within a value. A closing delimiter after it
        may then be a part of the value."""
        return ends_within_string(text)


@dataclass(frozen=True)
class JsonCalls(Reader):
    """Reads JSON objects and lists of them. `name_is_key`: True if an object may have
    the form {NAME: arguments}."""

    name_is_key: bool = False

    def _next(self, text: str, at: int, types: Types, final: bool) -> Found:
        found = json_at(text, at)
        calls = calls_in(found[0], name_is_key=self.name_is_key) if found else None
        return None if found is None or calls is None else (calls, found[1])


@dataclass(frozen=True)
class MarkedCalls(Reader):
    """Base class for readers of calls whose names are between delimiters. All
    delimiters are regular expressions."""

    before: str = ""  # delimiter before a name
    between: str = ""  # delimiter between name and arguments
    after: str = ""  # delimiter after the arguments


@dataclass(frozen=True)
class NamedCalls(MarkedCalls):
    """Reads calls that are a name followed by a JSON object with the arguments."""

    def _next(self, text: str, at: int, types: Types, final: bool) -> Found:
        begin = re.compile(
            rf"(?:{self.before})?\s*({NAME_PATTERN}){self.between}\s*(?=\{{)"
        ).match(text, at)
        found = json_at(text, begin.end()) if begin else None
        if begin is None or found is None or not isinstance(found[0], dict):
            return None
        return [(begin[1], found[0])], _behind(rf"\s*(?:{self.after})?", text, found[1])


@dataclass(frozen=True)
class TaggedCalls(MarkedCalls):
    """Reads calls that are a name followed by arguments, each between its own
    delimiters.

    If `key_close` has a group, the group is the name of the value's type. `key_close`
    matches whitespace only if the template writes it, because other whitespace belongs
    to the value.
    """

    key_open: str = ""  # delimiter before an argument's name
    key_close: str = ""  # text between an argument's name and its value
    value_close: str = ""  # delimiter after an argument's value
    # Text of the group in `key_close` that marks a value as a string; "" without a
    # group.
    string_sign: str = ""

    def _next(self, text: str, at: int, types: Types, final: bool) -> Found:
        begin = re.compile(
            rf"(?:{self.before})?\s*({NAME_PATTERN})\s*{self.between}"
        ).match(text, at)
        if begin is None:
            return None
        key = re.compile(
            rf"\s*{self.key_open}\s*([^<>\"\n]+?)\s*{self.key_close}", re.DOTALL
        )
        # The delimiter ends a value only if another argument or the end of the call
        # follows; elsewhere it is part of the value.
        close = re.compile(
            rf"{self.value_close}(?=\s*(?:{self.key_open}|{self.after or chr(36)}|$))"
        )
        arguments = dict[str, Any]()
        at = begin.end()
        body = _behind(_SEPARATORS, text, at)
        if text.startswith("{", body) and (whole := json_at(text, body)):
            arguments, at = whole
        while argument := key.match(text, at):
            value_end = close.search(text, argument.end())
            if value_end is None and not final:
                return None
            value = text[argument.end() : value_end.start() if value_end else len(text)]
            at = value_end.end() if value_end else len(text)
            parameter = types.get(begin[1], Parameter()).property(argument[1])
            arguments[argument[1]] = self._value(argument, value, parameter)
        at = _behind(rf"\s*(?:{self.after})?\s*", text, at)
        return None if at == begin.end() < len(text) else ([(begin[1], arguments)], at)

    def is_open(self, text: str) -> bool:
        """Returns True if the last argument's value has no closing delimiter yet."""
        keys = [match.end() for match in re.finditer(self.key_open, text)]
        return bool(keys) and re.search(self.value_close, text[keys[-1] :]) is None

    def _value(self, argument: re.Match[str], text: str, parameter: Parameter) -> Any:
        if text.startswith("<![CDATA[") and text.endswith("]]>"):
            return text[9:-3]
        kind = argument[2] if argument.re.groups > 1 else None
        if self.string_sign and kind == self.string_sign:
            return text
        return parameter_value(text, Parameter() if kind else parameter)


@dataclass(frozen=True)
class ElementCalls(MarkedCalls):
    """Reads calls in MiniMax-M3's format: each argument is an element
    <name>value</name>, nested for objects and lists."""

    sign: str = ""  # text before each tag

    def _next(self, text: str, at: int, types: Types, final: bool) -> Found:
        begin = re.compile(
            rf"(?:{self.before})?\s*({NAME_PATTERN}){self.between}"
        ).match(text, at)
        if begin is None:
            return None
        arguments = dict[str, Any]()
        at = begin.end()
        while element := self._element(text, at, final):
            key, inner, at = element
            parameter = types.get(begin[1], Parameter()).property(key)
            arguments[key] = self._value(inner, parameter, 0)
        close = re.compile(rf"\s*(?:{self.after})").match(text, at)
        at = close.end() if close else _behind(_SEPARATORS, text, at)
        return (
            None
            if close is None and not (final and at == len(text))
            else ([(begin[1], arguments)], at)
        )

    def is_open(self, text: str) -> bool:
        """Returns True if the last tag in the text opens an element."""
        marks = re.findall(rf"{re.escape(self.sign)}<(/?)", text)
        return bool(marks) and not marks[-1]

    def _element(
        self, text: str, at: int, final: bool = False
    ) -> tuple[str, str, int] | None:
        """Returns the name and the content of the element at position `at`, and the
        position after it. Returns None if there is no element, or if it is not closed
        and `final` is False."""
        sign = re.escape(self.sign)
        opened = re.compile(rf"\s*{sign}<([^<>/\s]+)>").match(text, at)
        if opened is None:
            return None
        depth = 1
        for mark in re.compile(rf"{sign}<(/?){re.escape(opened[1])}>").finditer(
            text, opened.end()
        ):
            depth += -1 if mark[1] else 1
            if depth == 0:
                return opened[1], text[opened.end() : mark.start()], mark.end()
        return (opened[1], text[opened.end() :], len(text)) if final else None

    def _value(self, text: str, parameter: Parameter, depth: int) -> Any:
        elements = list[tuple[str, str]]()
        at = 0
        while depth < MAX_NESTING and (element := self._element(text, at)):
            key, inner, at = element
            elements.append((key, inner))
        kinds = parameter.kinds()
        if not elements or text[at:].strip():
            if (
                not text.strip()
                and kinds & {"object", "array"}
                and "string" not in kinds
            ):
                return {} if "object" in kinds else []
            return parameter_value(text, parameter)
        is_list = (
            "array" in kinds
            if kinds & {"object", "array"}
            else {key for key, _ in elements} == {"item"}
        )
        if is_list:
            return [
                self._value(inner, parameter.items(), depth + 1)
                for _, inner in elements
            ]
        return {
            key: self._value(inner, parameter.property(key), depth + 1)
            for key, inner in elements
        }


# Calls as in Python: [name(key='value', ...)]

_PYTHON_NAME = re.compile(rf"\[*\s*({NAME_PATTERN})\(")
_PYTHON_KEY = re.compile(r"[\s,]*(\w+)\s*=\s*")
_PYTHON_END = re.compile(r"\s*\)[\s\],]*")
_QUOTED_END = r"(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w./-]+\(|\]|$)))"
_PYTHON_VALUE = re.compile(r"[\s\S]+?" + _QUOTED_END)


@dataclass(frozen=True)
class PythonCalls(MarkedCalls):
    """Reads calls of Python functions with named arguments. `raw`: True if strings
    between quotes have no escapes."""

    raw: bool = False

    def _next(self, text: str, at: int, types: Types, final: bool) -> Found:
        begin = _PYTHON_NAME.match(text, at)
        if begin is None:
            return None
        arguments = dict[str, Any]()
        at = begin.end()
        while key := _PYTHON_KEY.match(text, at):
            found = self._value(text, key.end())
            if found is None:
                return None
            arguments[key[1]], at = found
        end = _PYTHON_END.match(text, at)
        return ([(begin[1], arguments)], end.end()) if end else None

    def _value(self, text: str, at: int) -> FoundValue:
        quote = text[at : at + 1]
        if quote and quote in "'\"":
            end = re.compile(
                ("" if self.raw else r"(?<!\\)") + quote + _QUOTED_END
            ).search(text, at + 1)
            if end is None:
                return None
            value = text[at + 1 : end.start()]
            return (value if self.raw else _unescaped(value, quote)), end.end()
        if found := json_at(text, at):
            return found
        match = _PYTHON_VALUE.match(text, at)
        return (literal_value(match[0]), match.end()) if match else None


def _unescaped(text: str, quote: str) -> str:
    """Returns the value of the Python string literal with the content `text`. If this
    literal is not valid, returns `text` itself."""
    quoted = f"{quote * 3}{text}{quote * 3}"
    value = literal_value(quoted)
    return value if isinstance(value, str) and value != quoted else text


# Calls as Gemma 4 writes them: call:name{key:<|"|>text<|"|>,other:[1,2]}

_RELAXED_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:\s*")
_RELAXED_WORD = re.compile(r"[^,{}\[\]]*")


@dataclass(frozen=True)
class RelaxedCalls(MarkedCalls):
    """Reads calls in Gemma's format: the keys of objects have no quotes, and the text
    `quote` is before and after each string."""

    quote: str = ""

    def _next(self, text: str, at: int, types: Types, final: bool) -> Found:
        begin = re.compile(rf"(?:{self.before})\s*({NAME_PATTERN})\s*(?=\{{)").match(
            text, at
        )
        found = self._value(text, begin.end(), 0) if begin else None
        if begin is None or found is None or not isinstance(found[0], dict):
            return None
        return [(begin[1], found[0])], found[1]

    def _value(self, text: str, at: int, depth: int) -> FoundValue:
        if depth > MAX_NESTING:
            return None
        at = _behind(_SEPARATORS, text, at)
        if text.startswith(self.quote, at):
            begin = at + len(self.quote)
            end = text.find(self.quote, begin)
            return None if end < 0 else (text[begin:end], end + len(self.quote))
        if text[at : at + 1] in ("{", "["):
            return self._collection(text, at, depth)
        word = _RELAXED_WORD.match(text, at)
        return (
            (literal_value(word[0].strip()), word.end())
            if word and word[0].strip()
            else None
        )

    def _collection(self, text: str, at: int, depth: int) -> FoundValue:
        is_object = text[at] == "{"
        pairs = list[tuple[str, Any]]()
        at += 1
        while not text.startswith(
            "}" if is_object else "]", at := _behind(_SEPARATORS, text, at)
        ):
            name = ""
            if is_object:
                key = _RELAXED_KEY.match(text, at)
                if key is None:
                    return None
                name, at = (
                    key[1].removeprefix(self.quote).removesuffix(self.quote),
                    key.end(),
                )
            found = self._value(text, at, depth + 1)
            if found is None:
                return None
            value, at = found
            pairs.append((name, value))
        return (dict(pairs) if is_object else [value for _, value in pairs]), at + 1


# Formats that models use even if their template renders another one: Qwen3-Coder's, and
# GLM's within <tool_call>
FUNCTIONS = TaggedCalls(
    r"<function=", r">\n?", r"</function>", r"<parameter=", r">\n?", r"\n?</parameter>"
)
ARGUMENT_PAIRS = TaggedCalls(
    "", "", "", r"<arg_key>", r"</arg_key>\s*<arg_value>", r"</arg_value>"
)
JSON_CALLS = JsonCalls()


class MistralCalls(NamedCalls):
    """Reads the text after Mistral's [TOOL_CALLS]: names that are each followed by a
    JSON object, or JSON objects and lists."""

    def _next(self, text: str, at: int, types: Types, final: bool) -> Found:
        named = super()._next(text, at, types, final)
        begin = _behind(rf"{self.before}\s*", text, at)
        return named or JSON_CALLS._next(text, begin, types, final)


MISTRAL_CALLS = MistralCalls(
    r"(?:\[TOOL_CALLS\])?", r"(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?"
)

# A string, whose closing quote is the group; or a bracket.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*("|$)|[\[\]{}]', re.DOTALL)
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_CUT_MEMBER = re.compile(
    r'(?:(?<=[{\[])|,)\s*(?:"(?:[^"\\]|\\.)*"?\s*:?\s*)?[\w.+-]*$', re.DOTALL
)


def closed_json(text: str) -> Iterator[str]:
    """Yields two completions of a truncated JSON text, which may be valid JSON: first
    with all strings and brackets closed, then also without the last, incomplete
    member."""
    yield _closed(text)
    yield _closed(_CUT_MEMBER.sub("", text))


def _closed(text: str) -> str:
    closers, within = list[str](), False
    for match in _BRACKETS.finditer(text):
        token = match[0]
        within = match[1] == ""
        if token in ("{", "["):
            closers.append("}" if token == "{" else "]")
        elif token in ("}", "]") and closers:
            closers.pop()
    if within:
        text = f'{_CUT_ESCAPE.sub("", text)}"'
    return text + "".join(reversed(closers))


def tool_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """Returns a call with a new random id."""
    return ToolCall(f"call_{uuid.uuid4().hex[:8]}", name, arguments)
