"""Tests reading and writing of Modelfiles, and the fields that a recipe may contain."""

import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moegguf.errors import OptionError
from moegguf.models.entry import ModelEntry
from moegguf.models.recipe import (
    MAX_TEXT,
    PARAMETERS,
    ROLES,
    Recipe,
    check_messages,
    check_parameters,
    check_text,
    jinja_or_none,
    left_out,
    parameter_lines,
    parse,
    parse_parameter,
    render,
)
from moegguf.options import DRAFTS

EXAMPLE = '''# a pirate
from demo:latest
PARAMETER temperature 0.7
parameter num_ctx 4096
PARAMETER stop "<|im_end|>"
PARAMETER stop User:
SYSTEM """You are a pirate.
Say "arr" often."""

TEMPLATE """{% for m in messages %}{{ m.content }}{% endfor %}"""
MESSAGE user Hello
MESSAGE assistant """Arr,
hello"""
LICENSE first
LICENSE "second"
REQUIRES 0.14.0
'''


def test_parse_reads_every_instruction_in_any_case() -> None:
    assert parse(EXAMPLE) == Recipe(
        from_="demo:latest",
        system='You are a pirate.\nSay "arr" often.',
        template="{% for m in messages %}{{ m.content }}{% endfor %}",
        parameters={
            "temperature": 0.7,
            "num_ctx": 4096,
            "stop": ["<|im_end|>", "User:"],
        },
        messages=(
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Arr,\nhello"},
        ),
        license="first\nsecond",
    )
    assert parse(EXAMPLE.replace("\n", "\r\n")) == parse(EXAMPLE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs a line `FROM name`"),
        ("FROM", "FROM needs a name"),
        ("FROM a\nFROM b", "line 2: FROM is given twice"),
        ("FROM a\n\nPARAMETR x 1", "line 3: 'PARAMETR x 1' must start with one of"),
        ("FROM=a", "PARSER and a space; correct the line"),
        (
            "FROM a\nPARAMETER:top_k 1",
            "line 2: 'PARAMETER:top_k 1' must start with one of",
        ),
        ("FROM\N{NO-BREAK SPACE}a", r"'FROM\xa0a' must start with one of"),
        (
            "FROM a\nSYSTEM You are\na pirate.",
            "line 3: 'a pirate.' must start with one of",
        ),
        ("FROM a\nPARAMETER temprature 1", "did you mean 'temperature'"),
        (
            "FROM a\nPARAMETER temperature hot",
            "line 2: the parameter 'temperature' must be a finite number, but is 'hot'",
        ),
        ("FROM a\nPARAMETER num_ctx 1.5", "must be a 64-bit integer, but is '1.5'"),
        (
            "FROM a\nPARAMETER use_mmap 2",
            "must be true or false, but is '2'; correct it, or leave it out.",
        ),
        (
            'FROM a\nSYSTEM """never closed',
            "line 2: the opening quotation mark after SYSTEM",
        ),
        (
            'FROM a\nSYSTEM "never closed',
            "line 2: the opening quotation mark after SYSTEM",
        ),
        (
            "FROM a\nMESSAGE wizard hi",
            "role must be one of system, user, assistant, tool",
        ),
        ("FROM a\nADAPTER", "ADAPTER needs a path"),
        ("FROM a\nSYSTEM " + "x" * (MAX_TEXT + 1), "at most"),
        ("x" * (5 << 20), "at most"),
    ],
)
def test_parse_names_the_line_and_the_rule_of_a_mistake(text: str, words: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse(text)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 500


def test_parse_leaves_out_ollama_instructions_and_go_templates() -> None:
    with pytest.warns(
        UserWarning, match="(RENDERER|PARSER) qwen3 names a part of Ollama"
    ):
        assert parse("FROM demo\nRENDERER qwen3\nPARSER qwen3") == Recipe(from_="demo")
    (sentence,) = left_out(
        parse(
            'FROM a\nTEMPLATE """{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"""'
        )
    )
    assert "Go's language" in sentence
    for text in (
        "{{ messages[0].content }}", "{{ range(3) | join(' ') }}{{ messages[-1].content }}",
        "{{range(messages | length)}}",
    ):  # fmt: skip
        assert (
            left_out(parse(f"FROM a\nTEMPLATE {text}")) == []
            and jinja_or_none(text) == text
        )
    for text in (
        "{{ range .Messages }}",
        "{{- range (slice .Messages 1) }}",
        "{{ range(.Messages) }}{{ end }}",
    ):
        assert jinja_or_none(text) is None


def entry_of(**values: Any) -> ModelEntry:
    return ModelEntry(
        "me:latest", "own", (Path("/x.gguf"),), 1, "0" * 64, datetime.now(UTC), **values
    )


def test_parameter_lines_list_each_value() -> None:
    entry = entry_of(
        parameters={
            "temperature": 0.5,
            "stop": ["a", "b"],
            "use_mmap": False,
            "top_p": 0.0,
        }
    )
    assert parameter_lines(entry.parameters) == [
        'stop                           "a"',
        'stop                           "b"',
        "temperature                    0.5",
        "top_p                          0",
        "use_mmap                       false",
    ]


texts = st.text(
    alphabet=st.characters(exclude_characters="\r", exclude_categories=["Cs"]),
    max_size=30,
)
texts = texts | st.text(alphabet='"\n #a{%', max_size=14)
jinja = texts.map(lambda text: "{% x %}" + text)
values_of: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    list: st.lists(texts, min_size=1, max_size=3),
    str: texts,
}
values = {name: values_of[kind] for name, kind in PARAMETERS.items()} | {
    "draft": st.sampled_from(DRAFTS)
}
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": texts}),
    max_size=3,
).map(tuple)


@given(
    system=st.none() | texts,
    template=st.none() | jinja,
    parameters=st.fixed_dictionaries({}, optional=values),
    messages=messages,
    license=st.none() | texts,
)
@example(system='"\n', template=None, parameters={}, messages=(), license="\n")
def test_rendered_modelfile_parses_to_the_same_recipe(**made: Any) -> None:
    assert parse(render(entry_of(**made), "me:latest")) == Recipe(
        from_="me:latest", **made
    )


words = st.sampled_from(
    ["FROM", "SYSTEM", '"', '"""', "\n", " ", "x", "#", "PARAMETER", "MESSAGE user"]
)


@given(st.text(max_size=200) | st.lists(words, max_size=20).map("".join))
def test_parse_returns_a_recipe_or_an_option_error_for_any_text(text: str) -> None:
    with warnings.catch_warnings(), suppress(OptionError):
        warnings.simplefilter("ignore")
        assert parse(text).from_


def test_parse_rejects_long_runs_of_quotes_fast() -> None:
    for text in (
        "FROM a\nSYSTEM " + '"' * 200_000 + "x",
        "FROM a\nSYSTEM " + '""""\n' * 20_000 + "x",
    ):
        with pytest.raises(OptionError):
            parse(text)


def test_check_parameters_converts_values_and_rejects_wrong_types() -> None:
    assert check_parameters({"temperature": 1, "num_ctx": 4096.0, "stop": "x"}) == {
        "temperature": 1.0, "num_ctx": 4096, "stop": ["x"],
    }  # fmt: skip
    assert check_parameters({"tempo": 1}) == {}
    assert left_out(Recipe(parameters={"tempo": 1, "seed": 1})) == [
        "there is no parameter 'tempo'; it is left out."
    ]
    for bad in ({"num_ctx": "4096"}, {"num_ctx": True}, {"num_ctx": 2**64}, {"stop": [1]}, {"use_mmap": 1},
                {"temperature": float("inf")}, {"temperature": [1]}, {"stop": None}, {"num_ctx": None}):  # fmt: skip
        with pytest.raises(OptionError):
            check_parameters(bad)


def test_parse_parameter_converts_text_by_type() -> None:
    assert parse_parameter("num_ctx", "8192") == 8192
    assert parse_parameter("temperature", "1") == 1.0
    assert parse_parameter("use_mmap", "TRUE") is True
    assert parse_parameter("stop", "1") == "1"
    for name, text in (
        ("num_ctx", "[" * 100_000),
        ("num_ctx", ""),
        ("top_p", "null"),
        ("nothing", "1"),
    ):
        with pytest.raises(OptionError):
            parse_parameter(name, text)


GO_NUMBERS: dict[str, dict[str, Any]] = {
    "temperature": {
        ".5": 0.5, "+0.5": 0.5, "5.": 5.0, "-0": 0.0, "007": 7.0, "1e-2": 0.01, "1E+2": 100.0, "-.5e1": -5.0,
        "1_0.5": 10.5, "0x1p-2": 0.25, "-0X1.8P+1": -3.0, "0x_.8p0": None, "1__0": None, "_1": None, ".": None,
        "": None, "0x1": None, "1p2": None, "inf": None, "NaN": None, "1e999": None, "0x1p9999": None, " 1": 1.0,
        "\N{ARABIC-INDIC DIGIT ONE}": None, "1,5": None, "true": None, "[1]": None,
    },
    "top_k": {
        "007": 7, "-0": 0, "+5": 5, "9223372036854775807": 2**63 - 1, "9223372036854775808": None, "5.": None,
        "4096.0": None, "1e3": None, "1_000": None, "0x10": None, "\N{ARABIC-INDIC DIGIT ONE}": None, "true": None,
        "9" * 5000: None,
    },
    "use_mmap": {
        "true": True, "TRUE": True, "True": True, "t": True, "T": True, "1": True, "false": False, "FALSE": False,
        "False": False, "f": False, "F": False, "0": False, "tRUE": None, "yes": None, "2": None, "01": None,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [(name, *row) for name, rows in GO_NUMBERS.items() for row in rows.items()],
)
def test_parse_reads_numbers_like_go(name: str, text: str, value: Any) -> None:
    if value is not None:
        found = parse(f"FROM a\nPARAMETER {name} {text}").parameters[name]
        assert (found, type(found)) == (value, type(value))
        return
    with pytest.raises(
        OptionError, match=rf"the parameter '{name}' must be .*, but is .*; correct it"
    ):
        parse_parameter(name, text)


def test_check_messages_and_check_text_reject_other_types() -> None:
    assert check_messages([{"role": "user", "content": "x", "more": 1}]) == (
        {"role": "user", "content": "x"},
    )
    for bad in ("x", [1], [{"role": "x"}], [{"role": "user", "content": 3}], [None]):
        with pytest.raises(OptionError):
            check_messages(bad)
    assert check_text("it", "caf\udce9 \ud83d\ude00") == "caf\ufffd \N{GRINNING FACE}"
    with pytest.raises(OptionError):
        check_text("it", 3)  # type: ignore[arg-type]
