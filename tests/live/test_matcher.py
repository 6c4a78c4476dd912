"""Tests which texts a matcher accepts: values that fit a JSON schema, and calls that
fit a tool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import templates
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from moegguf.generate.constraint import Constraint, constraint_for
from moegguf.generate.parsing import answer_parser
from moegguf.generate.request import Request
from moegguf.generate.sampler import Matcher, matcher_tokens

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", 3, None, 'a "quoted" ä']},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 3},
                "no": {"type": ["integer", "null"]},
            },
            "required": ["street", "no"],
        },
    },
    "required": ["name", "address"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "item": {"type": "integer"},
                "children": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/node"},
                    "maxItems": 2,
                },
            },
            "required": ["value", "children"],
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "nested objects, enums, optional properties": PERSON,
    "only optional properties": {
        "properties": {
            "a": {"type": "null"},
            "b": {"const": 1},
            "c": {"type": "boolean"},
        }
    },
    "recursion": TREE,
    "arrays": {
        "type": "array",
        "items": {"type": "number"},
        "minItems": 2,
        "maxItems": 4,
    },
    "tuples": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}]},
    "anyOf": {
        "anyOf": [
            {"type": "null"},
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            {"const": "x"},
        ]
    },
    "anyOf beside properties": {
        "type": "object",
        "properties": {"kind": {"type": "string", "maxLength": 1}},
        "required": ["kind"],
        "anyOf": [
            {"properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"$ref": "#/$defs/b"},
        ],
        "$defs": {"b": {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}},
    },
    "allOf": {
        "allOf": [
            {"$ref": "#/$defs/a"},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "$defs": {"a": {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
    },
    "other properties": {
        "type": "object",
        "properties": {
            "ab": {"type": "null"},
            "ac": {"type": "null"},
            "": {"type": "null"},
        },
        "additionalProperties": {"type": "boolean"},
        "required": ["ab"],
    },
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": -2, "maximum": 30.5},
        "maxItems": 9,
    },
    "pattern": {"type": "string", "pattern": r"^(\d{3}|[a-c\"\\-]+)(-\w)?\.$"},
    "formats": {
        "prefixItems": [
            {"type": "string", "format": "uuid"},
            {"type": "string", "format": "ipv4"},
        ]
    },
    "a name that rules have": {
        "properties": {"value": {"const": 1}, "root": {"const": 2}},
        "required": ["value"],
    },
}


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Path]) -> Iterator[Llama]:
    from moegguf.engine.llama import Llama

    with Llama(tiny(), n_ctx=64, n_threads=1, verbose=False) as model:
        yield model


class Walk:
    """Feeds tokens of a model's vocabulary to a matcher. The model is not run."""

    def __init__(self, llm: Llama, constraint: Constraint | None) -> None:
        self._llm = llm
        self._matcher = Matcher(constraint, matcher_tokens(llm.vocabulary))
        self._texts = [
            llm.vocabulary.piece(token, special=True) for token in range(llm.n_vocab())
        ]

    def random(self, seed: int, longest: int = 150) -> str | None:
        """Returns a text made of random allowed tokens, or None if the text has not
        ended after `longest` tokens.

        About half of the time, prefers tokens that consist only of `"`, `]` and `}`, so
        that the text ends sooner.
        """
        dice, out, ends = random.Random(seed), b"", self._llm.vocabulary.is_end
        for _ in range(longest):
            tokens = [int(token) for token in np.flatnonzero(self._matcher.mask())]
            assert tokens, f"nothing may follow {out!r}"
            assert any(map(ends, tokens)) == self._matcher.finished
            if self._matcher.finished and dice.random() < 0.7:
                return out.decode()
            marks = [
                token
                for token in tokens
                if set(self._texts[token]) <= set(b'"]}') and not ends(token)
            ]
            words = [token for token in tokens if not ends(token)]
            token = dice.choice(
                marks if marks and dice.random() < 0.5 else words or tokens
            )
            if ends(token):
                return out.decode()
            assert self._matcher.allows(token)
            self._matcher.accept(token)
            out += self._texts[token]
        return None

    def accepts(self, text: str) -> bool:
        for token in self._llm.tokenize(text.encode(), add_bos=False, special=True):
            allowed = self._matcher.allows(token)
            assert allowed == self._matcher.mask()[token]
            if not allowed:
                return False
            self._matcher.accept(token)
        return self._matcher.finished


@pytest.fixture
def walk(llm: Llama) -> Callable[[Constraint | None], Walk]:
    return lambda constraint: Walk(llm, constraint)


def schema_constraint(
    schema: Any, template: str | None = None, **options: Any
) -> Constraint | None:
    return constraint_for(Request(messages=(), format=schema, **options), template)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_random_texts_of_the_matcher_fit_the_schema(
    kind: str, walk: Callable[..., Walk]
) -> None:
    form = "json" if kind == "any object" else SCHEMAS[kind]
    texts = [walk(schema_constraint(form)).random(seed) for seed in range(8)]
    finished = [text for text in texts if text is not None]
    assert len(finished) > 3
    for text in finished:
        Draft202012Validator(SCHEMAS[kind]).validate(json.loads(text))


NEW_ONLY = pytest.mark.skipif(
    [int(n) for n in version("llguidance").split(".")[:2]] < [1, 9],
    reason="needs llguidance 1.9",
)
ACCEPTED = [
    ("json", '{"a": [1, -2.5e3, "x\\u001f\\n", {"b": null}], "": true}', True),
    pytest.param("json", '{"a": "\\u00e4"}', True, marks=NEW_ONLY),
    pytest.param("json", '{  "a": 1}', False, marks=NEW_ONLY),
    ("json", '{"a": {"b":\n    []},\n  "c": 1}', True),
    pytest.param("json", '{\n  "a": {\n    "b": []\n  }\n}', True, marks=NEW_ONLY),
    ("json", '{"a": "\n"}', False),
    ("json", '{"a": "\\ud800"}', False),
    (
        PERSON,
        '{"name": "Ann", "age": 33, "kind": "cat", "address": {"street": "a", "no": null}}',
        True,
    ),
    (PERSON, '{"name":"Ann","address":{"street":"","no":7}}', True),
    (PERSON, '{"name": "Ann", "age": 151, "address": {"street": "", "no": 7}}', False),
    (PERSON, '{"name": "", "address": {"street": "", "no": 7}}', False),
    ({}, "[1]", True),
    (True, '"x"', True),
    (
        {"type": "string", "pattern": r"^[a-z]+@[a-z]+\.(com|org)$"},
        '"me@example.org"',
        True,
    ),
    (
        {"type": "string", "pattern": r"^[a-z]+@[a-z]+\.(com|org)$"},
        '"me@example.net"',
        False,
    ),
    ({"type": "string", "format": "date-time"}, '"2026-11-21T09:30:00Z"', True),
    (
        {"type": "object", "properties": {"ab": True}, "additionalProperties": True},
        '{"ab": 1, "abc": 2, "a": []}',
        True,
    ),
    (
        {
            "type": "object",
            "properties": {"ab": True},
            "additionalProperties": {"const": 1},
        },
        '{"ab": 1, "ab": 2}',
        False,
    ),
    ({"type": "integer", "minimum": 10}, "9", False),
]


@pytest.mark.parametrize(("form", "text", "passes"), ACCEPTED)
def test_the_matcher_accepts_only_texts_that_fit_the_schema(
    form: Any, text: str, passes: bool, walk: Callable[..., Walk]
) -> None:
    assert walk(schema_constraint(form)).accepts(text) == passes


WHOLE = st.integers(-300, 300)
LARGE = st.integers(-(2**63), 2**63)
# Integers of at most 16 digits. The matcher allows no more digits for an integer
# without bounds.
DIGITS = st.integers(1 - 10**16, 10**16 - 1)


# No deadline, because another process compiles each grammar first.
@settings(deadline=None)
@given(
    low=st.none() | WHOLE | LARGE, high=st.none() | WHOLE | LARGE, number=WHOLE | DIGITS
)
def test_the_matcher_accepts_integers_only_within_their_bounds(
    llm: Llama, low: int | None, high: int | None, number: int
) -> None:
    assume(low is None or high is None or low <= high)
    bounds = {
        key: bound
        for key, bound in (("minimum", low), ("maximum", high))
        if bound is not None
    }
    for near in (number, *bounds.values(), *(bound - 1 for bound in bounds.values())):
        fits = (low is None or near >= low) and (high is None or near <= high)
        assert (
            Walk(llm, schema_constraint({"type": "integer", **bounds})).accepts(
                str(near)
            )
            == fits
        ), near


def test_a_format_allows_thinking_first(walk: Callable[..., Walk]) -> None:
    def accepts(text: str, *, think: bool | None = None, prompt_end: str = "") -> bool:
        return walk(
            constraint_for(
                Request(messages=(), format="json", think=think),
                templates.QWEN,
                prompt_end,
            )
        ).accepts(text)

    assert accepts('<think>\nA <tag>, a <</think>\n\n{"a": 1}')
    assert accepts('{"a": 1}')
    assert accepts('Hm.</think>{"a": 1}', prompt_end="<think>\n")
    assert not accepts('{"a": 1}', prompt_end="<think>\n")
    assert not accepts('<think></think>{"a": 1}', think=False)
    assert not accepts('<think></think></think>{"a": 1}')


def test_a_format_allows_analysis_and_final_channels_of_harmony(
    walk: Callable[..., Walk],
) -> None:
    thought = "<|channel|>analysis<|message|>Hm < <|start|>.<|end|><|start|>assistant"
    constraint = schema_constraint("json", templates.HARMONY)
    assert walk(constraint).accepts(thought + '<|channel|>final<|message|>{"a": 1}')
    assert walk(constraint).accepts(
        '<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    )
    assert not walk(constraint).accepts('{"a": 1}')


TOOLS = (
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer"}},
        "required": ["city"],
    }}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
)  # fmt: skip
FAMILIES = {
    **templates.TEMPLATES,
    "mistral with names": "[TOOL_CALLS] [ARGS] tools",
    "deepseek with json": templates.DEEPSEEK + "```json",
    "kimi": "<|tool_calls_section_begin|> tools",
    "command": "<|START_ACTION|> tools",
    "nemotron": "<TOOLCALL> tools",
    "granite": "<|tool_call|> tools",
    "function": "<function= tools",
    "minimax": "<minimax:tool_call> tools",
    "dsml": "｜DSML｜ tools",
    "python tag": "<|python_tag|> tools",
    "none": "",
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_parser_finds_a_forced_call_in_each_template_family(
    kind: str, walk: Callable[..., Walk]
) -> None:
    ask = Request(messages=(), tools=TOOLS, tool_choice="get_weather", think=False)
    answers = [
        walk(constraint_for(ask, FAMILIES[kind])).random(seed) for seed in range(6)
    ]
    finished = [answer for answer in answers if answer is not None]
    assert finished
    for answer in finished:
        parser = answer_parser(FAMILIES[kind], TOOLS)
        deltas = [*map(parser.feed, answer), parser.end()]
        (call,) = [call for piece in deltas for call in piece.tool_calls]
        assert call.name == "get_weather"
        Draft202012Validator(TOOLS[0]["function"]["parameters"]).validate(
            call.arguments
        )
        assert not "".join(piece.text for piece in deltas).strip()


def test_tool_choice_required_accepts_a_call_of_any_tool(
    walk: Callable[..., Walk],
) -> None:
    constraint = constraint_for(
        Request(messages=(), tools=TOOLS, tool_choice="required"), templates.QWEN
    )
    assert walk(constraint).accepts(
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    assert walk(constraint).accepts(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    assert not walk(constraint).accepts(
        '<tool_call>\n{"name": "later", "arguments": {}}\n</tool_call>'
    )
    assert not walk(constraint).accepts("Hello")


def test_a_format_with_tools_accepts_a_value_or_a_call(
    walk: Callable[..., Walk],
) -> None:
    constraint = schema_constraint({"type": "integer"}, templates.QWEN, tools=TOOLS)
    assert walk(constraint).accepts("42")
    assert walk(constraint).accepts(
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
