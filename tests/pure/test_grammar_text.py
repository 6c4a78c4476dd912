"""Grammars are asked for only where they are needed, and no schema can make one without end."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import schemas
import templates
from hypothesis import given
from hypothesis import strategies as st

from moegguf.errors import CapabilityError, SchemaError
from moegguf.generate.constraint import grammar_for
from moegguf.generate.request import GenerationRequest

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def grammar(form: Any = None, template: str | None = None, **options: Any) -> str | None:
    return grammar_for(GenerationRequest(messages=(), format=form, **options), template)


def test_nothing_is_demanded_of_an_ordinary_answer() -> None:
    assert grammar() is None
    assert grammar(tools=(TOOL,)) is None
    assert grammar(tools=(TOOL,), tool_choice="none") is None
    assert grammar(tool_choice="required") is None


def test_a_grammar_has_a_root_and_every_rule_it_names() -> None:
    text = grammar({"type": "object", "properties": {"a": {"type": "array", "items": {"enum": ["x"]}}}}, templates.QWEN)
    assert text is not None
    rules = dict(line.split(" ::= ", 1) for line in text.splitlines())
    assert "root" in rules and '"\\"x\\""' in text and '"</think>"' not in rules


def test_a_named_tool_has_to_be_there() -> None:
    with pytest.raises(CapabilityError, match="later"):
        grammar(tools=(TOOL,), tool_choice="later")


def chain(n: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {"type": "null"}}}


def doubling(word: str, n: int) -> dict[str, Any]:
    """Each definition uses the next one twice."""
    defs: dict[str, Any] = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(n)}
    defs[f"d{n}"] = {"properties": {"a": {"type": "null"}}}
    return {word: [{"$ref": "#/$defs/d0"}] * 2, "$defs": defs}


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: dict[str, tuple[Any, str]] = {
    "another form": ("yaml", "yaml"),
    "a list": ([1], "consists of objects"),
    "an unknown type": ({"type": "decimal"}, "decimal"),
    "a type that is none": ({"type": {}}, "type"),
    "nothing": ({"properties": {"a": False}}, "false"),
    "elsewhere": ({"$ref": "https://example.org/schema.json"}, "inside"),
    "a file": ({"$ref": "file:///etc/passwd"}, "inside"),
    "nowhere": ({"$ref": "#/$defs/none"}, "does not have"),
    "a reference that is none": ({"$ref": 7}, "inside"),
    "itself": ({"$ref": "#"}, "refers to itself"),
    "itself in turns": ({"$ref": "#/$defs/a", "$defs": {
        "a": {"anyOf": [{"properties": {"x": {"$ref": "#/$defs/b"}}}, {"$ref": "#/$defs/b"}]},
        "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    }}, "refers to itself"),
    "all of itself": ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "schema"),
    "too deep": (deep(70), "nests"),
    "far too deep": (deep(400), "nests"),
    "too large": ({"enum": ["a" * 70_000]}, "bytes"),
    "a long chain": (chain(1500), "too deep"),
    "allOf that doubles": (doubling("allOf", 40), "schema"),
    "many choices": ({"enum": list(range(5000))}, "enum"),
    "no choices": ({"enum": []}, "enum"),
    "an enum that is none": ({"enum": 7}, "enum"),
    "anyOf that is none": ({"anyOf": {}}, "anyOf"),
    "many items": ({"type": "array", "items": {}, "maxItems": 10**9}, "1000 times"),
    "many items at least": ({"type": "array", "items": {}, "minItems": 10**9}, "1000 times"),
    "a negative length": ({"type": "string", "maxLength": -1}, "whole number"),
    "a length that is none": ({"type": "string", "maxLength": "9"}, "whole number"),
    "a contradiction": ({"type": "string", "minLength": 5, "maxLength": 4}, "at least 5"),
    "no integer": ({"type": "integer", "minimum": 0.1, "maximum": 0.9}, "no whole number"),
    "huge bounds": ({"type": "integer", "minimum": 10**400}, "15 digits"),
    "bounds that are none": ({"type": "integer", "minimum": "a"}, "15 digits"),
    "bounds that are no number": ({"type": "number", "minimum": float("nan")}, "JSON"),
    "a long pattern": ({"type": "string", "pattern": "a" * 9999}, "characters"),
    "no pattern": ({"type": "string", "pattern": "(("}, "cannot be read"),
    "a pattern that is none": ({"type": "string", "pattern": 7}, "text"),
    "a pattern that looks ahead": ({"type": "string", "pattern": "(?=a)b"}, "cannot be followed"),
    "a pattern that looks back": ({"type": "string", "pattern": r"(a)\1"}, "cannot be followed"),
    "a pattern that explodes": ({"type": "string", "pattern": "^(a*)*$"}, "empty"),
    "a pattern that counts far": ({"type": "string", "pattern": "a{9999}"}, "500"),
    "a pattern that counts often": ({"type": "string", "pattern": "a{0,99}" * 9}, "500"),
    "properties that are none": ({"type": "object", "properties": [1]}, "properties"),
    "first items that are none": ({"prefixItems": True}, "list of schemas"),
    "required that is none": ({"type": "object", "required": "a"}, "required"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_schema_that_cannot_be_followed_says_why(kind: str) -> None:
    form, words = REFUSED[kind]
    begin = time.perf_counter()
    with pytest.raises(SchemaError, match=words):
        grammar(form)
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize("form", [doubling("anyOf", 40), chain(100), deep(30)])
def test_large_schemas_make_grammars_in_time(form: Any) -> None:
    begin = time.perf_counter()
    text = grammar(form)
    assert text is not None and len(text) < 1 << 20
    assert time.perf_counter() - begin < 2


@given(st.dictionaries(schemas.words, schemas.anything, max_size=5))
def test_whatever_the_schema_says_there_is_a_grammar_or_a_schema_error(form: dict[str, Any]) -> None:
    with contextlib.suppress(SchemaError):
        assert grammar(form)


def test_many_tools_have_a_limit() -> None:
    tools = tuple({"function": {"name": f"f{i}"}} for i in range(500))
    with pytest.raises(SchemaError, match="128"):
        grammar(tools=tools, tool_choice="required")
    with pytest.raises(SchemaError, match="name"):
        grammar(tools=({"function": {}},), tool_choice="required")
