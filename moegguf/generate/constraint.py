"""The required format of an answer (JSON, a JSON schema, a tool call) as a mask over tokens.

`constraint_for` writes a grammar in llguidance's Lark dialect; `Matcher` runs it over one model's tokens. llguidance
is imported only when an answer is constrained.

JSON schemas follow JSON Schema 2020-12, except that
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from moegguf.errors import CapabilityError, OptionError, SchemaError
from moegguf.generate.continuation import Continuation
from moegguf.generate.request import GenerationRequest
from moegguf.generate.tool_calls import formats_of
from moegguf.gguf.chat_template import HARMONY, think_marks_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from moegguf.engine.vocabulary import Vocabulary

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_DEPTH = 64
MAX_SUBSCHEMAS = 10_000  # each counted as often as it is used
MAX_ITEMS = 10_000  # of arrays that count them; llguidance 1.7 and older take minutes for far more
MAX_ALTERNATIVES = 1_000  # of anyOf and oneOf, multiplied out where allOf combines them

WHITESPACE = r" |\n[ \t]{0,20}"
"""Allowed once between the parts of JSON: without a bound some models write blanks until the token limit."""

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # regexes of one grammar: about 20 ms
    "step_lexer_fuel": 200_000,  # regexes for one token: about 15 ms
    "step_max_items": 50_000,  # Earley items for one token: about 3 ms
    "max_lexer_states": 50_000,  # of one answer: about 25 MB
    "max_grammar_size": 500_000,
}
_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Constraint:
    """The required format of an answer. `lark`: a grammar in llguidance's Lark dialect, start rule "start". `begun`: a
    part of the answer that is there already, in the message that it continues."""

    lark: str
    begun: str = ""


def constraint_for(
    request: GenerationRequest,
    template: str | None,
    prompt_end: str = "",
    continuation: Continuation | None = None,
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
        raise OptionError("an answer that continues a message cannot be a tool call; leave out tool_choice, or the text.")
    alternatives = [] if forced or request.format is None else [_formatted(request.format, "" if begun else text)]
    if request.tools and request.tool_choice != "none":
        alternatives += [_call(tool, text) for tool in _allowed_tools(request.tools, request.tool_choice)]
    rules = [f"alternative_{n}: {alternative}" for n, alternative in enumerate(alternatives)]
    rules.append("answer: " + " | ".join(f"alternative_{n}" for n in range(len(alternatives))))
    start = ["start: answer"] if begun else _start(request.think, text, prompt_end, continuation)
    return Constraint("\n".join([*start, *rules]) + "\n", begun)


def _formatted(format: str | Mapping[str, Any], template: str) -> str:
    if isinstance(format, str) and format != "json":
        raise SchemaError(f'a format is "json" or a JSON schema, but is {format[:50]!r}.')
    body = _json({"type": "object"} if format == "json" else format)
    return f'"<|channel|>final" " <|constrain|>json"? "<|message|>" {body}' if HARMONY in template else body


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


def _call(function: Mapping[str, Any], template: str) -> str:
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise SchemaError(f"a tool has a name of up to 128 letters, digits and _.:/-, not {str(name)[:50]!r}.")
    if not isinstance(parameters, Mapping):
        raise SchemaError(f"the parameters of the tool {name!r} are no JSON schema.")
    before, between, after = _call_parts(template)
    return " ".join([_quoted(before + name + between), _json({"type": "object", **parameters}), _quoted(after)])


def _call_parts(template: str) -> tuple[str, str, str]:
    """The text before a call's name, between name and arguments, and after them."""
    if HARMONY in template:
        return "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""
    return formats_of(template)[0].call_parts(template)


def _start(
    think: bool | str | None, template: str, prompt_end: str, continuation: Continuation | None
) -> list[str]:
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


def _json(schema: Any) -> str:
    _check(schema)
    try:
        form = {**_Normalizer(schema).result(), "x-guidance": _json_options()}
    except RecursionError:
        raise SchemaError("the JSON schema is too deep with its references resolved; simplify it.") from None
    return f"%json {json.dumps(form)}"


@functools.cache
def _json_options() -> Mapping[str, Any]:
    """Options of %json. llguidance before 1.9 can bound only the blanks that are part of a separator."""
    major, minor, *_ = version("llguidance").split(".")
    if (int(major), int(minor)) >= (1, 9):
        blanks: _Json = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
    else:
        after = f"({WHITESPACE})?"
        blanks = {"whitespace_flexible": False, "item_separator": "," + after, "key_separator": ":" + after}
    return {**blanks, "lenient": True}  # ignores unknown formats


def _check(schema: object) -> None:
    """Raises SchemaError when it is too large or deep, or not JSON."""
    if _depth(schema) > MAX_DEPTH:
        raise SchemaError(f"a JSON schema nests lists and objects up to {MAX_DEPTH} deep; this one is deeper.")
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the JSON schema is not JSON ({error}).") from error
    if size > MAX_SCHEMA_BYTES:
        raise SchemaError(f"a JSON schema has up to {MAX_SCHEMA_BYTES} bytes; this one has {size}.")


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

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # references, to the names of their definitions
        self._undefined: list[str] = []
        self._n_subschemas = 0

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
        self._n_subschemas += 1
        if self._n_subschemas > MAX_SUBSCHEMAS:
            raise SchemaError(f"the JSON schema has more than {MAX_SUBSCHEMAS} parts, counting repetitions.")
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
        """One schema for plain ones that must all hold."""
        given = [part for part in parts if isinstance(part, Mapping)]
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

    def _plain(self, schema: Mapping[str, Any]) -> _Json:
        """A schema without combining keywords, its parts normalized."""
        form = dict(schema)
        for key in ("minItems", "maxItems"):
            if isinstance(form.get(key), int | float) and form[key] > MAX_ITEMS:
                raise SchemaError(f"`{key}` of a JSON schema is up to {MAX_ITEMS}, but is {form[key]}; leave it out.")
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


@dataclass(frozen=True)
class MatcherTokens:
    """A model's vocabulary as `Matcher` needs it: `n_tokens` tokens and the end-of-generation tokens among them.

    In `tokenizer` the latter are special tokens without text; an additional token, n_tokens, is its end token.
    """

    tokenizer: LLTokenizer
    n_tokens: int
    end_tokens: frozenset[int]


_matcher_tokens: WeakKeyDictionary[Vocabulary, MatcherTokens] = WeakKeyDictionary()


def matcher_tokens(vocabulary: Vocabulary) -> MatcherTokens:
    """A model's tokens for its matchers, built once per model: 0.5 s and 60 MB for 150,000 tokens."""
    found = _matcher_tokens.get(vocabulary)
    if found is None:
        found = _matcher_tokens[vocabulary] = build_matcher_tokens(vocabulary)
    return found


def build_matcher_tokens(vocabulary: Vocabulary) -> MatcherTokens:
    """A model's tokens for its matchers.

    End-of-generation tokens have no text. Other control tokens have theirs, because the marks around thinking and calls
    are control tokens in some models and plain text in others.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    pieces, end_tokens = vocabulary.all_pieces(), vocabulary.end_tokens()
    tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(pieces, end_tokens)))
    return MatcherTokens(tokenizer, len(pieces), frozenset(end_tokens))


class _Tokens:
    """The interface that llguidance's TokenizerWrapper needs."""

    def __init__(self, pieces: list[bytes], end_tokens: list[int]) -> None:
        # 0xFF marks special tokens in llguidance, and never occurs in UTF-8
        self.tokens = [*(b"" if piece.startswith(b"\xff") else piece for piece in pieces), b""]
        self.bos_token_id = None
        self.eos_token_id = len(pieces)
        self.special_token_ids = [*end_tokens, self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        """Unused: llguidance tokenizes only forced text, which is switched off."""
        return []


@functools.cache
def _parser_limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**_LIMITS, verbose_errors=False)


class Matcher:
    """Which tokens of one model may follow the tokens accepted so far.

    Raises SchemaError when the grammar cannot be compiled, exceeds its limits or allows nothing at all.
    """

    def __init__(self, constraint: Constraint, tokens: MatcherTokens) -> None:
        from llguidance import LLMatcher

        self._n_tokens, self._end_tokens = tokens.n_tokens, tokens.end_tokens
        self._mask: npt.NDArray[np.bool_] | None = None
        self._bits = np.zeros((tokens.tokenizer.vocab_size + 31) // 32, np.int32)
        # without forcing, the only possible text may be split into any tokens
        grammar = LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + constraint.lark)
        self._matcher: LLMatcher = LLMatcher(tokens.tokenizer, grammar, log_level=0, limits=_parser_limits())
        self._check()
        self._accept_text(constraint.begun, tokens.tokenizer)
        self.mask()

    def _accept_text(self, text: str, tokenizer: LLTokenizer) -> None:
        """Advances past what an answer begins with. Raises SchemaError when the format does not begin like that."""
        tokens = tokenizer.greedy_tokenize(text)
        if self._matcher.try_consume_tokens(tokens) < len(tokens):
            raise SchemaError(
                f"the message to continue does not begin as the requested format demands: {text[:50]!r}; change one."
            )
        self._check()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        error = self._matcher.get_error()
        if error.startswith("NoExtension"):
            raise SchemaError(
                "no token of this model can continue the requested format, or nothing matches it; try another one."
            )
        raise SchemaError(f"the format cannot be followed: {_short_message(error)}; simplify the schema.")

    @property
    def finished(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def mask(self) -> npt.NDArray[np.bool_]:
        """[n_tokens], True for tokens that may come next, end-of-generation tokens included where the answer may end.

        Raises SchemaError when no token may come next, or when computing the mask exceeds the limits.
        """
        if self._mask is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
            bits = np.unpackbits(self._bits.view(np.uint8), count=self._n_tokens, bitorder="little")
            bits[list(self._end_tokens)] = self.finished
            self._mask = bits.view(np.bool_)
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether `token` may come next, far cheaper than the whole mask. Raises SchemaError as `mask` does."""
        if token in self._end_tokens:
            return self.finished
        allowed = self._matcher.validate_tokens([token]) == 1
        self._check()
        return allowed

    def accept(self, token: int) -> None:
        """Advances past `token`, which must be allowed and not end the answer. Raises SchemaError as `mask` does."""
        self._mask = None
        self._matcher.consume_token(token)
        self._check()


def _short_message(error: str) -> str:
    """llguidance's message without the grammar and the parser's state."""
    message = re.split(r"\n +\d+ \| ", error.replace("<non-verbose/>", ""), maxsplit=1)[0]
    message = re.sub(r"\A(at \d+\(\d+\): )?(failed to (compile JSON schema|parse .%json.): )?", "", message)
    return " ".join(message.split())[:300].rstrip(". ")
