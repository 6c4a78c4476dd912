"""A grammar accepts what the JSON schema allows, and nothing else."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from moegguf.errors import SchemaError
from moegguf.generate.json_schema import SHARED_RULES, Schemas

BYTES = LLTokenizer("byte")


def grammar_of(schema: Any, *, strict: bool = False) -> str:
    schemas = Schemas()
    start = schemas.grammar(schema, strict=strict)
    return "\n".join(['%llguidance {"no_forcing": true}', f"start: {start}", *SHARED_RULES, *schemas.rules]) + "\n"


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


# Schemas by chance, of few types and values, so that some values follow them

NAMES = ("a", "b", "c")
COUNTS = st.integers(0, 3)
NUMBERS = st.integers(-3, 3) | st.sampled_from([-1.5, 0.25, 2.5])
TEXTS = st.text("ab\n\"", max_size=3)
PATTERNS = st.sampled_from(["^a", "b$", "^a|b$", "^[ab]{2}$", "a", "^$", "[^a]"])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


def some_of(keywords: dict[str, st.SearchStrategy[Any]], **always: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with `always`, and any choice of the other keywords."""
    return st.fixed_dictionaries(always, optional=keywords)


NUMBER = some_of(
    {
        "minimum": NUMBERS, "maximum": NUMBERS, "exclusiveMinimum": NUMBERS, "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 2, 0.5, 0.1, 10]),
    },
    type=st.sampled_from(["number", "integer"]),
)  # fmt: skip
STRING = some_of({"minLength": COUNTS, "maxLength": COUNTS, "pattern": PATTERNS}, type=st.just("string"))
LEAVES = (
    NUMBER
    | STRING
    | st.just({})
    | st.booleans()
    | st.fixed_dictionaries({"const": VALUES})
    | st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)})
    | st.fixed_dictionaries({"type": st.lists(st.sampled_from(["null", "boolean", "string", "integer"]), min_size=1)})
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(NAMES), max_size=2)
    return some_of(
        {
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3), "required": names,
            "minProperties": COUNTS, "maxProperties": COUNTS,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b|c"]), inner, min_size=1, max_size=2),
            "propertyNames": st.sampled_from([{"pattern": "^[ab]"}, {"enum": ["a", "c"]}, {"not": {"const": "b"}}]),
            "dependentRequired": st.dictionaries(st.sampled_from(NAMES), names, max_size=1),
            "dependentSchemas": st.dictionaries(st.sampled_from(NAMES), inner, max_size=1),
        },
        type=st.just("object"),
        additionalProperties=inner,
    )  # fmt: skip


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    counts = {"maxItems": COUNTS, "contains": inner, "minContains": COUNTS, "maxContains": COUNTS}
    plain = {"type": st.just("array"), "items": inner, "minItems": COUNTS}
    prefix = st.lists(inner, min_size=1, max_size=2)
    return some_of({**counts, "uniqueItems": st.booleans()}, **plain) | some_of(counts, **plain, prefixItems=prefix)


def combinations(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    condition = st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner})
    words = ("allOf", "anyOf", "oneOf")
    return st.one_of(
        *(st.fixed_dictionaries({word: several}, optional={"not": inner}) for word in words),
        st.fixed_dictionaries({"not": inner}),
        condition,
        st.tuples(objects(inner), condition).map(lambda two: {**two[0], **two[1]}),
    )


SCHEMAS = st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner) | combinations(inner), max_leaves=6)


def orders(value: Any) -> list[str]:
    """The texts of a value with its properties in each order."""
    if isinstance(value, dict):
        texts = []
        for items in itertools.permutations(value.items()):
            parts = ([f"{json.dumps(name)}:{text}" for text in orders(item)] for name, item in items)
            texts += ["{" + ",".join(choice) + "}" for choice in itertools.product(*parts)]
        return texts
    if isinstance(value, list):
        return ["[" + ",".join(choice) + "]" for choice in itertools.product(*map(orders, value))]
    return [json.dumps(value)]


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(SCHEMAS, st.lists(VALUES, min_size=6, max_size=12))
def test_any_value_is_accepted_where_it_is_valid(schema: Any, values: list[Any]) -> None:
    """Strict schemas; one that no grammar follows is refused."""
    is_valid = Draft202012Validator(schema).is_valid
    try:
        grammar = grammar_of(schema, strict=True)
    except SchemaError as error:
        assume("nothing matches" in str(error))
        assert not any(map(is_valid, values))
        return
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assume(not matcher.is_error())  # patterns that contradict each other
    for value in values:
        assert any(accepts(grammar, text) for text in orders(value)) == is_valid(value), (value, grammar)
