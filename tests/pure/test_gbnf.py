"""Tests grammars in GBNF: texts that they accept and reject, and grammars that are
refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from llguidance import LLTokenizer

from moegguf.errors import SchemaError
from moegguf.generate.constraint import constraint_for
from moegguf.generate.request import Request
from moegguf.generate.sampler import Matcher, MatcherTokens
from tools import vendor

T, F = True, False
BYTES = MatcherTokens(LLTokenizer("byte"), 256, frozenset())


def matcher(grammar: str, **options: Any) -> Matcher:
    request = Request(messages=(), grammar=grammar, **options)
    constraint = constraint_for(
        request, None, token_of=lambda text: {"<x>": ord("x")}.get(text)
    )
    assert constraint is not None
    return Matcher(constraint, BYTES)


def accepts(grammar: str, text: str) -> bool:
    one = matcher(grammar)
    for byte in text.encode():
        if not one.allows(byte):
            return False
        one.accept(byte)
    return one.finished


CASES: dict[str, tuple[str, dict[str, bool]]] = {
    "a repetition": ('root ::= "a"{5,5}', {"aaaaa": T, "aaaa": F, "aaaaaa": F}),
    "a number of times": ('root ::= "ab"{2}', {"abab": T, "ab": F, "aabb": F}),
    "at least": ('root ::= ("a" "b"){2,}', {"abab": T, "ababab": T, "ab": F}),
    "at most, with blanks": ("root ::= [a-c]{ 0 , 2 }", {"": T, "ab": T, "abc": F}),
    "any number": ('root ::= "a"* "b"+ "c"?', {"b": T, "aabbc": T, "ac": F}),
    "a repetition of a repetition": ('root ::= "a"*? "b"', {"aab": T, "b": T}),
    "alternatives": ('root ::= "a" | "b" "c" |', {"a": T, "bc": T, "": T, "b": F}),
    "alternatives on lines of their own": (
        'root ::= "a" |\n "b"\n\n\nx ::= "c"',
        {"b": T, "c": F},
    ),
    "lines within parentheses": (
        'root ::= (\n  "a" # first\n  | "b"\r\n)\n',
        {"a": T, "b": T},
    ),
    "comments": ('# first\nroot ::= "#" # "not a rule"\n# last', {"#": T}),
    "classes": (
        "root ::= [a-c_] [^a-c] [-a] [a-] [\\]\\[\\\\]",
        {"ax--]": T, "_d-a\\": T, "aa--]": F},
    ),
    "characters of a class that are signs elsewhere": (
        "root ::= [&~^|/]+ [a&&b]+",
        {"&~^|/&ba": T, "&x": F},
    ),
    "escapes": (
        'root ::= "\\x41\\u00e4\\U0001F600\\"\\\\\\n\\t\\r" [\\x00-\\x1F\\u00e4]',
        {'Aä😀"\\\n\t\r\x01': T},
    ),
    "any character": ("root ::= . .", {"ä\n": T, "a": F}),
    "letters beyond ASCII": ("root ::= [ぁ-ゟ]+", {"ひらがな": T, "a": F}),
    "no text": ('root ::= ""', {"": T, "a": F}),
    "parts that may be divided anyhow": (
        'root ::= a b\na ::= [ab]*\nb ::= "b"',
        {"aab": T, "b": T, "a": F},
    ),
    "a text and a class that begin alike": (
        'root ::= "abc" | [a-z] "x"',
        {"abc": T, "ax": T, "ab": F},
    ),
    "names with signs": (
        'root ::= my-rule-2 A\nmy-rule-2 ::= "a"\nA ::= "A"\na ::= "b"',
        {"aA": T, "ab": F},
    ),
    "recursion": ('root ::= "(" root ")" | "x"', {"((x))": T, "((x)": F}),
    "recursion on both sides": (
        'root ::= s\ns ::= "(" s ")" s | ""',
        {"(())()": T, "(()": F},
    ),
    "recursion on the left": ('root ::= root "a" | "b"', {"baa": T, "ab": F}),
    "recursion on the right": (
        'root ::= ws "e"\nws ::= ([ \\t\\n] ws)?',
        {" \n e": T, "e": T, "  ": F},
    ),
    "recursion on the right in an alternative": (
        'root ::= "a" root | "b" root | "c"',
        {"abac": T, "aba": F},
    ),
    "a rule that is defined twice": (
        'root ::= a\na ::= "x"\na ::= "y"',
        {"y": T, "x": F},
    ),
    "tokens by number": ("root ::= <[97]> !<[98]>", {"ac": T, "ab": F}),
    "a token by its text": ("root ::= <x> !<x>", {"xy": T, "xx": F}),
}


@pytest.mark.parametrize("kind", CASES)
def test_gbnf_grammar_accepts_exactly_the_described_texts(kind: str) -> None:
    grammar, texts = CASES[kind]
    assert {text: accepts(grammar, text) for text in texts} == texts


REFUSED: dict[str, tuple[str, str]] = {
    "an unknown rule": ('root ::= "x" foo', "'foo'.*add the rule"),
    "no root": ('foo ::= "x"', "'root'.*add the rule"),
    "nothing": ("", "'root'"),
    "an unknown escape": (r'root ::= "a\q"', r"escape '\\\\q'; correct it"),
    "half an escape": (r'root ::= "a\x4"', "escape"),
    "no character": (r'root ::= "\UFFFFFFFF"', "is not a character"),
    "an open text": ('root ::= "a"\nb ::= "c', "line 2 .*'\"c'; correct it"),
    "an open parenthesis": ('root ::= ("a"', "closing parenthesis"),
    "an open class": ("root ::= [a", "line 1"),
    "an empty class": ("root ::= []", "empty class"),
    "a range that ends before it begins": ("root ::= [z-a]", "cannot be followed"),
    "a repetition of nothing": ("root ::= *", "line 1 .*'\\*'"),
    "a repetition that ends before it begins": ('root ::= "a"{3,2}', "cannot be followed"),
    "another sign": ('root = "a"', "line 1"),
    "a continued line": ('root ::= "a"\n | "b"', "line 2 .*the name of a rule"),
    "a token that is none": ("root ::= <y>", "'<y>'.*write it as text in quotes"),
    "a token beyond the last": ("root ::= <[1000]>", "cannot be followed"),
    "only itself": ('root ::= root "x"', "nothing matches"),
    "parentheses within parentheses": ("root ::= " + "(" * 2000 + '"a"' + ")" * 2000, "nested 2000 deep"),
    "too long a text": ('root ::= "' + "a" * 300_000 + '"', "1048576 characters"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_invalid_grammar_raises_schema_error_with_the_reason(kind: str) -> None:
    grammar, message = REFUSED[kind]
    begin = time.thread_time()
    with pytest.raises(SchemaError, match=message) as caught:
        matcher(grammar)
    assert time.thread_time() - begin < 2
    assert len(str(caught.value)) < 500


LARGE = {
    "a repetition of a hundred thousand": "root ::= [a-z]{0,100000}",
    "repetitions of repetitions": 'root ::= ((("a"{0,2000}){0,2000}){0,2000}){0,100000}',
    "as many rules as fit": "\n".join(
        [
            "root ::= r0",
            *(f'r{n} ::= "a" r{n + 1}' for n in range(5000)),
            'r5000 ::= "b"',
        ]
    ),
    "recursion without an end": "root ::= root root | [a-z]",
    "what may be empty many times": 'root ::= (("a"*)*)*',
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_grammar_takes_less_than_two_seconds(kind: str) -> None:
    begin = time.thread_time()
    try:
        one = matcher(LARGE[kind])
        for _ in range(200):
            one.mask()
            one.accept(ord("a"))
    except SchemaError:
        pass
    assert time.thread_time() - begin < 2


def test_grammar_with_a_format_or_tools_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    for other in (
        {"format": "json"},
        {"format": {}},
        {"tools": (tool,)},
        {"tools": (tool,), "tool_choice": "required"},
    ):
        with pytest.raises(SchemaError, match="send one of them"):
            matcher('root ::= "a"', **other)
    assert matcher('root ::= "a"', tools=(tool,), tool_choice="none")


TEXTS = {
    "arithmetic": ("(a+1)*b=2\n", "a+=1\n"),
    "c": ("int f(int  x){return  1;}", "int x"),
    "chess": ("1. e4 e5\n2. Nf3 Nc6\n", "1. e9 e5\n"),
    "english": ("Hello, [w] ^x\\", "ä"),
    "japanese": ("ひらがな カタカナ", "a"),
    "json": ('{"a": [1, 2.5e1, "x\\n\\u00e4ä"]}', '{"a" 1}'),
    "json_arr": ("[\n1,\n2]", "[1]"),
    "list": ("- a\n- b\n", "- a"),
}
FOLDER = vendor.VENDOR / "llama.cpp" / "grammars"


@pytest.mark.parametrize("name", TEXTS)
def test_pinned_grammar_accepts_a_valid_text_and_rejects_an_invalid_one(
    name: str,
) -> None:
    right, wrong = TEXTS[name]
    grammar = (FOLDER / f"{name}.gbnf").read_text()
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def test_every_pinned_grammar_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.gbnf")} == TEXTS.keys()
