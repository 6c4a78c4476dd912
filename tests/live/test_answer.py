"""Tests answers: text, summary, reuse of the context, cancelling, and texts that are
longer than the context."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from answering import (
    DEMO,
    QUESTION,
    Answer,
    Load,
    TinyModel,
    ask,
    endless,
    reply,
    text_of,
)
from running import random_prompt

from moegguf.engine.llama import Llama
from moegguf.errors import CapabilityError, ContextError, OptionError
from moegguf.generate import sequence
from moegguf.generate.prompt import count_prompt, n_after_shift, render_prompt
from moegguf.generate.request import Request
from tools.mutants import read_header, write_file
from tools.mutants.header import STRING, KeyValue


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    with Llama(DEMO, n_ctx=512, n_batch=64, n_threads=1, verbose=False) as llm:
        yield llm


def test_summary_counts_tokens_and_seconds_of_an_answer(demo: Llama) -> None:
    text, summary = reply(demo, QUESTION)
    assert text.startswith("moegguf runs Mixture-of-Experts models")
    assert summary.finish == "stop"
    assert (summary.prompt_tokens, summary.cached_tokens) == (20, 0)
    # Plus the end token.
    assert summary.answer_tokens == len(demo.tokenize(text.encode(), False)) + 1
    assert summary.stats.tokens == summary.prompt_tokens + summary.answer_tokens - 1
    assert summary.answer_stats.tokens == summary.answer_tokens - 1
    assert 0 < summary.prompt_s < summary.total_s
    assert summary.prompt_s + summary.answer_s == pytest.approx(summary.total_s)
    assert summary.context == ()


def test_a_seed_repeats_its_answer_after_other_requests(demo: Llama) -> None:
    def drawn() -> str:
        text, summary = reply(
            demo, prompt="Once upon", temperature=1.5, seed=7, max_tokens=60
        )
        assert summary.cached_tokens == 0
        return text

    fresh = drawn()
    reply(demo, QUESTION, max_tokens=30)
    reply(demo, prompt="Once upon a", max_tokens=5)
    assert drawn() == fresh
    unseeded = {
        reply(demo, prompt="Once upon", temperature=1.5, max_tokens=60)[0]
        for _ in range(3)
    }
    assert len(unseeded) > 1


def test_a_long_prompt_reports_progress_at_each_batch(demo: Llama) -> None:
    answer = Answer(demo, ask("word " * 150, max_tokens=2))
    answer.deltas()
    n_tokens, reports = answer.summary.prompt_tokens, answer.reports
    assert {report.n_tokens for report in reports} == {n_tokens}
    assert [report.n_done for report in reports] == [*range(0, n_tokens, 64), n_tokens]
    assert [report.seconds for report in reports] == sorted(
        report.seconds for report in reports
    )


def test_cancel_stops_an_answer_within_one_token(demo: Llama) -> None:
    answer = Answer(demo, ask(QUESTION))
    deltas = answer.deltas(
        lambda: answer.summary.answer_tokens == 5 and answer.cancel()
    )
    assert (answer.summary.finish, answer.summary.answer_tokens) == ("cancelled", 5)
    assert answer.summary.answer_s > 0
    assert reply(demo, QUESTION)[0].startswith(text_of(deltas))


def test_the_error_for_a_too_long_prompt_states_its_length(demo: Llama) -> None:
    exceeded = "exceed context window of 512, and the answer needs at least one token; "
    n_tokens = len(demo.tokenize(b"word " * 40_000))
    with pytest.raises(
        ContextError, match=rf"Requested tokens \({n_tokens}\) {exceeded}"
    ):
        Answer(demo, ask(prompt="word " * 40_000, truncate=False))
    n_tokens = (
        len(Answer(demo, ask("word")).prompt.tokens)
        - len(demo.tokenize(b"word"))
        + n_tokens
    )
    for form in ({"truncate": False}, {"shift": False}):
        with pytest.raises(
            ContextError, match=rf"Requested tokens \({n_tokens}\) {exceeded}"
        ):
            Answer(demo, ask("word " * 40_000, **form))
    # The number of tokens in such a long text is only estimated.
    with pytest.raises(ContextError, match=r"\((249|250)\d{5}\) exceed context window"):
        Answer(demo, ask("xy " * 12_500_000, truncate=False))


def test_a_too_long_conversation_loses_its_oldest_messages(demo: Llama) -> None:
    turns = [
        f"{'question' if i % 2 == 0 else 'answer'} number {i} " * 6 for i in range(21)
    ]
    messages = ({"role": "system", "content": "Be kind."}, *ask(*turns).messages)  # type: ignore[misc]
    answer = Answer(demo, Request(messages=messages))
    cut = answer.prompt.cut_messages
    assert 0 < cut < 21
    assert cut % 2 == 0, "what is left begins with the assistant"
    prompt = demo.detokenize(answer.prompt.tokens, special=True).decode()
    assert prompt.index("Be kind.") < prompt.index(turns[cut])
    assert turns[cut - 1] not in prompt
    assert turns[-1].strip() in prompt
    assert len(answer.prompt.tokens) <= 512 - 512 // 8
    with pytest.raises(ContextError):
        Answer(demo, Request(messages=messages, truncate=False))


def test_a_too_long_system_message_is_refused(demo: Llama) -> None:
    system = {"role": "system", "content": "word " * 600}
    with pytest.raises(ContextError):
        Answer(demo, Request(messages=(system, *ask("a", "b", "c").messages)))  # type: ignore[misc]


@pytest.mark.parametrize(
    "nothing",
    [ask(prompt=""), Request(), Request(messages=())],
    ids=["empty", "none", "no messages"],
)
def test_requests_without_a_prompt_are_refused(demo: Llama, nothing: Request) -> None:
    with pytest.raises(OptionError):
        Answer(demo, nothing)


TEMPLATE, TOOL_TEMPLATE = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = ({"type": "function", "function": {"name": "f"}},)


def with_texts(path: Path, source: Path, texts: dict[str, str | bytes]) -> Path:
    """Writes the model `source` to `path` without its chat template, and adds or
    replaces the keys in `texts`."""
    header = read_header(source)
    pairs = {pair.key: pair for pair in header.pairs if pair.key != TEMPLATE}
    for key, text in texts.items():
        pairs[key] = KeyValue(
            key, STRING, text.encode() if isinstance(text, str) else text
        )
    write_file(replace(header, pairs=tuple(pairs.values())), path)
    return path


@pytest.mark.parametrize(
    "texts", [{}, {TEMPLATE: ""}, {TEMPLATE: "chatml"}], ids=["none", "empty", "named"]
)
def test_a_model_without_a_template_gets_chatml(
    tiny: TinyModel, load: Load, tmp_path: Path, texts: dict[str, str]
) -> None:
    """Also tests that ChatML's end-of-message delimiter ends the answer, even if it
    consists of several tokens."""
    llm = load(with_texts(tmp_path / "m.gguf", tiny("tiny-mix"), texts))
    turns = [
        f"<|im_start|>{role}\n{text}<|im_end|>\n"
        for role, text in (("user", "one"), ("assistant", "two"))
    ]
    answer = Answer(llm, ask("one", "two", "one", format={"const": "ab<|im_end|>c"}))
    assert answer.prompt.end == "".join([*turns, turns[0]]) + "<|im_start|>assistant\n"
    assert text_of(answer.deltas()) == '"ab'
    assert (answer.summary.finish, answer.summary.stop_string) == ("stop", "")
    with pytest.raises(CapabilityError, match="does not support tools"):
        Answer(llm, ask("one", tools=TOOLS))


@pytest.mark.parametrize(
    "texts",
    [
        {TEMPLATE: ALL, TOOL_TEMPLATE: "T{{ tools }}" + ALL},
        {TOOL_TEMPLATE: "T{{ tools }}" + ALL},
    ],
)
def test_requests_with_tools_use_the_tool_template_of_the_file(
    tiny: TinyModel, load: Load, tmp_path: Path, texts: dict[str, str]
) -> None:
    llm = load(with_texts(tmp_path / "m.gguf", tiny("tiny-mix"), texts))
    default = "x" if TEMPLATE in texts else "TNonex"
    for tools, prompt in (
        ({}, default),
        ({"tools": TOOLS, "tool_choice": "none"}, default),
    ):
        assert Answer(llm, ask("x", **tools)).prompt.end == prompt
    assert Answer(llm, ask("x", tools=TOOLS)).prompt.end.startswith("T[{")
    assert Answer(llm, ask("x", template=ALL)).prompt.end == "x"
    with pytest.raises(CapabilityError, match="does not support tools"):
        Answer(llm, ask("x", tools=TOOLS, template=ALL))


ODD_TEXTS: dict[str, tuple[str, bytes]] = {
    "not UTF-8": ("general.description", b"caf\xe9"),
    "cut by llama-cpp-python": ("general.description", b"a" * 1022 + "é".encode()),
    "a long text": ("general.license", b"a" * 5000 + b"\xff"),
    "a key": ("general.odd key", b"text"),
}


@pytest.mark.parametrize("kind", ODD_TEXTS)
def test_invalid_utf8_in_one_key_value_leaves_the_others_readable(
    tiny: TinyModel, load: Load, tmp_path: Path, kind: str
) -> None:
    key, text = ODD_TEXTS[kind]
    path = with_texts(
        tmp_path / "m.gguf", tiny("tiny-mix"), {TEMPLATE: "A: " + ALL, key: text}
    )
    path.write_bytes(path.read_bytes().replace(b"odd key", b"odd k\xe9y"))
    llm = load(path)
    assert Answer(llm, ask("x")).prompt.end == "A: x"
    assert (
        llm.metadata[TEMPLATE] == "A: " + ALL
        and llm.metadata["general.architecture"] == llm.layout.arch
    )
    assert llm.chat_format == "chat_template.default"


def test_begins_answer_false_ends_the_prompt_with_the_last_message(demo: Llama) -> None:
    assert Answer(demo, ask("x", begins_answer=False)).prompt.end.endswith(
        "x<|im_end|>\n"
    )
    assert Answer(demo, ask("x", "y", begins_answer=False)).prompt.end.endswith(
        "<|im_start|>assistant\ny"
    )


def test_huge_output_of_a_template_is_refused_before_tokenizing(
    demo: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, lengths = demo.vocabulary.tokens, list[int]()

    def counted(text: str, **options: bool) -> list[int]:
        lengths.append(len(text))
        return tokens(text, **options)

    monkeypatch.setattr(demo.vocabulary, "tokens", counted)
    flood = ask("x", template="{% for i in range(99999) %}{{ 'a' * 40 }}{% endfor %}")
    for request in (flood, replace(flood, truncate=False)):
        with pytest.raises(
            ContextError,
            match=r"Requested tokens \(4096\) exceed context window of 512",
        ):
            Answer(demo, request)
    with pytest.raises(ContextError):
        render_prompt(demo, flood)
    assert count_prompt(demo, flood) > 512
    assert sum(lengths) < 32 * 512
    answer = Answer(
        demo, ask(*(" " * 9000 + f"turn {i}" for i in range(9)), template=ALL)
    )
    assert answer.prompt.end.endswith("turn 8") and answer.prompt.cut_messages == 8


def test_a_single_too_long_message_loses_its_beginning(demo: Llama) -> None:
    words = " ".join(f"w{i}" for i in range(900))
    request = Request(
        messages=(
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": words},
        )
    )
    one = Answer(demo, request)
    prompt = demo.detokenize(one.prompt.tokens, special=True).decode()
    assert prompt.startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    )
    assert prompt.endswith(" w898 w899<|im_end|>\n<|im_start|>assistant\n")
    assert 200 < len(one.prompt.tokens) <= n_after_shift(512, 30)
    whole = len(demo.tokenize(words.encode()))
    assert one.prompt.cut_messages == 0
    assert one.prompt.cut_tokens == pytest.approx(
        whole - len(one.prompt.tokens), abs=30
    )


def test_a_too_long_plain_prompt_keeps_num_keep_tokens_and_its_end(demo: Llama) -> None:
    tokens = demo.tokenize(b"one two three four five six " * 300, add_bos=False)
    one = Answer(demo, ask(prompt="one two three four five six " * 300, num_keep=7))
    n_first = 7 + len(demo.vocabulary.bos_tokens)
    kept = one.prompt.tokens
    assert len(kept) == n_after_shift(512, n_first)
    assert kept[n_first:] == tokens[-(len(kept) - n_first) :]
    assert one.prompt.cut_tokens == len(tokens) + len(demo.vocabulary.bos_tokens) - len(
        kept
    )


def test_a_chat_in_a_full_context_reuses_the_kept_messages(demo: Llama) -> None:
    turns, cached = list[str](), list[int]()
    for i in range(14):
        turns.append(f"Question number {i}: " + "tell me more " * 12)
        text, summary = reply(demo, *turns, max_tokens=20)
        turns.append(text)
        cached.append(summary.cached_tokens)
    assert summary.cut_messages > 0
    in_full_context = cached[8:]
    assert sum(n > 60 for n in in_full_context) >= len(in_full_context) // 2, cached


@pytest.mark.parametrize(("n_keep", "n_shifts"), [(4, 1), (-1, 1)])
def test_an_answer_in_a_full_context_shifts_and_keeps_num_keep_tokens(
    demo: Llama, n_keep: int, n_shifts: int
) -> None:
    text, summary = reply(
        demo, QUESTION, max_tokens=560, num_keep=n_keep, logit_bias=endless(demo)
    )
    assert (summary.answer_tokens, summary.finish, summary.n_shifts) == (
        560,
        "length",
        n_shifts,
    )
    first, n_first = (
        demo.input_ids[: demo.n_tokens].tolist(),
        20 if n_keep < 0 else n_keep,
    )
    assert first == Answer(demo, ask(QUESTION)).prompt.tokens[:n_first], (
        "only these are as if nothing had shifted"
    )
    assert text.startswith(reply(demo, QUESTION, max_tokens=20)[0])


def test_a_prompt_from_a_shifted_context_is_computed_again(demo: Llama) -> None:
    def continued(tokens: list[int]) -> str:
        text: str = demo.create_completion(tokens, max_tokens=6, temperature=0)[
            "choices"
        ][0]["text"]
        return text

    reply(demo, QUESTION, max_tokens=560, logit_bias=endless(demo))
    first = demo.input_ids[: demo.n_tokens].tolist()
    after_shift = continued(first)
    demo.reset()
    assert after_shift == continued(first)


def test_an_endless_answer_stops_after_max_contexts(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "MAX_CONTEXTS", 2)
    llm = load(DEMO, n_ctx=256, logits_all=False)
    _, summary = reply(llm, QUESTION, logit_bias=endless(llm))
    assert (summary.answer_tokens, summary.finish) == (512, "length")


@pytest.mark.parametrize("preset", ["tiny-qwen2moe", "tiny-deepseek2"])
def test_a_context_shift_with_few_slots_equals_one_with_all_experts(
    preset: str, tiny: TinyModel, load: Load
) -> None:
    contexts = []
    for share in ("30%", "100%"):
        llm = load(
            tiny(preset), expert_cache=share, n_ctx=256, n_ubatch=1, logits_all=False
        )
        prompt = tuple(random_prompt(llm, 60))
        request = ask(
            prompt="",
            context=prompt,
            max_tokens=300,
            return_context=True,
            logit_bias=endless(llm),
        )
        one = Answer(llm, request)
        one.deltas()
        assert one.summary.n_shifts == 1
        assert (llm.stats().evictions > 0) == (share == "30%")
        contexts.append(one.summary.context)
    assert contexts[0] == contexts[1]
    assert len(contexts[0]) == 360


def test_a_context_whose_cells_cannot_move_is_evaluated_again_after_a_shift(
    tiny: TinyModel, load: Load
) -> None:
    """A position of this model consists of several numbers, so cells cannot move."""
    llm = load(tiny("tiny-qwen3vlmoe"), flash_attn=None, logits_all=False)
    assert not llm.context.can_shift and not llm._is_stateful

    def whole(context: list[int], n_new: int, n_shifts: int = 0) -> list[int]:
        """Returns the tokens of a prompt and of its answer with `n_new` tokens."""
        llm.reset()
        text, summary = reply(
            llm, prompt="", context=tuple(context), max_tokens=n_new, num_ctx=96,
            num_keep=-1, seed=1, logit_bias=endless(llm),
        )  # fmt: skip
        assert text and summary.n_shifts == n_shifts
        assert summary.prompt_tokens == len(context)
        return list(summary.context)

    prompt = random_prompt(llm, 60)
    full = whole(prompt, 36)
    assert len(full) == 96
    # The shift drops half of the 35 evaluated tokens after the prompt.
    rest = full[:60] + full[77:]
    expected = full + whole(rest, 14)[len(rest) :]
    assert whole(prompt, 50, n_shifts=1) == expected


def test_a_final_assistant_message_is_continued_unless_disabled(
    demo: Llama, whole: str
) -> None:
    begin = whole[: whole.index(" that")]
    text, summary = reply(demo, QUESTION, begin)
    assert begin + text == whole
    assert summary.finish == "stop"
    other, _ = reply(demo, QUESTION, begin, continue_final_message=False)
    assert begin + other != whole


def test_a_final_assistant_message_with_a_format_is_completed(demo: Llama) -> None:
    form = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}},
        "required": ["name"],
    }
    text, summary = reply(demo, QUESTION, '{"name": "ä', format=form)
    assert (
        summary.finish == "stop"
        and len(text) < 12
        and text.rstrip().endswith("}")
        and "{" not in text
    )
