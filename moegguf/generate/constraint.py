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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from moegguf.errors import CapabilityError, OptionError, SchemaError
from moegguf.generate.request import GenerationRequest
from moegguf.generate.template import Continuation
from moegguf.generate.tool_calls import formats_of
from moegguf.gguf.chat_template import HARMONY, think_marks_of

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
    text, begun = template or "", continuation.content if continuation else ""
    if begun and forced:
        raise OptionError(
            "an answer that continues a message cannot be a tool call; leave out tool_choice or the text."
        )
    cost = SchemaCost()
    alternatives = []
    if request.format is not None and not forced:
        if isinstance(request.format, str) and request.format != "json":
            raise SchemaError(f'a format is "json" or a JSON schema, but is {request.format[:50]!r}.')
        body = json_grammar({"type": "object"} if request.format == "json" else request.format, cost)
        final = '"<|channel|>final" " <|constrain|>json"? "<|message|>" ' if HARMONY in text and not begun else ""
        alternatives.append(final + body)
    if request.tools and request.tool_choice != "none":
        alternatives += [_call(tool, text, cost) for tool in _allowed_tools(request.tools, request.tool_choice)]
    rules = [f"alternative_{n}: {alternative}" for n, alternative in enumerate(alternatives)]
    rules.append("answer: " + " | ".join(f"alternative_{n}" for n in range(len(alternatives))))
    start = ["start: answer"] if begun else _start(request.think, text, prompt_end, continuation)
    return Constraint("\n".join([*start, *rules]) + "\n", begun)


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


def _call(function: Mapping[str, Any], template: str, cost: SchemaCost) -> str:
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise SchemaError(f"a tool has a name of up to 128 letters, digits and _.:/-, not {str(name)[:50]!r}.")
    if not isinstance(parameters, Mapping):
        raise SchemaError(f"the parameters of the tool {name!r} are no JSON schema.")
    before, between, after = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""
    if HARMONY not in template:
        before, between, after = formats_of(template)[0].call_parts(template)
    body = json_grammar({"type": "object", **parameters}, cost)
    return " ".join([_quoted(before + name + between), body, _quoted(after)])


def _start(think: bool | str | None, template: str, prompt_end: str, continuation: Continuation | None) -> list[str]:
    """The rules before `answer`: thinking may come first, unless it is switched off."""
    in_thinking = continuation is not None and continuation.in_thinking
    if HARMONY in template:
        if in_thinking:
            return ['start: thought "<|start|>assistant" answer', _until("<|end|>")]
        return ['start: ("<|channel|>analysis<|message|>" thought "<|start|>assistant")? answer', _until("<|end|>")]
    marks = think_marks_of(template)
    begun = in_thinking or (marks is not None and marks.begun_by(prompt_end))
    if marks is None or (think is False and not begun):
        return ["start: answer"]
    thought = r"thought /[ \n]{0,4}/"
    first = thought if begun else f"({_quoted(marks.open)} {thought})?"
    return [f"start: {first} answer", _until(marks.close)]


def _until(mark: str) -> str:
    """Any text up to the first `mark`, with it."""
    return f"thought[lazy]: /(?s:.*)/ {_quoted(mark)}"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


MAX_SCHEMA_BYTES = 64 << 10
MAX_REQUEST_BYTES = 512 << 10  # of all schemas of a request: those of its tools, too
MAX_DEPTH = 64
MAX_SUBSCHEMAS = 10_000  # of a request, each counted as often as it is used
MAX_MULTIPLES = 100_000  # sum of a request's `multipleOf`, in units of their last digits: one state of a lexer each
MAX_ITEMS = 10_000  # of arrays that count them; llguidance 1.7 and older take minutes for far more
# Some of llguidance's compiling is outside of its limits (sampler.py), and nothing can stop it in this process: each
# text schema more that has to hold in one place doubles the time (16 take 0.6 s, 20 more than 12 s), and that of a
# pattern grows with the square of its length (16,000 characters take 0.8 s).
MAX_INTERSECTED = 8
MAX_PATTERN_CHARACTERS = 16_000
MAX_NAME_PATTERN_CHARACTERS = 1_000  # of a key of patternProperties: 60,000 take more than a minute
MAX_NAME_PATTERNS = 250_000  # of a request, their number x their characters: each pair is intersected
MAX_ALTERNATIVES = 1_000  # of anyOf and oneOf, multiplied out where allOf combines them

WHITESPACE = r" |\n[ \t]{0,20}"
"""Allowed once between the parts of JSON: without a bound some models write blanks until the token limit."""


class SchemaCost:
    """What the schemas of one request cost together, by kind."""

    def __init__(self) -> None:
        self._sums = Counter[str]()

    def add(self, kind: str, n: int, most: int, message: str) -> int:
        """The sum of this kind with `n` more. Raises SchemaError with `message` where it is above `most`."""
        self._sums[kind] += n
        if self._sums[kind] > most:
            raise SchemaError(message)
        return self._sums[kind]


def json_grammar(schema: Any, cost: SchemaCost) -> str:
    """The grammar of JSON that follows `schema`; `cost`: of all schemas of the request. Raises SchemaError."""
    _check(schema, cost)
    try:
        form = {**_Normalizer(schema, cost).result(), "x-guidance": _json_options()}
    except RecursionError:
        raise SchemaError("the JSON schema is too deep with its references resolved; simplify it.") from None
    return f"%json {json.dumps(form)}"


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
    return {**blanks, "lenient": True}  # ignores unknown formats


def _check(schema: object, cost: SchemaCost) -> None:
    if _depth(schema) > MAX_DEPTH:
        raise SchemaError(f"a JSON schema nests lists and objects up to {MAX_DEPTH} deep; this one is deeper.")
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the JSON schema is not JSON ({error}).") from error
    if size > MAX_SCHEMA_BYTES:
        raise SchemaError(f"a JSON schema has up to {MAX_SCHEMA_BYTES} bytes; this one has {size}.")
    most = MAX_REQUEST_BYTES
    cost.add("bytes", size, most, f"the JSON schemas of a request have up to {most} bytes together; send fewer tools.")


def _depth(value: object, depth: int = 0) -> int:
    """Nesting of lists and objects, counted up to just above the limit."""
    if depth > MAX_DEPTH or not isinstance(value, Mapping | list | tuple):
        return depth
    items = value.values() if isinstance(value, Mapping) else value
    return max((_depth(item, depth + 1) for item in items), default=depth + 1)


_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_KEPT = {"type", "enum", "const"}.union(*_KEYWORDS.values())
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_OPEN = ("additionalProperties", "patternProperties")
_Json = dict[str, Any]


class _Normalizer:
    """Rewrites a JSON schema so that llguidance reads it as the module's docstring says.

    Keywords beside `$ref`, `allOf` and `anyOf` are expanded into alternatives, each a list of plain schemas that must
    all hold, because only all of them together name the properties of an object. Any other reference becomes a
    definition.
    """

    def __init__(self, root: Any, cost: SchemaCost) -> None:
        self._root = root
        self._cost = cost
        self._names: dict[str, str] = {}  # references, to the names of their definitions
        self._undefined: list[str] = []
        self._weights: dict[int, int] = {}  # of parts of `root`, by their id

    def result(self) -> _Json:
        """The whole schema. Raises SchemaError for an invalid schema, or one that is too large when expanded."""
        schema = self._schema(self._root)
        definitions = {}
        while self._undefined:
            reference = self._undefined.pop()
            definitions[self._names[reference]] = self._schema(self._resolve(reference))
        return {"allOf": [schema], "$defs": definitions}

    def _schema(self, schema: Any) -> Any:
        """A schema in a place of its own: a property's, an item's, a definition."""
        if isinstance(self._counted(schema), bool):
            return schema
        combining = [key for key in _COMBINING if key in schema]
        if len(combining) == 1 and not _kept(schema):
            if "$ref" in schema:
                return self._reference(schema["$ref"])
            if "allOf" not in schema:
                return {"anyOf": [self._schema(part) for part in _parts(schema, combining[0])]}
        alternatives = self._expanded(schema, ()) if combining else [[_kept(schema)]]
        merged = [self._merged(parts) for parts in alternatives]
        return merged[0] if len(merged) == 1 else {"anyOf": merged}

    def _counted(self, schema: Any) -> Any:
        most = MAX_SUBSCHEMAS
        self._cost.add(
            "parts", 1, most, f"the JSON schemas of a request have up to {most} parts, counting repetitions."
        )
        if not isinstance(schema, bool | Mapping):
            raise SchemaError(f"a JSON schema consists of objects, but one part is {str(schema)[:50]!r}.")
        return schema

    def _expanded(self, schema: Any, within: tuple[str, ...]) -> list[list[Any]]:
        """Alternatives, each a list of schemas without combining keywords that must all hold.

        `within`: the references followed so far, which may not recur.
        """
        if isinstance(self._counted(schema), bool):
            return [[schema]]
        own = _kept(schema)
        alternatives: list[list[Any]] = [[own] if own else []]
        for key in (key for key in schema if key in _COMBINING):
            if key == "$ref":
                target, inside = self._resolve(schema[key]), (*within, schema[key])
                if schema[key] in within:
                    raise SchemaError("the JSON schema refers to itself without an object or a list between.")
                alternatives = _product(alternatives, self._expanded(target, inside))
            elif key == "allOf":
                for part in _parts(schema, key):
                    alternatives = _product(alternatives, self._expanded(part, within))
            else:
                others = [other for part in _parts(schema, key) for other in self._expanded(part, within)]
                alternatives = _product(alternatives, others)
        return alternatives

    def _merged(self, parts: list[Any]) -> Any:
        given = [part for part in parts if isinstance(part, Mapping)]
        if len(given) > 1 and sum(map(self._weigh, given)) > MAX_INTERSECTED:
            raise SchemaError(
                f"`allOf` of a JSON schema combines up to {MAX_INTERSECTED} parts with patterns, formats or lengths of"
                " texts; write fewer, or one pattern for all."
            )
        keys = set[str]().union(*given)
        rest: _Json = {}
        if not keys & {"type", "enum", "const"}:
            kind = next((kind for kind, keywords in _KEYWORDS.items() if keys.intersection(keywords)), None)
            rest = {"type": kind} if kind else {}
        names = dict.fromkeys(itertools.chain.from_iterable(map(_property_names, given)), True)
        if names and not keys.intersection(_OPEN):
            rest |= {"properties": names, "additionalProperties": False}
        forms = [part if isinstance(part, bool) else self._plain(part) for part in parts]
        if len(forms) == 1 and isinstance(forms[0], dict):
            properties = (
                {"properties": rest["properties"] | forms[0].get("properties", {})} if "properties" in rest else {}
            )
            return {**rest, **forms[0], **properties}
        return {"allOf": [*forms, rest]}

    def _weigh(self, schema: Mapping[str, Any]) -> int:
        """At most how many schemas of texts have to hold in one place of `schema`."""
        mapped = [schema[key] for key in ("properties", "patternProperties") if isinstance(schema.get(key), Mapping)]
        listed = {
            key: schema[key] for key in ("items", "prefixItems", *_COMBINING) if isinstance(schema.get(key), list)
        }
        children = [*listed.get("items", ()), *listed.get("prefixItems", ()), schema.get("items")]
        children += [schema.get("additionalProperties"), *itertools.chain(*(names.values() for names in mapped))]
        choices = [*listed.get("anyOf", ()), *listed.get("oneOf", ())]
        own = int(any(key in schema for key in _KEYWORDS["string"]))
        weight = max([own, *map(self._weight, children)]) + max(map(self._weight, choices), default=0)
        weight += sum(map(self._weight, listed.get("allOf", ())))
        return weight + (self._weight(self._resolve(schema["$ref"])) if "$ref" in schema else 0)

    def _weight(self, part: Any) -> int:
        """`_weigh` for a part of the whole schema, which stays in memory; 0 within itself."""
        if not isinstance(part, Mapping):
            return 0
        if id(part) not in self._weights:
            self._weights[id(part)] = 0
            self._weights[id(part)] = self._weigh(part)
        return self._weights[id(part)]

    def _plain(self, schema: Mapping[str, Any]) -> _Json:
        form = dict(schema)
        for key in ("minItems", "maxItems"):
            if isinstance(form.get(key), int | float) and form[key] > MAX_ITEMS:
                raise SchemaError(f"`{key}` of a JSON schema is up to {MAX_ITEMS}, but is {form[key]}; leave it out.")
        if isinstance(form.get("pattern"), str) and len(form["pattern"]) > MAX_PATTERN_CHARACTERS:
            raise SchemaError(
                f"`pattern` of a JSON schema has up to {MAX_PATTERN_CHARACTERS} characters, but one has"
                f" {len(form['pattern'])}; for a choice of texts write an enum."
            )
        if type(form.get("multipleOf")) in (int, float):
            value = form["multipleOf"]
            digits = int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))
            self._cost.add(
                "multiples", digits, MAX_MULTIPLES,
                f"`multipleOf` of a JSON schema costs too much with {value!r}: without zeros and point its digits, and"
                f" those of all others, sum up to {MAX_MULTIPLES} at most; leave it out.",
            )  # fmt: skip
        for name in form["patternProperties"] if isinstance(form.get("patternProperties"), Mapping) else ():
            self._add_name_pattern(name)
        for key in ("properties", "patternProperties"):
            if isinstance(form.get(key), Mapping):
                form[key] = {name: self._schema(part) for name, part in form[key].items()}
        if isinstance(form.get("items"), list):  # a tuple in drafts before 2020-12
            form["prefixItems"] = form.pop("items")
        if isinstance(form.get("prefixItems"), list):
            form["prefixItems"] = [self._schema(item) for item in form["prefixItems"]]
            form = {"minItems": len(form["prefixItems"]), "items": False, **form}
        for key in ("items", "additionalProperties"):
            if key in form:
                form[key] = self._schema(form[key])
        return form

    def _add_name_pattern(self, pattern: str) -> None:
        """A key of `patternProperties`."""
        most, n = MAX_NAME_PATTERN_CHARACTERS, self._cost.add("name patterns", 1, MAX_NAME_PATTERNS, "")
        if len(pattern) > most:
            raise SchemaError(
                f"a key of `patternProperties` has up to {most} characters, but one has {len(pattern)}; for a choice of"
                " names write `properties`."
            )
        self._cost.add(
            "characters of name patterns", len(pattern), MAX_NAME_PATTERNS // n,
            f"`patternProperties` of a request's JSON schemas cost too much: the number of their keys and that of their"
            f" characters have a product of up to {MAX_NAME_PATTERNS}; write fewer or shorter ones.",
        )  # fmt: skip

    def _reference(self, reference: Any) -> _Json:
        self._resolve(reference)
        if reference not in self._names:
            self._names[reference] = str(len(self._names))
            self._undefined.append(reference)
        return {"$ref": f"#/$defs/{self._names[reference]}"}

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


def _kept(schema: Mapping[str, Any]) -> _Json:
    """The supported keywords except combining ones; null counts as absent, because some clients send it."""
    return {key: value for key, value in schema.items() if key in _KEPT and (value is not None or key == "const")}


def _parts(schema: Mapping[str, Any], key: str) -> list[Any]:
    parts = schema[key]
    if not isinstance(parts, list) or not parts:
        raise SchemaError(f"`{key}` of a JSON schema is a list of schemas.")
    return parts


def _property_names(schema: Mapping[str, Any]) -> Iterable[str]:
    """The properties that a schema names, described ones first."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    texts = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not isinstance(properties, Mapping) or not texts:
        raise SchemaError("`properties` of a JSON schema is an object and `required` a list of names.")
    return [*properties, *required]


def _product(alternatives: list[list[Any]], others: list[list[Any]]) -> list[list[Any]]:
    if len(alternatives) * len(others) > MAX_ALTERNATIVES:
        raise SchemaError(f"the JSON schema gives more than {MAX_ALTERNATIVES} alternatives in one place.")
    return [[*one, *other] for one in alternatives for other in others]
