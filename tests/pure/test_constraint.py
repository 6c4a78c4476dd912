"""Tests that constraints are created only if needed, and that following or refusing a
schema takes a limited time."""

import contextlib
import functools
import subprocess
import sys
import time
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
import schemas
import templates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from moegguf.errors import CapabilityError, SchemaError
from moegguf.generate.constraint import Constraint, constraint_for
from moegguf.generate.request import Request
from moegguf.generate.sampler import Matcher, MatcherTokens, matcher_tokens

TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}


@functools.cache
def every_byte() -> MatcherTokens:
    """A vocabulary of 256 bytes."""
    return MatcherTokens(LLTokenizer("byte"), 256, frozenset())


def constraint(
    form: Any = None, template: str | None = None, **options: Any
) -> Constraint | None:
    return constraint_for(Request(messages=(), format=form, **options), template)


def matcher(form: Any = None, template: str | None = None, **options: Any) -> Matcher:
    made = constraint(form, template, **options)
    return Matcher(made, every_byte())


def longest_step_s(form: Any, text: bytes) -> float:
    """Returns the duration of the longest step, in seconds. A step computes a mask and
    accepts the next byte of `text`.

    Stops at the first byte that the grammar does not allow, or when the schema is
    refused. The unfinished step is included.
    """
    begin, steps = time.thread_time(), list[float]()
    with contextlib.suppress(SchemaError):
        one = matcher(form)
        begin = time.thread_time()
        for byte in text:
            one.mask()
            if not one.allows(byte):
                break
            one.accept(byte)
            steps.append(time.thread_time() - begin)
            begin = time.thread_time()
    return max([*steps, time.thread_time() - begin])


def test_constraint_is_none_without_a_format_and_llguidance_is_not_imported() -> None:
    assert constraint() is None
    assert constraint(tools=(TOOL,)) is None
    assert constraint(tools=(TOOL,), tool_choice="none") is None
    assert constraint(tool_choice="required") is None
    code = "import sys, moegguf.generate.sequence; print('llguidance' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == "False"


def chain(n: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {"type": "null"}}}


def doubling(word: str) -> dict[str, Any]:
    """Returns a schema with a chain of definitions, d0 to d40. Each except the last
    refers to the next one twice, under `word`."""
    defs: dict[str, Any] = {
        f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)
    }
    defs["d40"] = {"properties": {"a": {"type": "null"}}}
    return {word: [{"$ref": "#/$defs/d0"}] * 2, "$defs": defs}


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: dict[str, tuple[Any, str]] = {
    "another form": ("yaml", "yaml"),
    "nothing": (False, "false"),
    "elsewhere": ({"$ref": "https://example.org/schema.json"}, "local"),
    "nowhere": ({"$ref": "#/$defs/none"}, "is not in the schema"),
    "itself": ({"$ref": "#"}, "nothing matches"),
    "too deep to be read": (deep(4000), "too deep"),
    "too large": ({"enum": ["a" * (1 << 20)]}, "characters"),
    "anyOf that multiplies": (
        {"allOf": [{"anyOf": [{"maxLength": 20 * i + j} for j in range(20)]} for i in range(20)]}, "up to 100000 steps",
    ),
    "allOf of many in many places": (
        {
            "properties": {f"p{i}": {"allOf": [{"$ref": "#/$defs/many"}, {"maxLength": i}]} for i in range(5000)},
            "$defs": {"many": {"allOf": [{"minLength": i} for i in range(1000)]}},
        },
        "up to 100000 steps",
    ),
    "patterns that multiply": ({"allOf": [{"pattern": f"{c}.{{9}}"} for c in ascii_letters]}, "cannot be followed"),
    "patterns of a property that multiply": (
        {"allOf": [{"properties": {"a": {"allOf": [{"pattern": f"{i}.{{{j}}}"} for i in "abc"]}}} for j in range(4)]},
        "cannot be followed",
    ),
    "a long pattern of names": ({"patternProperties": {"x?" * 30_000: {}}}, "cannot be followed"),
    "many patterns of names": (
        {"patternProperties": {f"^(a|b)*{i}$": {"const": i} for i in range(700)}},
        "100 patternProperties with different schemas",
    ),
    "multiples of a large number": ({"type": "integer", "multipleOf": 10**9 + 7}, "cannot be followed"),
    "multiples of half as large a number": ({"type": "integer", "multipleOf": 99_999_989}, "more than 2 s"),
    "a contradiction": ({"type": "string", "minLength": 5, "maxLength": 4}, "nothing matches .*minLength"),
    "no number between the bounds": ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "nothing"),
    "fewer items than there must be": ({"items": {}, "minItems": 2, "maxItems": 1}, "nothing matches"),
    "fewer properties than there must be": ({"minProperties": 2, "maxProperties": 1}, "nothing matches"),
    "fewer values than there must be": ({"items": {"const": 1}, "uniqueItems": True, "minItems": 2}, "nothing matches"),
    "nothing that is required": ({"properties": {"a": False}, "required": ["a"]}, "nothing matches"),
    "multiples between large bounds": ({"type": "integer", "minimum": 2**53 + 1, "multipleOf": 7}, r"2\^53"),
    "an anchor that is not there": ({"$ref": "#pet", "$defs": {"a": {"$anchor": "cat"}}}, "#pet"),
    "a reference that is not UTF-8": ({"$ref": "#/$defs/%FF"}, "UTF-8"),
    "a reference to a value": ({"$ref": "#/required", "required": ["a"]}, "must be an object, true or false"),
    "a type that does not exist": ({"type": "text"}, "`type`"),
    "a length below 0": ({"type": "string", "minLength": -1}, "`minLength`"),
    "multiples of 0": ({"type": "number", "multipleOf": 0}, "above 0"),
    "half a surrogate pair": ({"properties": {"\ud800": {}}}, "hex escape"),
    "bounds that are no number": ({"type": "number", "minimum": float("nan")}, "JSON"),
    "no pattern": ({"type": "string", "pattern": "(("}, "unclosed group"),
    "properties that are none": ({"type": "object", "properties": [1]}, "properties"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_schema_raises_schema_error_with_the_reason(kind: str) -> None:
    form, message = REFUSED[kind]
    begin = time.thread_time()
    with pytest.raises(SchemaError, match=message) as caught:
        matcher(form)
    assert time.thread_time() - begin < 2
    assert len(str(caught.value)) < 500 and "%json" not in str(caught.value)


LARGE = {
    "deep": deep(400),
    "the same anyOf many times": {"allOf": [{"anyOf": [{"type": "null"}] * 20}] * 20},
    "a long chain beside a type": {**chain(1500), "type": "null"},
    "many patterns of names": {"patternProperties": {f"^(a|b)*{i}$": {} for i in range(700)}},
    "bounds of many digits": {"type": "number", "minimum": -(10**300), "maximum": 10**300 + 0.5},
    "many alternatives that exclude each other": {
        "oneOf": [
            {"properties": {"kind": {"const": i}, "x": {"minLength": i}}, "required": ["kind"]} for i in range(99)
        ]
    },
    "many alternatives that overlap": {
        "oneOf": [{"properties": {f"a{i}{j}": {"minLength": i} for j in range(9)}} for i in range(200)]
    },
    "patterns of names that differ": {
        "patternProperties": {f"^(a|b)*{i}(a|b){{9}}$": {"const": i} for i in range(60)}
    },
    "many unique values": {"type": "array", "items": {"enum": list(range(63))}, "uniqueItems": True, "minItems": 30},
    "more properties than can be counted": {"properties": {f"p{i}": {} for i in range(900)}, "minProperties": 450},
    "more items than can be counted": {"items": {"type": "integer"}, "contains": {"const": 1}, "maxItems": 10**6},
    "much text": {"enum": ["a" * 70_000]},
    "allOf that doubles": doubling("allOf"),
    "far more items": {"type": "array", "items": {}, "maxItems": 10**9},
    "patterns behind references": {
        "allOf": [{"properties": {"a": {"$ref": "#/$defs/a"}}}] * 5,
        "$defs": {"a": {"allOf": [{"pattern": "a.{9}b"}, {"pattern": "b.{8}c"}]}},
    },
    "many objects with patterns of names": {
        "anyOf": [{"patternProperties": {f"^(a|b)*{i}{'c' * 200}$": {}}} for i in range(100)]
    },
    "a long pattern": {"type": "string", "pattern": "a?" * 9000},
    "many multiples": {"properties": {f"p{i}": {"multipleOf": 9973} for i in range(20)}},
    "anyOf that doubles": doubling("anyOf"),
    "a long chain": chain(1500),
    "many choices": {"enum": list(range(5000))},
    "many items": {"type": "array", "items": {}, "maxItems": 10_000},
    "objects of many patterns": {
        "allOf": [{"properties": {f"{i}{j}": {"pattern": f"^a{{{i}}}b{{{j}}}$"} for j in range(9)}} for i in range(8)]
    },
    "patterns of names": {"patternProperties": {f"^\\w*_{i:02d}$": {"type": "integer"} for i in range(80)}},
    "what may be there many times": {"type": "string", "pattern": "^(" + "ab?" * 300 + ")$"},
    "a long text": {"type": "string", "minLength": 10**6, "maxLength": 10**7},
    "a pattern that repeats what may be empty": {"type": "string", "pattern": "^(a*)*$"},
    "in turns": {"$ref": "#/$defs/a", "$defs": {
        "a": {"anyOf": [{"properties": {"x": {"$ref": "#/$defs/b"}}}, {"$ref": "#/$defs/b"}]},
        "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    }},
}  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
def test_large_schema_compiles_within_two_seconds(kind: str) -> None:
    begin = time.thread_time()
    matcher(LARGE[kind])
    assert time.thread_time() - begin < 2


COSTLY = (
    "(" + "|".join(".?" * 248 + str(n) for n in range(40)) + ")",
    "(" + "|".join(f".?{{248}}{n}" for n in range(40)) + ")",
    "^(a|b)*a(a|b){400}$",
    "^(a{0,99}){99}$",
    "(.{0,100}){100}a",
    "(x+x+)+y",
    "(a.{30}|b.{40}|c.{50}|d.{60}){20}",
)


@pytest.mark.parametrize("pattern", COSTLY)
def test_costly_pattern_takes_less_than_a_second_per_token(pattern: str) -> None:
    """An expensive pattern may also be refused. Neither a step nor a refusal takes a
    second."""
    assert (
        longest_step_s({"type": "string", "pattern": pattern}, b'"' + b"ab" * 500) < 1
    )


# A busy machine makes examples slow.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(schemas.words, schemas.anything, max_size=5))
def test_random_schema_gives_a_matcher_or_a_schema_error(form: dict[str, Any]) -> None:
    with contextlib.suppress(SchemaError):
        assert matcher(form)


@pytest.mark.parametrize(
    "multiple", [1, 1000, 0.01, 10**6, 0.00001, 9973, 99991, 1.0000007]
)
def test_multiple_of_takes_less_than_a_second_per_token(multiple: float) -> None:
    """The lexer may need a state for each remainder of a division by `multiple`."""
    assert (
        longest_step_s(
            {"type": "number", "multipleOf": multiple}, b"1234567890123456789012345"
        )
        < 1
    )


def test_schemas_of_all_tools_are_limited_in_characters_and_parts() -> None:
    def tools(n: int, schema: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(
            {"function": {"name": f"f{i}", "parameters": schema}} for i in range(n)
        )

    long = {"properties": {"p": {"enum": ["x" * 60_000]}}}
    with pytest.raises(SchemaError, match="1048576 characters"):
        constraint(tools=tools(20, long), tool_choice="required")
    many = {"properties": {f"p{i}": {} for i in range(1000)}}
    with pytest.raises(SchemaError, match="10000 parts"):
        constraint(tools=tools(20, many), tool_choice="required")
    assert constraint(
        tools=tools(100, {"properties": {f"p{i}": {} for i in range(20)}}),
        tool_choice="required",
    )


def test_matcher_raises_schema_error_if_a_token_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = matcher("json")
    monkeypatch.setattr("moegguf.generate.sampler.MAX_STEP_S", -1.0)
    with pytest.raises(SchemaError, match="for one token"):
        one.accept(ord("{"))


def test_constraint_rejects_too_many_nameless_and_unknown_tools() -> None:
    tools = tuple({"function": {"name": f"f{i}"}} for i in range(500))
    with pytest.raises(SchemaError, match="128"):
        constraint(tools=tools, tool_choice="required")
    with pytest.raises(SchemaError, match="name"):
        constraint(tools=({"function": {}},), tool_choice="required")
    with pytest.raises(CapabilityError, match="later"):
        constraint(tools=(TOOL,), tool_choice="later")


# Bounds that are not whole numbers.
BETWEEN = {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.5}


def test_matcher_allows_only_described_properties_and_keeps_number_bounds() -> None:
    """A schema with a list of properties refuses other properties, unless it allows or
    requires them explicitly."""
    named = {"type": "object", "properties": {"a": {"type": "null"}}}
    both = {
        "allOf": [{"$ref": "#/$defs/n"}, {"properties": {"b": {"type": "null"}}}],
        "$defs": {"n": named},
    }
    for form, text, passes in (
        (named, b'{"a":null}', True),
        (named, b'{"b":null}', False),
        ({**named, "additionalProperties": True}, b'{"b":null}', True),
        ({"type": "object"}, b'{"b":null}', True),
        ({"type": "object", "required": ["b"]}, b'{"b":null}', True),
        (both, b'{"a":null,"b":null}', True),
        (both, b'{"a":null,"c":null}', False),
        ({**named, "patternProperties": {"^x": {"type": "null"}}}, b'{"a":null,"xy":null}', True),
        ({**named, "patternProperties": {"^x": {"type": "null"}}}, b'{"x":1}', False),
        ({"required": ["b"], "additionalProperties": {"type": "null"}}, b'{"b":null}', True),
        ({"required": ["b"], "additionalProperties": {"type": "null"}}, b'{"b":1}', False),
        ({**named, "required": None, "additionalProperties": None, "items": None}, b'{"a":null}', True),
        ({**named, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, b'{"b":1}', True),
        ({**named, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, b'{"b":1,"c":1}', False),
        *((BETWEEN, text, passes) for text, passes in (
            (b"0.25", True), (b"0.4999", True), (b"0.5", False), (b"0.2", False), (b"0.3", True)
        )),
        ({"type": "integer", "multipleOf": 7}, b"21", True), ({"type": "integer", "multipleOf": 7}, b"22", False),
    ):  # fmt: skip
        assert accepts(matcher(form), text) == passes, (form, text)


def accepts(one: Matcher, text: bytes) -> bool:
    for byte in text:
        if not one.allows(byte):
            return False
        one.accept(byte)
    return one.finished


class FewTokens:
    """A small vocabulary like SentencePiece's: bytes, words, control tokens. `ends`:
    the tokens that end an answer."""

    words = (b" the", b"", b'{"', b"<think>", b"</think>", b'"}', b"\xff\xfe", b"<end>")
    pieces = (*(bytes([n]) for n in range(256)), *words)

    def __init__(self, *ends: int) -> None:
        self._ends = ends

    def all_pieces(self) -> list[bytes]:
        return list(self.pieces)

    def end_tokens(self) -> list[int]:
        return list(self._ends)


@pytest.mark.parametrize("ends", [(263,), (263, 257), ()])
def test_matcher_masks_tokens_of_several_bytes_and_end_tokens(
    ends: tuple[int, ...],
) -> None:
    vocabulary: Any = FewTokens(*ends)
    made = constraint({"type": "object", "maxProperties": 1}, templates.QWEN)
    one = Matcher(made, matcher_tokens(vocabulary))
    first = [vocabulary.pieces[n] for n in np.flatnonzero(one.mask())]
    assert first == [b"<", b"{", b'{"', b"<think>"]
    for piece in (
        b"<think>",
        b" the",
        "é".encode()[:1],
        "é".encode()[1:],
        b"<",
        b"</think>",
        b'{"',
        b"<end>",
    ):
        allowed = one.allows(vocabulary.pieces.index(piece))
        assert allowed == (piece != b"<end>" or not ends), (
            "text of the token that ends an answer is no text"
        )
        if allowed:
            one.accept(vocabulary.pieces.index(piece))
    for token in (
        0xFF,
        vocabulary.pieces.index(b"\xff\xfe"),
        vocabulary.pieces.index(b""),
        10,
    ):
        assert not one.allows(token)
        assert not one.mask()[token]
    for byte in b'x":{}}':
        assert not one.finished
        one.accept(byte)
    assert one.finished
    assert tuple(np.flatnonzero(one.mask())) == tuple(sorted(ends))
