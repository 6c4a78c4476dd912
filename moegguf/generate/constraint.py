"""The required format of an answer (JSON, a JSON schema, a tool call) as a grammar in llguidance's Lark dialect.

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
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.errors import CapabilityError, OptionError, SchemaError
from moegguf.generate.call_format import HARMONY_CALL, AnswerFormat, answer_format
from moegguf.generate.call_grammar import CallGrammar, quoted, until
from moegguf.generate.continuation import Continuation
from moegguf.generate.request import GenerationRequest

MAX_TOOLS = 128

_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Constraint:
    """The required format of an answer. `lark`: a grammar in llguidance's Lark dialect, start rule "start". `begun`: a
    part of the answer that is there already, in the message that it continues."""

    lark: str
    begun: str = ""


def constraint_for(
    request: GenerationRequest, template: str | None, prompt_end: str = "", continuation: Continuation | None = None
) -> Constraint | None:
    """The required format of an answer to `request`, None for none. The grammar is compiled by `Matcher`.

    `template`: the model's; it determines the marks of thinking, which may come first, and the format of tool calls. A
    named or required tool is called once. `prompt_end`: the end of the prompt, which may have begun the thinking;
    `continuation`: of an answer that continues a message, whose text then begins the format.

    Raises SchemaError for an invalid or too large schema, CapabilityError when `tool_choice` names none of the tools,
    OptionError when a call would have to begin within a text.
    """
    forced = bool(request.tools) and request.tool_choice not in ("auto", "none")
    if request.format is None and not forced:
        return None
    form, begun = answer_format(template) if template else None, continuation.content if continuation else ""
    if begun and forced:
        raise OptionError(
            "an answer that continues a message cannot be a tool call; leave out tool_choice or the text."
        )
    schemas, alternatives = _Schemas(), list[str]()
    if request.format is not None and not forced:
        if isinstance(request.format, str) and request.format != "json":
            raise SchemaError(f'a format is "json" or a JSON schema, but is {request.format[:50]!r}.')
        body = schemas.grammar({"type": "object"} if request.format == "json" else request.format)
        alternatives.append(body if begun or form is None else _text(form, prompt_end, body))
    rules = list[str]()
    if request.tools and request.tool_choice != "none":
        calls = _Calls(form or answer_format(""), prompt_end, schemas)
        alternatives += [calls.call(tool) for tool in _allowed_tools(request.tools, request.tool_choice)]
        rules += calls.grammar.rules
    rules += [f"alternative_{n}: {alternative}" for n, alternative in enumerate(alternatives)]
    rules.append("answer: " + " | ".join(f"alternative_{n}" for n in range(len(alternatives))))
    start = ["start: answer"] if begun or form is None else _start(form, request.think, prompt_end, continuation)
    lark = "\n".join([*start, *rules]) + "\n"
    if len(lark) > MAX_GRAMMAR_BYTES:
        raise SchemaError(
            f"the JSON schemas of a request have up to {MAX_GRAMMAR_BYTES} bytes; send fewer, or smaller."
        )
    return Constraint(lark, begun)


def _text(form: AnswerFormat, prompt_end: str, body: str) -> str:
    """Returns the grammar of a text with the model's marks around it."""
    if form.is_harmony:
        return f'"<|channel|>final" " <|constrain|>json"? "<|message|>" {body}'
    opened = form.text_open.removeprefix(form.begun(prompt_end))
    begun = bool(opened) and prompt_end.rstrip().endswith(opened.strip())
    return " ".join(filter(None, ["" if begun else quoted(opened), body, quoted(form.text_close)]))


def _allowed_tools(tools: Sequence[Mapping[str, Any]], choice: str) -> list[Mapping[str, Any]]:
    functions = [tool.get("function", tool) for tool in tools]
    if len(functions) > MAX_TOOLS:
        raise SchemaError(f"a request has up to {MAX_TOOLS} tools, but this one has {len(functions)}.")
    if choice in ("auto", "required"):
        return functions
    named = [function for function in functions if function.get("name") == choice]
    if not named:
        raise CapabilityError(f"tool_choice names {choice!r}, which is not among the tools of the request.")
    return named


class _Calls:
    """The grammars of a model's tool calls, as alternatives of an answer."""

    def __init__(self, form: AnswerFormat, prompt_end: str, schemas: _Schemas) -> None:
        written = form.tools[0].written
        if form.is_harmony:
            written = HARMONY_CALL
        self._before = written.before.lstrip("\n").removeprefix(form.begun(prompt_end))
        if form.empties_text:  # marks of an empty text stand before a call
            begun = prompt_end.rstrip().endswith(form.text_open.strip())
            self._before = ("" if begun else form.text_open) + form.text_close + self._before
        self.grammar = CallGrammar(written, schemas.grammar)

    def call(self, function: Mapping[str, Any]) -> str:
        """Returns the grammar of a call. Raises SchemaError for a tool without a usable name or schema."""
        name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise SchemaError(f"a tool has a name of up to 128 letters, digits and _.:/-, not {str(name)[:50]!r}.")
        if not isinstance(parameters, Mapping):
            raise SchemaError(f"the parameters of the tool {name!r} are no JSON schema.")
        return self.grammar.call(name, parameters, self._before)


def _start(
    form: AnswerFormat, think: bool | str | None, prompt_end: str, continuation: Continuation | None
) -> list[str]:
    """Returns the rules before `answer`: thinking may come first, unless it is switched off."""
    in_thinking = continuation is not None and continuation.in_thinking
    if form.is_harmony:
        if in_thinking:
            return ['start: thought "<|start|>assistant" answer', f"thought[lazy]: {until('<|end|>')}"]
        thinking = '("<|channel|>analysis<|message|>" thought "<|start|>assistant")?'
        return [f"start: {thinking} answer", f"thought[lazy]: {until('<|end|>')}"]
    marks = form.think
    begun = in_thinking or (marks is not None and marks.begun_by(prompt_end))
    if marks is None or (think is False and not begun):
        return ["start: answer"]
    thought = r"thought /[ \n]{0,4}/"
    first = thought if begun else f"({quoted(marks.open)} {thought})?"
    return [f"start: {first} answer", f"thought[lazy]: {until(marks.close)}"]


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


class _Schemas:
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
