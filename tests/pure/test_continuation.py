"""What a prompt ends with when the answer continues a message, and how the answer is parsed and constrained then."""

from typing import Any

import pytest
import templates

from moegguf.errors import OptionError
from moegguf.generate.constraint import constraint_for
from moegguf.generate.parsing import answer_parser
from moegguf.generate.request import GenerationRequest
from moegguf.generate.template import Continuation, continuation_of, split_last

QUESTION = {"role": "user", "content": "hi"}
CALL = {"id": "1", "function": {"name": "f", "arguments": {}}}


def assistant(content: str | list[dict[str, str]] = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("last", "is_split", "continued"),
    [
        (assistant("so"), True, True),
        (assistant(thinking="hm"), True, True),
        (assistant(), True, False),
        (assistant("so", tool_calls=[CALL]), False, False),
        (assistant([{"type": "text", "text": "so"}]), True, True),
        (assistant([{"type": "text", "text": ""}]), True, False),
        (assistant([{"type": "image", "data": ""}, {"type": "text", "text": "so"}]), False, False),
        (QUESTION, False, False),
        ({"role": "tool", "content": "7"}, False, False),
    ],
)
def test_the_last_message_is_continued_if_the_assistant_could_go_on(
    last: dict[str, Any], is_split: bool, continued: bool
) -> None:
    before, message = split_last([QUESTION, last])
    assert list(before) == ([QUESTION] if is_split else [QUESTION, last])
    assert message == (last if continued else None)


BEGUN = "<|im_start|>assistant\n<think>\n"
CASES = [
    (assistant("so"), "<|im_start|>assistant\n", "chatml", Continuation("so", "so")),
    (assistant("so", thinking="hm"), "x", "chatml", Continuation("so", "so")),
    (assistant("so"), "assistant\n", "QWEN", Continuation("so", "so")),
    (assistant("so"), BEGUN, "QWEN", Continuation("\n</think>\n\nso", "so")),
    (assistant("so", thinking="hm"), BEGUN, "QWEN", Continuation("hm\n</think>\n\nso", "so")),
    (assistant("so", thinking="hm"), "x", "QWEN", Continuation("<think>\nhm\n</think>\n\nso", "so")),
    (assistant(thinking="hm"), BEGUN, "QWEN", Continuation("hm", in_thinking=True)),
    (assistant(thinking="hm"), "x", "QWEN", Continuation("<think>\nhm", in_thinking=True)),
    (assistant("<think>\nhm"), "x", "QWEN", Continuation("<think>\nhm", "<think>\nhm", in_thinking=True)),
    (assistant("so"), "<|start|>assistant", "HARMONY", Continuation("<|channel|>final<|message|>so", "so")),
    (
        assistant(thinking="hm"),
        "<|start|>assistant",
        "HARMONY",
        Continuation("<|channel|>analysis<|message|>hm", in_thinking=True),
    ),
]


def template_of(name: str) -> str:
    return "{{ messages }}" if name == "chatml" else str(getattr(templates, name))


@pytest.mark.parametrize(("last", "rendered", "name", "expected"), CASES)
def test_what_a_prompt_ends_with(last: dict[str, Any], rendered: str, name: str, expected: Continuation) -> None:
    assert continuation_of(last, rendered, template_of(name)) == expected


def parsed(answer: str, name: str, rendered: str, last: dict[str, Any], **options: Any) -> tuple[str, str]:
    template = template_of(name)
    continuation = continuation_of(last, rendered, template)
    parser = answer_parser(template, prompt_end=rendered + continuation.text, continuation=continuation, **options)
    deltas = [*map(parser.feed, answer), parser.end()]
    return "".join(delta.thinking for delta in deltas), "".join(delta.text for delta in deltas)


def test_the_answer_is_only_what_is_new_with_its_blanks() -> None:
    assert parsed(" it is", "QWEN", BEGUN, assistant("so")) == ("", " it is")
    assert parsed("\n\nbut", "QWEN", BEGUN, assistant("so"), tools=[{}]) == ("", "\n\nbut")
    assert parsed("\nand\n</think>\n\nso", "QWEN", BEGUN, assistant(thinking="hm")) == ("\nand", "so")
    assert parsed(" it is", "HARMONY", "<|start|>assistant", assistant("so")) == ("", " it is")
    more = " more<|end|><|start|>assistant<|channel|>final<|message|>so"
    assert parsed(more, "HARMONY", "<|start|>assistant", assistant(thinking="hm")) == (" more", "so")


def test_a_format_goes_on_and_a_call_cannot() -> None:
    ask = GenerationRequest(messages=(), format="json")
    begun = constraint_for(ask, templates.QWEN, BEGUN, Continuation('{"a', '{"a'))
    assert begun is not None and begun.begun == '{"a' and "start: answer\n" in begun.lark
    thinking = constraint_for(ask, templates.QWEN, "hm", Continuation("hm", in_thinking=True))
    assert thinking is not None and "start: thought" in thinking.lark
    tool = {"type": "function", "function": {"name": "f"}}
    forced = GenerationRequest(messages=(), tools=(tool,), tool_choice="required")
    with pytest.raises(OptionError, match="cannot be a tool call"):
        constraint_for(forced, templates.QWEN, "", Continuation("so", "so"))


def test_a_list_of_texts_is_continued_as_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert continuation_of(assistant(parts), "", None) == Continuation("one\ntwo", "one\ntwo")
