"""Tests the parsing of answers.

The parts of an answer do not depend on its chunks, and text outside of calls and
delimiters is kept. An answer ends before the first stop string.
"""

import time
from typing import Any

import pytest
import templates
from hypothesis import given
from hypothesis import strategies as st

from moegguf.generate.parsing import StopStrings, answer_parser, needs_special_tokens

WEATHER = {"city": "Paris", "days": 3}


def split(
    template: str, chunks: list[str], **options: Any
) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """Parses the chunks of an answer. Returns its text, its thinking and its calls."""
    parser = answer_parser(template, **{"tools": [{}], **options})
    deltas = [*(parser.feed(chunk) for chunk in chunks), parser.end()]
    calls = [
        (call.name, dict(call.arguments))
        for delta in deltas
        for call in delta.tool_calls
    ]
    return "".join(p.text for p in deltas), "".join(p.thinking for p in deltas), calls


CALL = ("get_weather", WEATHER)
JSON = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
ARGUMENTS = '{"city": "Paris", "days": 3}'

ANSWERS = {
    "plain": (templates.QWEN, "Hello, <b>world</b> [1]", ("Hello, <b>world</b> [1]", "", [])),
    "thinking": (templates.QWEN, "<think>\nHm, <i>.\n</think>\n\nYes.", ("Yes.", "Hm, <i>.", [])),
    "unclosed thinking": (templates.QWEN, "<think>\nHm", ("", "Hm", [])),
    "hermes, two after text": (
        templates.QWEN,
        f"Let me look.\n<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>\n",
        ("Let me look.\n", "", [CALL, CALL]),
    ),
    "hermes after thinking": (
        templates.QWEN,
        f"<think>\nA call.\n</think>\n\n<tool_call>\n{JSON}\n</tool_call>",
        ("", "A call.", [CALL]),
    ),
    "hermes, never closed": (templates.QWEN, f"<tool_call>\n{JSON}", ("", "", [CALL])),
    "hermes, malformed": (
        templates.QWEN,
        "<tool_call>\n{no json}\n</tool_call> so",
        ("<tool_call>\n{no json}\n</tool_call> so", "", []),
    ),
    "hermes, the mark in prose first": (
        templates.QWEN,
        f"I write <tool_call> so: <tool_call>{JSON}</tool_call>",
        ("I write <tool_call> so: ", "", [CALL]),
    ),
    "hermes, the closing mark in an argument": (
        templates.QWEN,
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>',
        ("", "", [("say", {"text": "</tool_call>"})]),
    ),
    "qwen coder": (
        templates.QWEN,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        ("", "", [CALL]),
    ),
    "glm": (
        templates.QWEN,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        ("", "", [CALL]),
    ),
    "mistral list": (templates.MISTRAL, f"[TOOL_CALLS][{JSON}, {JSON}]", ("", "", [CALL, CALL])),
    "mistral names": (
        templates.MISTRAL,
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get_weather{ARGUMENTS}",
        ("", "", [CALL, CALL]),
    ),
    "mistral, malformed": (templates.MISTRAL, "Well [TOOL_CALLS]what?", ("Well [TOOL_CALLS]what?", "", [])),
    "llama, two": (templates.LLAMA, f"{JSON}; {JSON}", ("", "", [CALL, CALL])),
    "llama, python tag": (templates.LLAMA, f"<|python_tag|>{JSON}", ("", "", [CALL])),
    "llama, JSON that is no call": (templates.LLAMA, '{"city": 1}', ('{"city": 1}', "", [])),
    "llama, a name that is no call": (templates.LLAMA, '{"name": 1} ok', ('{"name": 1} ok', "", [])),
    "deepseek": (
        templates.DEEPSEEK,
        "</think>It is <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        ("</think>It is ", "", [CALL, CALL]),
    ),
    "harmony": (
        templates.HARMONY,
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes <3<|return|>",
        ("Yes <3", "Hm <b>.", []),
    ),
    "harmony call": (
        templates.HARMONY,
        "<|channel|>analysis<|message|>A call.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
        f" <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        ("", "A call.", [CALL]),
    ),
    "harmony call, older": (
        templates.HARMONY,
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}",
        ("", "", [CALL]),
    ),
    "harmony, malformed call": (
        templates.HARMONY, "<|channel|>commentary to=functions.x<|message|>{no<|call|>", ("{no", "", [])
    ),
    "harmony, no channels": (templates.HARMONY, "Just text.", ("Just text.", "", [])),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_parser_splits_an_answer_into_text_thinking_and_calls(kind: str) -> None:
    template, answer, expected = ANSWERS[kind]
    assert split(template, [answer]) == split(template, list(answer)) == expected


MARKS = (
    "<think>", "</think>", "\n", " ", "<tool_call>", "</tool_call>", JSON, "{", "}", "[TOOL_CALLS]", "[",
    "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<|channel|>", "<|message|>", "<|end|>",
    "<|start|>", "final", "analysis", "<|call|>", "to=functions.x", "<function=f>", "</function>", '"name"', "ä🙂",
    "<", "plain words",
)  # fmt: skip
ALL = (
    templates.QWEN,
    templates.MISTRAL,
    templates.LLAMA,
    templates.DEEPSEEK,
    templates.HARMONY,
)
anything = st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=12).map(
    "".join
)


@given(
    st.sampled_from(ALL),
    anything,
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.booleans(),
)
def test_parser_result_does_not_depend_on_chunks(
    template: str, answer: str, sizes: list[int], tools: bool
) -> None:
    chunks, at = [], 0
    while at < len(answer):
        chunks.append(answer[at : at + sizes[len(chunks) % len(sizes)]])
        at += len(chunks[-1])
    given_tools = [{}] if tools else []
    assert split(template, chunks, tools=given_tools) == split(
        template, [answer], tools=given_tools
    )


@given(st.sampled_from(ALL[:-1]), anything)
def test_parser_loses_no_text(template: str, answer: str) -> None:
    text, thinking, calls = split(template, [answer])
    # Only the thinking delimiters may be missing; whitespace is not compared.
    if not calls:
        assert "".join((thinking + text).split()) in (
            "".join(answer.split()),
            unmarked(answer),
        )


def unmarked(answer: str) -> str:
    return "".join(answer.replace("<think>", "", 1).replace("</think>", "", 1).split())


@given(st.sampled_from((templates.MISTRAL, templates.LLAMA)), anything)
def test_parser_without_thinking_and_tools_keeps_the_text_unchanged(
    template: str, answer: str
) -> None:
    assert split(template, [answer], tools=()) == (answer, "", [])


@pytest.mark.parametrize(
    ("template", "answer", "begun", "expected"),
    [
        (
            templates.QWEN,
            ["Hm", ".\n</thi", "nk>\n", "\nYes"],
            "assistant\n<think>\n",
            ("Yes", "Hm.", []),
        ),
        (
            templates.QWEN,
            ["Yes"],
            "assistant\n<think>\n\n</think>\n\n",
            ("Yes", "", []),
        ),
        (
            templates.HARMONY,
            ["Yes<|return|>"],
            "<|start|>assistant<|channel|>final<|message|>",
            ("Yes", "", []),
        ),
    ],
    ids=["thinking", "thinking that has ended", "a channel"],
)
def test_parser_continues_thinking_or_a_channel_begun_by_the_prompt(
    template: str, answer: list[str], begun: str, expected: Any
) -> None:
    assert split(template, answer, prompt_end=begun) == expected


def test_parser_holds_back_text_only_while_a_mark_is_possible() -> None:
    parser = answer_parser(templates.QWEN, [{}])
    fed = [parser.feed(text).text for text in ("Well ", "<tool", "box>", "a < b")]
    assert fed == ["Well ", "", "<toolbox>", "a < b"]
    parser.feed(f"<tool_call>{JSON}")
    (call,) = parser.feed("</tool_call>").tool_calls
    assert call.id.startswith("call_") and len(call.id) == 13
    assert (call.name, call.arguments) == CALL


def test_parser_converts_text_arguments_to_the_types_of_the_schema() -> None:
    tool = {
        "function": {
            "name": "find",
            "parameters": {"properties": {"zip": {"type": "string"}}},
        }
    }
    values = "<parameter=zip>\n75001\n</parameter><parameter=n>7</parameter>"
    answer = f"<tool_call><function=find>{values}</function></tool_call>"
    assert split(templates.QWEN, [answer], tools=[tool])[2] == [
        ("find", {"zip": "75001", "n": 7})
    ]


def test_a_call_that_is_cut_behind_an_escaped_quote_keeps_its_arguments() -> None:
    parser = answer_parser(templates.QWEN, [{}])
    parser.feed('<tool_call>{"name": "say", "arguments": {"text": "a \\"')
    (call,) = parser.end(cut=True).tool_calls
    assert (call.name, call.arguments) == ("say", {"text": 'a "'})


def test_parser_reads_a_long_answer_full_of_marks_in_linear_time() -> None:
    answer = ["<tool_call>", "</tool_call>", "<think>", '{"', "<"] * 20_000
    begin = time.perf_counter()
    text, _, _ = split(templates.QWEN, answer)
    assert time.perf_counter() - begin < 10
    assert len(text) == len("".join(answer))


def test_needs_special_tokens_is_true_for_control_token_marks() -> None:
    assert needs_special_tokens(templates.MISTRAL)
    assert needs_special_tokens(templates.HARMONY)
    assert not needs_special_tokens(templates.PLAIN)
    assert not needs_special_tokens(None)


TEXT = st.text("ab<>|", max_size=40)


def fed(stops: list[str], text: str, cuts: list[int]) -> tuple[str, StopStrings]:
    """Feeds `text` to a filter, split at places selected by `cuts`. Returns the
    filter's output, and the filter."""
    filtered, out, begin = StopStrings(stops), "", 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        out += filtered.feed(text[begin:end])
        begin = end
    return out + filtered.end(), filtered


@given(
    st.lists(st.text("ab<>|", max_size=5), max_size=4),
    TEXT,
    st.lists(st.integers(0, 40), max_size=12),
)
def test_stop_strings_end_the_text_before_the_first_match(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    places = [text.index(stop) for stop in stops if stop and stop in text]
    out, filtered = fed(stops, text, sorted(cuts))
    whole, _ = fed(stops, text, [])
    assert whole == text[: min(places, default=len(text))]
    assert bool(filtered.found) == bool(places)
    # The cuts may affect where the text ends. A short stop string ends the text at
    # once, even if a longer stop string began before it.
    assert whole.startswith(out) or out.startswith(whole)
    assert not any(stop in out for stop in stops if stop)


def test_stop_strings_hold_back_only_a_possible_beginning() -> None:
    stops = StopStrings(["<|end|>", "\n\nUser:"])
    assert [stops.feed(text) for text in ("a<", "b", "<|en", "x<|end", "|>y", "z")] == [
        "a",
        "<b",
        "",
        "<|enx",
        "",
        "",
    ]
    assert stops.found and stops.end() == ""
    none = StopStrings(["", ""])
    assert none.feed("abc") == "abc" and (none.n_held, none.end()) == (0, "")


def test_stop_strings_filter_a_thousand_strings_fast() -> None:
    begin = time.process_time()
    stops = StopStrings(f"stop number {n}" for n in range(1000))
    for _ in range(1000):
        assert stops.feed("st ") == "st "
    assert time.process_time() - begin < 2
