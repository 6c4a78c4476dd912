"""Tests answers that continue a message: the end of their prompt, their parser and
their constraint.

Other tests check which messages and tokens are kept when a prompt is too long.
"""

import itertools
from typing import Any

import pytest
import templates

from moegguf.errors import OptionError
from moegguf.generate.constraint import constraint_for
from moegguf.generate.continuation import Continuation, continuation_of, split_last
from moegguf.generate.parsing import answer_parser
from moegguf.generate.prompt import Conversation, cut_middle, longest, n_after_shift
from moegguf.generate.request import Request

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
        (
            assistant([{"type": "image", "data": ""}, {"type": "text", "text": "so"}]),
            False,
            False,
        ),
        (QUESTION, False, False),
        ({"role": "tool", "content": "7"}, False, False),
    ],
)
def test_split_last_continues_an_assistant_message_with_text(
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
    (assistant([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]), "", "chatml",
     Continuation("one\ntwo", "one\ntwo")),
    (assistant("so"), "<|start|>assistant", "HARMONY", Continuation("<|channel|>final<|message|>so", "so")),
    (assistant(thinking="hm"), "<|start|>assistant", "HARMONY",
     Continuation("<|channel|>analysis<|message|>hm", in_thinking=True)),
]  # fmt: skip


def template_of(name: str) -> str:
    return "{{ messages }}" if name == "chatml" else str(getattr(templates, name))


@pytest.mark.parametrize(("last", "rendered", "name", "expected"), CASES)
def test_continuation_of_returns_the_end_of_the_prompt(
    last: dict[str, Any], rendered: str, name: str, expected: Continuation
) -> None:
    assert continuation_of(last, rendered, template_of(name)) == expected


def parsed(
    answer: str, name: str, rendered: str, last: dict[str, Any], **options: Any
) -> tuple[str, str]:
    template = template_of(name)
    continuation = continuation_of(last, rendered, template)
    parser = answer_parser(
        template,
        prompt_end=rendered + continuation.text,
        continuation=continuation,
        **options,
    )
    deltas = [*map(parser.feed, answer), parser.end()]
    return "".join(delta.thinking for delta in deltas), "".join(
        delta.text for delta in deltas
    )


def test_parser_of_a_continuation_returns_only_new_text_with_its_blanks() -> None:
    assert parsed(" it is", "QWEN", BEGUN, assistant("so")) == ("", " it is")
    assert parsed("\n\nbut", "QWEN", BEGUN, assistant("so"), tools=[{}]) == (
        "",
        "\n\nbut",
    )
    assert parsed("\nand\n</think>\n\nso", "QWEN", BEGUN, assistant(thinking="hm")) == (
        "\nand",
        "so",
    )
    assert parsed(" it is", "HARMONY", "<|start|>assistant", assistant("so")) == (
        "",
        " it is",
    )
    more = " more<|end|><|start|>assistant<|channel|>final<|message|>so"
    assert parsed(more, "HARMONY", "<|start|>assistant", assistant(thinking="hm")) == (
        " more",
        "so",
    )


def test_constraint_continues_a_format_and_rejects_a_forced_call() -> None:
    ask = Request(messages=(), format="json")
    begun = constraint_for(ask, templates.QWEN, BEGUN, Continuation('{"a', '{"a'))
    assert (
        begun is not None and begun.begun == '{"a' and "start: answer\n" in begun.lark
    )
    thinking = constraint_for(
        ask, templates.QWEN, "hm", Continuation("hm", in_thinking=True)
    )
    assert thinking is not None and "start: thought" in thinking.lark
    tool = {"type": "function", "function": {"name": "f"}}
    forced = Request(messages=(), tools=(tool,), tool_choice="required")
    with pytest.raises(OptionError, match="cannot be a tool call"):
        constraint_for(forced, templates.QWEN, "", Continuation("so", "so"))


def messages(roles: str) -> list[dict[str, Any]]:
    """Returns a message for each letter: s(ystem), u(ser), a(ssistant), t(ool)."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [
        {"role": names[letter], "content": f"{letter}{i}"}
        for i, letter in enumerate(roles)
    ]


def texts(kept: list[dict[str, Any]]) -> str:
    return " ".join(message["content"] for message in kept)


@pytest.mark.parametrize(
    ("n_keep", "left"),
    [(4, 258), (0, 256), (-5, 256), (500, 506), (511, 511), (9999, 511)],
)
def test_cut_middle_frees_half_of_the_tokens_beyond_n_keep(
    n_keep: int, left: int
) -> None:
    """Ollama's rule: 512 - (512 - num_keep) / 2 tokens stay, and at least one token is
    removed."""
    assert n_after_shift(512, n_keep) == left
    kept = cut_middle(range(2000), 512, n_keep)
    n_first = min(max(n_keep, 0), 511)
    assert kept == [*range(n_first), *range(2000 - left + n_first, 2000)]
    for n in (3, 400, 501):  # no token is removed from a short context
        assert cut_middle(range(n), 1000, 4) == [*range(n)]


def test_kept_begins_at_a_question_or_a_later_tool_call() -> None:
    conversation = Conversation(messages("suauatauatat"))
    assert conversation.begins == [1, 3, 7, 8, 10]
    assert texts(conversation.kept(3)) == "s0 u3 a4 t5 a6 u7 a8 t9 a10 t11"
    assert texts(conversation.kept(10)) == "s0 u7 a10 t11", (
        "the question goes, or a result loses its call"
    )
    assert Conversation(messages("s")).steady_begin([0], 5) == 0
    assert texts(Conversation(messages("sa")).kept(1)) == "s0 a1", (
        "without a question nothing is lost"
    )
    assert (
        Conversation(messages("uauau")).steady_begin([10, 10, 10, 10, 500], 100) == 4
    ), "larger than the room"


def test_steady_begin_stays_equal_for_several_turns() -> None:
    """A prompt that began differently in every turn could not reuse any of the
    context."""
    turns = messages("ua" * 40 + "u")
    begins = []
    for n in range(1, len(turns) + 1, 2):
        begin = Conversation(turns[:n]).steady_begin([10] * n, 100)
        assert 0 < (n - begin) * 10 <= 100
        begins.append(begin)
    assert begins == sorted(begins)
    lasts = [len(list(group)) for _, group in itertools.groupby(begins)]
    assert min(lasts[:-1]) >= 2 and len(lasts) < len(begins) / 2


def test_longest_ignores_the_system_message() -> None:
    some = [*messages("suat"), {"role": "user", "content": [{"type": "image"}]}]
    some[0]["content"] = "x" * 99
    some[3]["content"] = "x" * 9
    assert longest(some) == 3
    assert longest(messages("s")) is None
