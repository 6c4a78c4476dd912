"""Tests the thinking budget: which tokens are counted, the forced end of thinking, and
the answer after the end."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from answering import DEMO, QUESTION, Answer, answers_together, ask, endless, text_of

from moegguf.engine.llama import Llama
from moegguf.generate.continuation import Continuation
from moegguf.generate.prompt import Prompt
from moegguf.generate.request import Request, Sampling
from moegguf.generate.thinking_budget import thinking_budget_of

TURNS = "{{ tools or '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
OPENED = TURNS + "<think>\n{# </think> #}"
UNOPENED = TURNS + "{# <think> </think> #}"
SWITCHED = (
    TURNS
    + "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
)
RECIPIENTS = TURNS + "<|start|>assistant{#  to=self<|message|> #}"
HARMONY = TURNS + "<|start|>assistant{# <|channel|> #}"
TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_SELF, TO_USER = " to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"


def written(llm: Llama, text: str, prompt: Prompt, **options: Any) -> str:
    """Returns the text that results if a model writes the tokens of `text` wherever the
    budget forces no token."""
    sampling = Sampling(
        **{
            name: options.pop(name)
            for name in list(options)
            if name.startswith("reasoning")
        }
    )
    budget = thinking_budget_of(
        llm, Request(prompt="", sampling=sampling, **options), prompt
    )
    vocabulary = llm.vocabulary
    wanted, answer = deque(vocabulary.tokens(text)), b""
    while wanted or (budget is not None and budget.forced is not None):
        forced = None if budget is None else budget.forced
        token = wanted.popleft() if forced is None else forced
        answer += vocabulary.piece(token, special=True)
        if budget is not None:
            budget.accept(token)
    return answer.decode()


def cut(llm: Llama, text: str, n: int) -> str:
    return b"".join(
        llm.vocabulary.piece(token, special=True)
        for token in llm.vocabulary.tokens(text)[:n]
    ).decode()


THOUGHT = " One thing after another, and then some more."


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize(
    ("template", "end", "before"),
    [
        (OPENED, "<think>\n", ""),
        (UNOPENED, "[assistant]", "<think>"),
        (UNOPENED, "[assistant]", "\n <think>"),
        (HARMONY, "<|start|>assistant", ANALYSIS),
        (HARMONY, "<|start|>assistant" + ANALYSIS, ""),
        (HARMONY, "", ANALYSIS),
        (RECIPIENTS, "<|start|>assistant", TO_SELF),
    ],
)
def test_the_end_of_thinking_is_forced_after_the_budget(
    demo: Llama, template: str, end: str, before: str, n: int
) -> None:
    mark = {HARMONY: NEXT + FINAL, RECIPIENTS: TO_USER}.get(template, "</think>")
    prompt = Prompt([], end, template=template)
    head = demo.vocabulary.tokens(before)
    rest = demo.vocabulary.tokens(before + THOUGHT)[len(head) :]
    assert [*head, *rest] == demo.vocabulary.tokens(before + THOUGHT)
    thought, after = (
        b"".join(
            demo.vocabulary.piece(token, special=True) for token in tokens
        ).decode()
        for tokens in (rest[:n], rest[n:])
    )
    options: dict[str, Any] = {"reasoning_budget_tokens": n}
    assert (
        written(demo, before + THOUGHT, prompt, **options)
        == before + thought + mark + after
    )
    message = written(
        demo, before + THOUGHT, prompt, **options, reasoning_budget_message=" Enough."
    )
    assert message == before + thought + " Enough." + mark + after


@pytest.mark.parametrize(
    ("template", "end", "text"),
    [
        (
            OPENED,
            "<think>\n",
            "short</think> And an answer, long and <think>free, as it may be</think> here",
        ),
        (
            UNOPENED,
            "",
            "An answer that never thinks, which may say <think> and go on for long",
        ),
        (UNOPENED, "<think></think>", "An answer after thinking that is over already"),
        (HARMONY, "<|start|>assistant", f"{FINAL}An answer that never thinks"),
        (
            HARMONY,
            "<|start|>assistant",
            f"{ANALYSIS}short{NEXT}{FINAL}An answer that is long",
        ),
        (
            HARMONY,
            "<|start|>assistant",
            "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}",
        ),
        (
            RECIPIENTS,
            "<|start|>assistant",
            " to=user<|message|>An answer that never thinks<|eot|>",
        ),
        (TURNS, "", "A model that cannot think"),
    ],
)
def test_text_outside_thinking_uses_no_budget(
    demo: Llama, template: str, end: str, text: str
) -> None:
    budget = len(demo.vocabulary.tokens(f"short{NEXT}"))
    assert (
        written(
            demo,
            text,
            Prompt([], end, template=template),
            reasoning_budget_tokens=budget,
        )
        == text
    )
    assert written(demo, text, Prompt([], end, template=template)) == text


def test_a_partly_written_end_mark_is_completed(demo: Llama) -> None:
    end, n = demo.vocabulary.tokens("</think>"), 3
    assert len(end) > n, "the mark has to have several tokens"
    text = cut(demo, "</think>", n)
    prompt = Prompt([], "<think>\n", template=OPENED)
    assert (
        written(
            demo, text, prompt, reasoning_budget_tokens=n, reasoning_budget_message="no"
        )
        == "</think>"
    )


def test_the_forced_end_waits_for_a_complete_character(demo: Llama) -> None:
    tokens = demo.vocabulary.tokens("🦙🦙")
    n = next(
        n
        for n in range(1, len(tokens))
        if "\ufffd" in demo.detokenize(tokens[:n]).decode(errors="replace")
    )
    text = written(
        demo,
        "🦙🦙",
        Prompt([], "<think>\n", template=OPENED),
        reasoning_budget_tokens=n,
    )
    assert (
        "\ufffd" not in text
        and text.replace("</think>", "") == "🦙🦙"
        and "</think>" in text
    )


def test_second_thinking_of_harmony_has_no_budget_and_allows_a_call(
    demo: Llama,
) -> None:
    prompt, n = (
        Prompt([], "<|start|>assistant", template=HARMONY),
        len(demo.vocabulary.tokens("one")),
    )
    text = f"{ANALYSIS}one{NEXT}{ANALYSIS}"
    options: dict[str, Any] = {"reasoning_budget_tokens": n}
    assert written(demo, text, prompt, **options).endswith(f"{ANALYSIS}{NEXT}{FINAL}")
    options["tools"] = (TOOL,)
    assert written(demo, f"{ANALYSIS}one", prompt, **options) == f"{ANALYSIS}one{NEXT}"
    assert written(demo, f"{ANALYSIS}one{ANALYSIS}", prompt, **options).endswith(
        f"{ANALYSIS}{NEXT}{FINAL}"
    )


def test_continued_thinking_has_the_whole_budget(demo: Llama) -> None:
    continued = Prompt(
        [],
        "<think>\nWell, ",
        template=UNOPENED,
        continuation=Continuation("", "", True),
    )
    assert (
        written(demo, "and so on", continued, reasoning_budget_tokens=0)
        == "</think>and so on"
    )


def test_plain_prompts_use_think_marks_of_request_or_template(demo: Llama) -> None:
    def of(prompt: str, answer: str, *marks: str) -> str:
        return written(
            demo,
            answer,
            Prompt(demo.vocabulary.tokens(prompt)),
            reasoning_budget_tokens=0,
            think_marks=marks,
        )

    assert of("So <a> I thought", " on") == " on", "the demo does not think"
    assert of("So <a> I thought", " on", "<a>", "</a>", "</b>") == "</a> on"
    assert of("So <a> I thought</b>", " on", "<a>", "</a>", "</b>") == " on"
    assert of("So", "<a>x", "<a>", "</a>") == "<a></a>x"


def answered(llm: Llama, **options: Any) -> tuple[str, str, Answer]:
    """Answers QUESTION in an empty context. Returns the thinking, the text and the
    `Answer`."""
    llm.reset()
    answer = Answer(llm, ask(QUESTION, **options))
    deltas = answer.deltas()
    return "".join(delta.thinking for delta in deltas), text_of(deltas), answer


def test_an_answer_is_unconstrained_before_and_after_the_forced_end(
    demo: Llama,
) -> None:
    whole, _, _ = answered(demo, template=OPENED, max_tokens=12)
    thinking, text, answer = answered(
        demo, template=OPENED, max_tokens=40, reasoning_budget_tokens=5
    )
    assert thinking and whole.startswith(thinking) and text
    tokens = answer._sequence.generated
    end = demo.vocabulary.tokens("</think>")
    assert tokens[5 : 5 + len(end)] == end
    free = demo.create_completion(
        [*answer.prompt.tokens, *tokens[: 5 + len(end)]],
        max_tokens=len(tokens) - 5 - len(end),
        temperature=0,
    )["choices"][0]["text"]
    assert free.lstrip("\n") == text, "after the mark nothing but the model decides"
    assert (
        answered(demo, template=OPENED, max_tokens=12, reasoning_budget_tokens=13)[0]
        == whole
    )


def test_a_zero_budget_leaves_out_thinking(demo: Llama) -> None:
    for template in (OPENED, SWITCHED):
        thinking, text, answer = answered(
            demo,
            template=template,
            max_tokens=20,
            reasoning_budget_tokens=0,
            think=True,
        )
        assert not thinking and text
    assert answer.prompt.end.endswith("<think></think>"), (
        "the template leaves the thinking out"
    )


def test_a_format_applies_after_the_forced_end(demo: Llama) -> None:
    for template in (OPENED, HARMONY):
        options: dict[str, Any] = {
            "max_tokens": 200,
            "logit_bias": endless(demo, -20.0),
        }
        request = {"template": template, "format": SCHEMA, "reasoning_budget_tokens": 4}
        thinking, text, _ = answered(demo, **request, **options)
        assert json.loads(text) == {"n": 7} and thinking


@pytest.mark.parametrize("template", [OPENED, HARMONY], ids=["marks", "harmony"])
def test_a_required_call_follows_the_forced_end(demo: Llama, template: str) -> None:
    call = {"tools": (TOOL,), "tool_choice": "required", "reasoning_budget_tokens": 4}
    demo.reset()
    deltas = Answer(
        demo, ask(QUESTION, template=template, max_tokens=200, **call)
    ).deltas()
    assert [call.name for delta in deltas for call in delta.tool_calls] == ["clock"]


def test_a_stop_string_ends_the_answer_within_forced_tokens(demo: Llama) -> None:
    thinking, text, answer = answered(
        demo,
        template=OPENED,
        reasoning_budget_tokens=5,
        reasoning_budget_message=" Enough of it.",
        stop=("Enough",),
    )
    assert thinking and not text and answer.summary.stop_string == "Enough"


def test_max_tokens_counts_forced_tokens(demo: Llama) -> None:
    _, text, answer = answered(
        demo, template=OPENED, reasoning_budget_tokens=5, max_tokens=7
    )
    assert (text, answer.summary.finish, answer.summary.answer_tokens) == (
        "",
        "length",
        7,
    )


@pytest.fixture(scope="module")
def many() -> Iterator[Llama]:
    with Llama(DEMO, n_ctx=512, n_seq_max=4, flash_attn=None, verbose=False) as llm:
        yield llm


def test_batched_answers_have_separate_thinking_budgets(many: Llama) -> None:
    requests = [
        ask(
            QUESTION,
            template=OPENED,
            max_tokens=30,
            reasoning_budget_tokens=n,
            return_context=True,
        )
        for n in (0, 3, 8, None, 5, 1)
    ]
    alone = [
        answers_together(many, [request])[0].summary.context for request in requests
    ]
    assert [
        received.summary.context for received in answers_together(many, requests)
    ] == alone
    assert len(set(alone)) == len(requests)
