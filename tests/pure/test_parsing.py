"""Answers are parsed to the same parts however they are chunked, and no text is lost."""

import time
from typing import Any

import pytest
import templates
from hypothesis import given
from hypothesis import strategies as st

from moegguf.generate.parsing import answer_parser, needs_special_tokens

WEATHER = {"city": "Paris", "days": 3}


def split(template: str, chunks: list[str], **options: Any) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """Text, thinking and calls of the whole answer."""
    parser = answer_parser(template, **{"tools": [{}], **options})
    deltas = [*(parser.feed(chunk) for chunk in chunks), parser.end()]
    calls = [(call.name, dict(call.arguments)) for delta in deltas for call in delta.tool_calls]
    return "".join(p.text for p in deltas), "".join(p.thinking for p in deltas), calls


CALL = ("get_weather", WEATHER)
JSON = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
ARGUMENTS = '{"city": "Paris", "days": 3}'

ANSWERS = {
    "plain": (templates.QWEN, "Hello, <b>world</b> [1]", ("Hello, <b>world</b> [1]", "", [])),
    "thinking": (templates.QWEN, "<think>\nHm, <i>.\n</think>\n\nYes.", ("Yes.", "Hm, <i>.", [])),
    "unclosed thinking": (templates.QWEN, "<think>\nHm", ("", "Hm", [])),
    "hermes": (templates.QWEN, f"<tool_call>\n{JSON}\n</tool_call>", ("", "", [CALL])),
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
    "llama": (templates.LLAMA, JSON.replace("arguments", "parameters"), ("", "", [CALL])),
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
def test_an_answer_is_split_into_its_parts(kind: str) -> None:
    template, answer, expected = ANSWERS[kind]
    assert split(template, [answer]) == split(template, list(answer)) == expected


MARKS = (
    "<think>", "</think>", "\n", " ", "<tool_call>", "</tool_call>", JSON, "{", "}", "[TOOL_CALLS]", "[",
    "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<|channel|>", "<|message|>", "<|end|>",
    "<|start|>", "final", "analysis", "<|call|>", "to=functions.x", "<function=f>", "</function>", '"name"', "ä🙂",
    "<", "plain words",
)  # fmt: skip
ALL = (templates.QWEN, templates.MISTRAL, templates.LLAMA, templates.DEEPSEEK, templates.HARMONY)
anything = st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=12).map("".join)


@given(st.sampled_from(ALL), anything, st.lists(st.integers(1, 9), min_size=1, max_size=20), st.booleans())
def test_every_chunking_gives_the_same(template: str, answer: str, sizes: list[int], tools: bool) -> None:
    chunks, at = [], 0
    while at < len(answer):
        chunks.append(answer[at : at + sizes[len(chunks) % len(sizes)]])
        at += len(chunks[-1])
    given_tools = [{}] if tools else []
    assert split(template, chunks, tools=given_tools) == split(template, [answer], tools=given_tools)


@given(st.sampled_from(ALL[:-1]), anything)
def test_nothing_is_lost(template: str, answer: str) -> None:
    text, thinking, calls = split(template, [answer])
    if not calls:  # all but the thinking marks and blanks beside them is kept
        assert "".join((thinking + text).split()) in ("".join(answer.split()), unmarked(answer))


def unmarked(answer: str) -> str:
    return "".join(answer.replace("<think>", "", 1).replace("</think>", "", 1).split())


@given(st.sampled_from((templates.MISTRAL, templates.LLAMA)), anything)
def test_without_thinking_and_tools_the_text_stays_as_it_is(template: str, answer: str) -> None:
    assert split(template, [answer], tools=()) == (answer, "", [])


def test_the_prompt_may_have_begun_the_thinking() -> None:
    answer = ["Hm", ".\n</thi", "nk>\n", "\nYes"]
    assert split(templates.QWEN, answer, prompt_end="<|im_start|>assistant\n<think>\n") == ("Yes", "Hm.", [])
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert split(templates.QWEN, ["Yes"], prompt_end=closed) == ("Yes", "", [])


def test_the_prompt_may_have_begun_a_channel() -> None:
    end = "<|start|>assistant<|channel|>final<|message|>"
    assert split(templates.HARMONY, ["Yes<|return|>"], prompt_end=end) == ("Yes", "", [])


def test_text_is_held_back_only_while_it_may_become_a_mark() -> None:
    parser = answer_parser(templates.QWEN, [{}])
    assert parser.feed("Well ").text == "Well "
    assert parser.feed("<tool").text == ""
    assert parser.feed("box>").text == "<toolbox>"
    assert parser.feed("a < b").text == "a < b"


def test_calls_come_as_soon_as_they_are_complete() -> None:
    parser = answer_parser(templates.QWEN, [{}])
    parser.feed(f"<tool_call>{JSON}")
    (call,) = parser.feed("</tool_call>").tool_calls
    assert call.id.startswith("call_") and len(call.id) == 13
    assert (call.name, call.arguments) == CALL


def test_values_written_as_text_have_the_types_of_the_schema() -> None:
    tool = {"function": {"name": "find", "parameters": {"properties": {"zip": {"type": "string"}}}}}
    values = "<parameter=zip>\n75001\n</parameter><parameter=n>7</parameter>"
    answer = f"<tool_call><function=find>{values}</function></tool_call>"
    assert split(templates.QWEN, [answer], tools=[tool])[2] == [("find", {"zip": "75001", "n": 7})]


def test_a_long_answer_full_of_marks_takes_linear_time() -> None:
    answer = ["<tool_call>", "</tool_call>", "<think>", '{"', "<"] * 20_000
    begin = time.perf_counter()
    text, _, _ = split(templates.QWEN, answer)
    assert time.perf_counter() - begin < 10
    assert len(text) == len("".join(answer))


def test_formats_whose_marks_are_control_tokens_need_them() -> None:
    assert needs_special_tokens(templates.MISTRAL)
    assert needs_special_tokens(templates.HARMONY)
    assert not needs_special_tokens(templates.PLAIN)
    assert not needs_special_tokens(None)
