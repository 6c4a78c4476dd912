"""Answers while they are generated: text, timing, reuse of the context, and cancelling."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from answering import DEMO, QUESTION, Answer, Load, TinyModel, ask, reply, text_of

from moegguf.engine.llama import Llama
from moegguf.errors import ClosedError, ContextError, OptionError
from moegguf.generate.request import GenerationRequest


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    with Llama(DEMO, n_ctx=512, n_batch=64, n_threads=1, verbose=False) as llm:
        yield llm


@pytest.fixture
def demo(shared: Llama) -> Llama:
    """The demo model, its context empty. It ends its answer to QUESTION after about 70 tokens."""
    shared.reset()
    return shared


def test_the_answer_is_the_models_and_the_timing_counts_it(demo: Llama) -> None:
    text, timing = reply(demo, QUESTION)
    assert text.startswith("moegguf runs Mixture-of-Experts models")
    assert timing.finish == "stop"
    assert (timing.prompt_tokens, timing.cached_tokens) == (20, 0)
    assert timing.answer_tokens == len(demo.tokenize(text.encode(), False)) + 1  # and the one that ends it
    assert timing.stats.tokens == timing.prompt_tokens + timing.answer_tokens - 1
    assert timing.answer_stats.tokens == timing.answer_tokens - 1
    assert 0 < timing.prompt_s < timing.total_s
    assert timing.prompt_s + timing.answer_s == pytest.approx(timing.total_s)
    assert timing.context == ()


def test_a_second_turn_evaluates_only_what_is_new(demo: Llama) -> None:
    first, before = reply(demo, QUESTION)
    second, timing = reply(demo, QUESTION, first, "Who wrote this?")
    assert timing.cached_tokens >= before.prompt_tokens + before.answer_tokens - 1
    assert timing.prompt_tokens < 20
    assert second


def test_a_seed_gives_the_same_answer_whatever_came_before(demo: Llama) -> None:
    def drawn() -> str:
        text, timing = reply(demo, prompt="Once upon", temperature=1.5, seed=7, max_tokens=60)
        assert timing.cached_tokens == 0
        return text

    fresh = drawn()
    reply(demo, QUESTION, max_tokens=30)
    reply(demo, prompt="Once upon a", max_tokens=5)
    assert drawn() == fresh
    unseeded = {reply(demo, prompt="Once upon", temperature=1.5, max_tokens=60)[0] for _ in range(3)}
    assert len(unseeded) > 1


def test_a_long_prompt_reports_each_batch(demo: Llama) -> None:
    answer = Answer(demo, ask("word " * 150, max_tokens=2))
    answer.deltas()
    n_tokens, reports = answer.timing.prompt_tokens, answer.reports
    assert {report.n_tokens for report in reports} == {n_tokens}
    assert [report.n_done for report in reports] == [*range(0, n_tokens, 64), n_tokens]
    assert [report.seconds for report in reports] == sorted(report.seconds for report in reports)


def test_cancelling_in_a_prompt_stops_after_a_batch(demo: Llama) -> None:
    answer = Answer(demo, ask("word " * 150))
    assert answer.deltas(lambda: answer.reports[-1].n_done >= 64 and answer.cancel()) == []
    assert answer.reports[-1].n_done == 64
    assert (answer.timing.finish, answer.timing.answer_tokens) == ("cancelled", 0)
    assert answer.timing.total_s > 0
    n_tokens = answer.reports[-1].n_tokens
    assert reply(demo, "word " * 150, max_tokens=1)[1].cached_tokens == 64 < n_tokens, "what was computed is kept"
    assert reply(demo, QUESTION)[1].finish == "stop"


def test_cancelling_stops_within_one_token(demo: Llama) -> None:
    answer = Answer(demo, ask(QUESTION))
    deltas = answer.deltas(lambda: answer.timing.answer_tokens == 5 and answer.cancel())
    assert (answer.timing.finish, answer.timing.answer_tokens) == ("cancelled", 5)
    assert answer.timing.answer_s > 0
    assert reply(demo, QUESTION)[0].startswith(text_of(deltas))


def test_the_error_of_a_prompt_that_does_not_fit_states_its_length(demo: Llama) -> None:
    n_tokens = len(demo.tokenize(b"word " * 40_000))
    with pytest.raises(ContextError, match=rf"Requested tokens \({n_tokens}\) exceed context window of 512; "):
        Answer(demo, ask(prompt="word " * 40_000, truncate=False))
    n_tokens = len(Answer(demo, ask("word")).prompt.tokens) - len(demo.tokenize(b"word")) + n_tokens
    for form in ({"truncate": False}, {"shift": False}):
        with pytest.raises(ContextError, match=rf"Requested tokens \({n_tokens}\) exceed context window of 512; "):
            Answer(demo, ask("word " * 40_000, **form))
    with pytest.raises(ContextError, match=r"\((249|250)\d{5}\) exceed context window"):  # estimated
        Answer(demo, ask("xy " * 12_500_000, truncate=False))


def test_the_oldest_messages_are_left_out_when_all_do_not_fit(demo: Llama) -> None:
    turns = [f"{'question' if i % 2 == 0 else 'answer'} number {i} " * 6 for i in range(21)]
    messages = ({"role": "system", "content": "Be kind."}, *ask(*turns).messages)  # type: ignore[misc]
    answer = Answer(demo, GenerationRequest(messages=messages))
    cut = answer.prompt.cut_messages
    assert 0 < cut < 21
    assert cut % 2 == 0, "what is left begins with the assistant"
    prompt = demo.detokenize(answer.prompt.tokens, special=True).decode()
    assert prompt.index("Be kind.") < prompt.index(turns[cut])
    assert turns[cut - 1] not in prompt
    assert turns[-1].strip() in prompt
    assert len(answer.prompt.tokens) <= 512 - 512 // 8
    with pytest.raises(ContextError):
        Answer(demo, GenerationRequest(messages=messages, truncate=False))


def test_what_may_not_be_left_out_never_is(demo: Llama) -> None:
    system = {"role": "system", "content": "word " * 600}
    with pytest.raises(ContextError):
        Answer(demo, GenerationRequest(messages=(system, *ask("a", "b", "c").messages)))  # type: ignore[misc]


@pytest.mark.parametrize(
    "nothing",
    [ask(prompt=""), GenerationRequest(), GenerationRequest(messages=())],
    ids=["empty", "none", "no messages"],
)
def test_nothing_asked_is_refused(demo: Llama, nothing: GenerationRequest) -> None:
    with pytest.raises(OptionError):
        Answer(demo, nothing)


def test_a_closed_model_is_a_typed_error(load: Load) -> None:
    llm = load(DEMO)
    answer = Answer(llm, ask(QUESTION))
    llm.close()
    with pytest.raises(ClosedError):
        answer.deltas()
    with pytest.raises(ClosedError):
        Answer(llm, ask(QUESTION))


def test_a_model_without_a_template_reads_the_texts(tiny: TinyModel, load: Load) -> None:
    path: Path = tiny("tiny-mix")
    llm = load(path)
    llm.metadata.pop("tokenizer.chat_template", None)
    answer = Answer(llm, ask("one", "two", "three"))
    assert llm.detokenize(answer.prompt.tokens).decode().strip() == "one\ntwo\nthree"
