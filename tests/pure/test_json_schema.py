"""Tests grammars made from JSON schemas: texts that they accept and reject, and
keywords that they may ignore."""

from __future__ import annotations

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
from moegguf.generate.tool_calls import Parameter

BYTES = LLTokenizer("byte")


def grammar_of(schema: Any, *, strict: bool = False) -> str:
    schemas = Schemas()
    start = schemas.grammar(schema, strict=strict)
    return (
        "\n".join(
            [
                '%llguidance {"no_forcing": true}',
                f"start: {start}",
                *SHARED_RULES,
                *schemas.rules,
            ]
        )
        + "\n"
    )


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return (
        matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()
    )


T, F = True, False
A_OR_B = {"a": {"type": "null"}, "b": {"type": "null"}}
KINDS = {
    "properties": {"k": {"enum": ["a", "b"]}, "x": {"type": "integer"}},
    "required": ["k"],
}
CASES: list[tuple[Any, dict[str, bool]]] = [
    # references
    ({"$ref": "#pet", "$defs": {"p": {"$anchor": "pet", "const": "cat"}}}, {'"cat"': T, '"dog"': F}),
    ({"$ref": "#pet", "$defs": {"p": {"$id": "#pet", "const": "cat"}}}, {'"cat"': T, '"dog"': F}),
    ({"$dynamicRef": "#pet", "$defs": {"p": {"$dynamicAnchor": "pet", "const": "cat"}}}, {'"cat"': T, '"dog"': F}),
    ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"enum": [7]}}}, {"7": T, "8": F}),
    ({"$ref": "#/%24defs/Box%3CInt%3E", "$defs": {"Box<Int>": {"enum": [7]}}}, {"7": T, "8": F}),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": [7]}}}, {"7": T, "8": F}),
    ({"$ref": "#/$defs/a%2Fb", "$defs": {"a": {"b": {"enum": [7]}}}}, {"7": T, "8": F}),
    ({"$ref": "#/$defs/m%C3%A4~0", "$defs": {"m\u00e4~": {"enum": [7]}}}, {"7": T, "8": F}),
    ({"$ref": "#/$defs/a%25b", "$defs": {"a%b": {"enum": [7]}}}, {"7": T, "8": F}),
    ({"$ref": "item", "$defs": {"i": {"$id": "item", "const": 7}}}, {"7": T, "8": F}),
    ({"$id": "http://x/y", "$ref": "http://x/y#/$defs/i", "$defs": {"i": {"const": 7}}}, {"7": T, "8": F}),
    ({"properties": {"v": {"$ref": "#"}}}, {"{}": T, '{"v":{"v":{}}}': T, '{"v":1}': F}),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}, {
        "null": T, "1": F,
    }),
    # numbers
    ({"type": "integer", "minimum": 2**53 - 2, "maximum": 2**53 + 7}, {
        str(2**53 - 2): T, str(2**53 - 3): F, str(2**53 + 7): T, str(2**53 + 8): F,
    }),
    ({"type": "integer", "exclusiveMinimum": -(2**63), "exclusiveMaximum": -(2**63) + 8}, {
        str(-(2**63) + 1): T, str(-(2**63)): F, str(-(2**63) + 8): F, str(-(2**63) + 7): T,
    }),
    ({"type": "integer", "minimum": 2**53 + 1, "multipleOf": 100}, {str(2**53 + 8): T, str(2**53 + 9): F, "0": F}),
    ({"type": "number", "minimum": 10**17, "maximum": 10**17 + 1}, {f"{10**17}.5": T, str(10**17 + 2): F}),
    ({"minimum": 1, "exclusiveMinimum": True}, {"1": F, "1.01": T}),
    ({"type": "integer"}, {"1" * 16: T, "1" * 17: F, "-5": T, "0": T, "1.5": F, "1e5": F}),
    ({"type": "number"}, {
        "1" * 16 + "." + "2" * 16: T, "1" * 17: F, "0." + "2" * 17: F, "-1.5e3": T, "1E-300": T, "1e1000": F,
        "1e" + "1" * 17: F,
    }),
    ({"type": "number", "minimum": 0, "maximum": 1}, {"0." + "1" * 16: T, "0." + "1" * 17: F, "1.1": F, "1.0": T}),
    ({"type": "integer", "minimum": 5}, {"5": T, "4": F, "9" * 16: T, "9" * 17: F}),
    ({"items": {"type": "object"}}, {'[{"a":[' + "1" * 16 + "]}]": T, '[{"a":[' + "1" * 17 + "]}]": F}),
    ({"enum": [10**18, 0.1234567890123456789]}, {str(10**18): T, "0.12345678901234568": T}),
    ({"const": 12345678901234567890}, {"12345678901234567890": T, "1234567890": F}),
    ({"type": "number", "multipleOf": 0.01}, {"1.25": T, "1.255": F, "1": T}),
    ({"type": "number", "multipleOf": 0.05, "minimum": 0, "maximum": 1}, {"0.05": T, "0.07": F, "1.05": F}),
    ({"allOf": [{"multipleOf": 4}, {"type": "integer", "multipleOf": 6}]}, {"12": T, "24": T, "6": F}),
    # complements
    ({"not": {"type": "string"}}, {'"a"': F, "1": T, "[]": T, "null": T}),
    ({"not": {"type": "integer"}}, {"1": F, "1.5": T, "1.0": F, '"a"': T}),
    ({"type": "string", "not": {"enum": ["ab", "a", "x\\y", '"']}}, {
        '"a"': F, '"ab"': F, '"b"': T, '"abc"': T, '""': T, '"x\\\\y"': F, '"\\""': F, '"x\\\\"': T,
    }),
    ({"type": "string", "maxLength": 2, "not": {"const": "ab"}}, {'"ab"': F, '"ba"': T, '"abc"': F}),
    ({"type": "integer", "not": {"enum": [3, 5.0]}}, {"3": F, "5": F, "4": T, "33": T}),
    ({"type": "integer", "multipleOf": 3, "not": {"enum": [6, -3, 7]}}, {
        "6": F, "-3": F, "7": F, "0": T, "3": T, "-6": T, "60": T, "9": T,
    }),
    ({"type": "integer", "multipleOf": 3, "minimum": 3, "maximum": 9, "not": {"enum": [3, 9, 10**20]}}, {
        "3": F, "6": T, "9": F,
    }),
    ({"multipleOf": 3, "type": "integer", "minimum": 0, "not": {"const": 3 * 10**20}}, {"3": T, "4": F}),
    ({"type": "number", "multipleOf": 0.25, "not": {"enum": [0.5]}}, {"0.50": F, "0.5": F, "0.25": T, "0.75": T}),
    ({"enum": ["a", "b", 1], "not": {"const": "a"}}, {'"a"': F, '"b"': T, "1": T}),
    ({"type": "object", "not": {"required": ["a"]}}, {'{"b":1}': T, '{"a":1}': F, "{}": T}),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, {"3": T, "7": F, "7.5": T, "3.5": F}),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": A_OR_B}, {
        '{"a":null}': T, '{"b":null}': T, '{"a":null,"b":null}': F, "{}": F,
    }),
    ({**KINDS, "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}}, {
        '{"k":"a"}': F, '{"k":"a","x":1}': T, '{"k":"b"}': T, '{"k":"b","x":1}': T,
    }),
    # arrays
    ({"items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1}, {
        "[]": F, '["a"]': T, '["a","a"]': F, '["c","a","b"]': T,
    }),
    ({"items": {"type": ["boolean", "null"]}, "uniqueItems": True}, {"[]": T, "[true,null]": T, "[true,true]": F}),
    ({"items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 1}, {"[1]": T, "[1,2]": F}),
    ({"items": {"type": "integer"}, "contains": {"const": 3}}, {"[]": F, "[1,2]": F, "[1,3,2]": T, "[3]": T}),
    ({"items": {"type": "integer"}, "contains": {"const": 3}, "minContains": 2, "maxContains": 2}, {
        "[3]": F, "[3,1,3]": T, "[3,3,3]": F,
    }),
    ({"prefixItems": [{"type": "integer"}, {"type": "null"}]}, {"[1]": F, "[1,null]": T, "[1,null,1]": F}),
    ({"items": [{"type": "integer"}], "additionalItems": {"type": "null"}}, {"[1]": T, "[1,null,null]": T, "[1,1]": F}),
    # objects
    ({"type": "object", "properties": {}}, {"{}": T, '{"a":1}': F}),
    ({"type": "object"}, {"{}": T, '{"a":1}': T, "[]": F}),
    ({"properties": A_OR_B, "minProperties": 1}, {"{}": F, '{"a":null}': T, '{"b":null}': T, '{"a":null,"b":null}': T}),
    ({"properties": A_OR_B, "maxProperties": 1}, {"{}": T, '{"a":null}': T, '{"a":null,"b":null}': F}),
    ({"additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2}, {
        "{}": F, '{"x":null}': T, '{"x":null,"y":null}': T, '{"x":null,"y":null,"z":null}': F,
    }),
    ({"properties": A_OR_B, "dependentRequired": {"a": ["b"]}}, {
        '{"a":null}': F, '{"b":null}': T, '{"a":null,"b":null}': T, "{}": T,
    }),
    ({"properties": A_OR_B, "dependencies": {"a": ["b"]}}, {'{"a":null}': F, '{"a":null,"b":null}': T}),
    ({"additionalProperties": {"type": "integer"}, "propertyNames": {"pattern": "^x", "maxLength": 2}}, {
        '{"xa":1}': T, '{"a":1}': F, "{}": T, '{"xab":1}': F,
    }),
    ({"additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["a"]}}, {'{"a":1}': T, '{"c":1}': F}),
    ({"properties": {"a": {}}, "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False}, {
        '{"a":null,"xy":null}': T, '{"a":null,"y":null}': F, '{"xy":1}': F,
    }),
    ({"patternProperties": {"^a|b$": {"type": "null"}, "c": {"type": "integer"}}}, {
        '{"ax":null}': T, '{"xb":null}': T, '{"ax":1}': F, '{"c":1}': T, '{"bx":"any"}': T, '{"acb":1}': F,
    }),
    ({"patternProperties": {"^a/[/\\d]": {}}, "additionalProperties": False}, {'{"a/1":null}': T, '{"a1":null}': F}),
    ({"properties": {"a": False, "b": True}, "additionalProperties": {"type": "null"}}, {
        '{"a":null}': F, '{"b":1}': T, '{"c":null}': T, '{"\\u0061":null}': F,
    }),
    ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False}, {
        '{"a":1,"b":1}': T, '{"c":1}': F,
    }),
    ({"required": ["a"], "minLength": 3}, {'{"a":1}': T, '"abc"': F, "{}": F}),
    # values
    ({"enum": [1, [2, {"a": "b"}], {"x": [1.5]}]}, {"1": T, '[2, {"a": "b"}]': T, '{"x":[1.5]}': T, "[2]": F}),
    ({"const": {"a": None}}, {'{"a":null}': T, "{}": F}),
    ({}, {"{}": T, '{"a":[1,"x",null,true,-2.5e3]}': T, "tru": F}),
    ({"type": ["string", "null"], "minLength": 2}, {"null": T, '"a"': F, '"ab"': T}),
    ({"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "^[ab]+$"}]}, {
        '"aa"': T, '"ab"': T, '"c"': F,
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "texts"), CASES, ids=lambda value: json.dumps(value)[:60]
)
def test_grammar_accepts_exactly_the_texts_that_follow_the_schema(
    schema: Any, texts: dict[str, bool]
) -> None:
    grammar = grammar_of(schema, strict=True)
    assert {text: accepts(grammar, text) for text in texts} == texts


def test_parameter_kinds_follow_all_references() -> None:
    root = {
        "$defs": {
            "Box<Int>": {"type": "integer"},
            "p": {"$anchor": "pet", "type": "null"},
        }
    }
    for reference, kinds in (
        ("#/$defs/Box%3CInt%3E", {"integer"}),
        ("#pet", {"null"}),
        ("#/$defs/none", set()),
        ("x", set()),
    ):
        assert Parameter({"$ref": reference}, root).kinds() == kinds


NOT_FOLLOWED = {
    "uniqueItems": {"items": {"type": "integer"}, "uniqueItems": True},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "pattern inside not": {"type": "string", "not": {"pattern": "^a"}},
    "type integer inside not": {"type": "number", "multipleOf": 0.5, "not": {"type": "integer"}},
    "multipleOf inside not": {"properties": {"a": {"not": {"multipleOf": 3}}}},
    "oneOf": {"oneOf": [{"properties": {f"{i}{j}": {"minLength": j} for j in range(9)}} for i in range(9)]},
    "contains": {"allOf": [{"contains": {"const": 1}}, {"contains": {"const": 2}}]},
    "minProperties": {"properties": {f"p{i}": {} for i in range(900)}, "minProperties": 450},
}  # fmt: skip


@pytest.mark.parametrize("keyword", NOT_FOLLOWED)
def test_unsupported_keyword_is_ignored_unless_the_schema_is_strict(
    keyword: str,
) -> None:
    schema = NOT_FOLLOWED[keyword]
    assert grammar_of(schema)
    with pytest.raises(SchemaError, match=f"strict JSON schema .*{keyword}"):
        grammar_of(schema, strict=True)


# Random schemas with few types and values, so that some random values are valid

NAMES = ("a", "b", "c")
COUNTS = st.integers(0, 3)
NUMBERS = st.integers(-3, 3) | st.sampled_from([-1.5, 0.25, 2.5])
# The validator uses Python's `$`, which also matches before a final line break. The `$`
# of JSON Schema does not.
TEXTS = st.text('ab\n"', max_size=3).filter(lambda text: not text.endswith("\n"))
PATTERNS = st.sampled_from(["^a", "b$", "^a|b$", "^[ab]{2}$", "a", "^$", "[^a]"])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)


def some_of(
    keywords: dict[str, st.SearchStrategy[Any]], **always: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """Returns a strategy for schemas with all keywords of `always` and any subset of
    `keywords`."""
    return st.fixed_dictionaries(always, optional=keywords)


NUMBER = some_of(
    {
        "minimum": NUMBERS, "maximum": NUMBERS, "exclusiveMinimum": NUMBERS, "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 2, 0.5, 0.1, 10]),
    },
    type=st.sampled_from(["number", "integer"]),
)  # fmt: skip
STRING = some_of(
    {"minLength": COUNTS, "maxLength": COUNTS, "pattern": PATTERNS},
    type=st.just("string"),
)
LEAVES = (
    NUMBER
    | STRING
    | st.just({})
    | st.booleans()
    | st.fixed_dictionaries({"const": VALUES})
    | st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)})
    | st.fixed_dictionaries(
        {
            "type": st.lists(
                st.sampled_from(["null", "boolean", "string", "integer"]), min_size=1
            )
        }
    )
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
        additionalProperties=st.just(True) | inner,
    )  # fmt: skip


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    counts = {
        "maxItems": COUNTS,
        "contains": inner,
        "minContains": COUNTS,
        "maxContains": COUNTS,
    }
    plain = {"type": st.just("array"), "items": inner, "minItems": COUNTS}
    prefix = st.lists(inner, min_size=1, max_size=2)
    return some_of({**counts, "uniqueItems": st.booleans()}, **plain) | some_of(
        counts, **plain, prefixItems=prefix
    )


def combinations(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    condition = st.fixed_dictionaries(
        {"if": inner}, optional={"then": inner, "else": inner}
    )
    words = ("allOf", "anyOf", "oneOf")
    return st.one_of(
        *(
            st.fixed_dictionaries({word: several}, optional={"not": inner})
            for word in words
        ),
        st.fixed_dictionaries({"not": inner}),
        condition,
        st.tuples(objects(inner), condition).map(lambda two: {**two[0], **two[1]}),
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: objects(inner) | arrays(inner) | combinations(inner),
    max_leaves=6,
)


def orders(value: Any) -> list[str]:
    """Returns the JSON texts of a value: one text for each order of the properties in
    its objects."""
    if isinstance(value, dict):
        texts = []
        for items in itertools.permutations(value.items()):
            parts = (
                [f"{json.dumps(name)}:{text}" for text in orders(item)]
                for name, item in items
            )
            texts += [
                "{" + ",".join(choice) + "}" for choice in itertools.product(*parts)
            ]
        return texts
    if isinstance(value, list):
        return [
            "[" + ",".join(choice) + "]"
            for choice in itertools.product(*map(orders, value))
        ]
    return [json.dumps(value)]


@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(SCHEMAS, st.lists(VALUES, min_size=6, max_size=12))
def test_strict_grammar_accepts_a_random_value_if_the_validator_does(
    schema: Any, values: list[Any]
) -> None:
    """All schemas are compiled with strict=True.

    If a schema is refused because nothing matches it, no value may be valid.
    """
    is_valid = Draft202012Validator(schema).is_valid
    try:
        grammar = grammar_of(schema, strict=True)
    except SchemaError as error:
        assume("nothing matches" in str(error))
        assert not any(map(is_valid, values))
        return
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
    # Skips a schema with patterns that contradict each other.
    assume(not matcher.is_error())
    for value in values:
        assert any(accepts(grammar, text) for text in orders(value)) == is_valid(
            value
        ), (value, grammar)
