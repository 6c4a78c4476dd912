"""Logits belong to the request that computed them: no token is taken from those that another one left."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from answering import DEMO, QUESTION, Answer, Load, TinyModel, ask, reply
from batches import answers_together

from moegguf.engine.llama import Llama
from moegguf.engine.sequences import Chunk
from moegguf.errors import ExpertIOError, GenerationCancelled, OptionError
from moegguf.generate.embedding import embed
from moegguf.generate.engine import Engine
from moegguf.generate.kv_slots import MAX_LOGITS_BYTES
from moegguf.generate.request import Sampling
from moegguf.generate.sampler import Sampler, logprob_of
from moegguf.native import library
from moegguf.native.events import Phase

EMPTY = "{{ '' }}"  # a template that renders no text
WITH_BOS = {"kv_overrides": {"tokenizer.ggml.add_bos_token": True}}
READERS: list[Callable[[Llama], object]] = [
    lambda llm: llm.sample(),
    lambda llm: llm.context.logits(),
    lambda llm: logprob_of(5, llm, 1),
    lambda llm: Sampler(llm, Sampling(temperature=0), ()).sample(),
]


def assert_no_logits(llm: Llama) -> None:
    for read in READERS:
        with pytest.raises(OptionError, match="no logits of this request"):
            read(llm)


@pytest.mark.parametrize("options", [{"seed": 1}, {"exact": True}, {}], ids=str)
def test_a_prompt_that_its_template_leaves_empty_is_refused(demo: Llama, options: dict[str, Any]) -> None:
    reply(demo, "Who are you?", max_tokens=1)
    with pytest.raises(OptionError, match="the prompt is empty once its template has rendered it"):
        Answer(demo, ask(QUESTION, template=EMPTY, **options))


@pytest.mark.parametrize("options", [{"seed": 1}, {"exact": True}, {}], ids=str)
def test_an_empty_prompt_begins_with_bos(load: Load, options: dict[str, Any]) -> None:
    llm = load(DEMO, **WITH_BOS)
    expected = llm.vocabulary.bos_tokens
    assert expected
    for request in (ask(QUESTION, template=EMPTY, n_logprobs=0, max_tokens=1, **options), ask(prompt="", **options)):
        answer = Answer(llm, request)
        assert answer.prompt.tokens == expected
        answer.deltas()
        assert answer.timing.prompt_tokens == 1


def test_an_empty_prompt_among_others_is_an_error_of_its_own(load: Load) -> None:
    llm = load(DEMO, n_seq_max=4, logits_all=False)
    empty = ask(QUESTION, template=EMPTY, n_logprobs=0, max_tokens=2)
    found = answers_together(llm, [ask(QUESTION, max_tokens=4), empty, ask("Who are you?", max_tokens=4)])
    assert [type(received.error) for received in found] == [type(None), OptionError, type(None)]
    assert not found[1].logprobs


def test_an_engine_refuses_what_has_no_tokens() -> None:
    with Engine("demo", 2, n_ctx=256, n_threads=1) as engine:
        answers = [*engine.generate(["", "An"]), *engine.chat([{"role": "user", "content": "x"}], template=EMPTY)]
    assert [type(answer.error) for answer in answers] == [OptionError, type(None), OptionError]


def test_a_request_begins_without_logits(demo: Llama) -> None:
    reply(demo, QUESTION, max_tokens=1)
    taken: list[int] = []

    def steps() -> Generator[int, None, None]:
        taken.append(demo.sample(temp=0.0))
        yield taken[0]

    with pytest.raises(OptionError, match="no logits of this request"):
        list(demo.context.as_request(steps()))
    assert not taken


def test_a_cancelled_prompt_leaves_no_logits(load: Load) -> None:
    llm = load(DEMO, n_batch=32, logits_all=False)
    reply(llm, "Who are you?", max_tokens=1)
    answer = Answer(llm, ask("word " * 100))
    answer.deltas(answer.cancel)
    assert answer.timing.finish == "cancelled" and answer.timing.answer_tokens == 0
    assert_no_logits(llm)


def test_a_prompt_that_fails_leaves_no_logits(tiny: TinyModel, load: Load) -> None:
    llm = load(tiny(), expert_cache="40%", logits_all=False)
    llm.eval([1, 2, 3])
    library.arm_fault("stat", 1, sticky=True)
    with pytest.raises(ExpertIOError):
        llm.eval([4, 5, 6])
    library.arm_fault("stat", 0)
    assert_no_logits(llm)
    llm.cancel()
    with pytest.raises(GenerationCancelled):
        llm.eval([4, 5, 6])
    llm.resume()
    assert_no_logits(llm)
    llm.eval([4])
    for read in READERS:
        read(llm)


@pytest.mark.parametrize("options", [{}, {"embedding": True, "pooling_type": 1}], ids=str)
def test_an_embedding_leaves_no_logits_to_the_next_request(load: Load, options: dict[str, Any]) -> None:
    llm = load(DEMO, logits_all=False, **options)
    embed(llm, ["a cat"])
    with pytest.raises(OptionError, match="no logits of this request"):
        list(llm.context.as_request(llm.context.logits() for _ in range(1)))


@pytest.mark.parametrize("given", ["", ["a cat", ""], [""]], ids=str)
def test_an_embedding_of_nothing_is_refused(load: Load, given: Any) -> None:
    llm = load(DEMO, embedding=True, pooling_type=1, logits_all=False)
    for call in (llm.embed, llm.create_embedding):
        with pytest.raises(OptionError, match="a text is empty"):
            call(given)
    assert len(llm.embed(["a cat", "b"])) == 2


def test_completions_of_nothing_are_refused(demo: Llama) -> None:
    demo("Who are you?", max_tokens=1)
    for call in (lambda: demo(""), lambda: demo.create_completion([]), lambda: list(demo.generate([]))):
        with pytest.raises(OptionError, match="there is nothing to continue"):
            call()


def test_a_state_that_is_loaded_has_no_logits(load: Load) -> None:
    llm = load(DEMO)
    llm.eval([5, 6, 7])
    state = llm.save_state()
    llm.eval([8, 9])
    llm.load_state(state)
    with pytest.raises(OptionError, match="no logits of this request"):
        next(llm.generate([], reset=False))
    llm.eval([8])
    assert next(llm.generate([], reset=False, temp=0.0)) >= 0


def test_a_pass_of_several_gives_only_its_own_rows(load: Load) -> None:
    llm = load(DEMO, n_seq_max=2, logits_all=False)
    rows = llm.context.eval_chunks([Chunk(0, [5, 6], 0, 1, Phase.PREFILL), Chunk(1, [7], 0, 2, Phase.PREFILL, False)])
    assert rows == [1, 2]
    llm.context.logits(1)
    for row in (-1, 0, 2, 3):
        with pytest.raises(OptionError, match="no logits of this request"):
            llm.context.logits(row)
    with pytest.raises(OptionError, match="has no tokens"):
        llm.context.eval_chunks([Chunk(0, [8], 2, 1, Phase.DECODE), Chunk(1, [], 1, 2, Phase.DECODE)])
    with pytest.raises(OptionError, match="no logits of this request"):
        llm.context.logits(1)


@pytest.mark.parametrize("n_seq_max", [1, 2])
def test_prompt_logprobs_are_those_of_the_logits(load: Load, n_seq_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = load(DEMO).tokenize(b"moegguf runs Mixture-of-Experts models whose experts do not fit in memory.")
    plain = load(DEMO, logits_all=True)
    plain.eval(tokens)
    logits = plain.scores[: len(tokens)].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    llm = load(DEMO, n_seq_max=n_seq_max, logits_all=False)
    scored = ask(prompt="", context=tuple(tokens), n_logprobs=2, prompt_logprobs=True, prompt_only=True)
    reply(llm, prompt="", context=tuple(tokens), max_tokens=2)  # a prefix that could be reused
    for max_rows in (MAX_LOGITS_BYTES // (4 * llm.n_vocab()), 5):
        monkeypatch.setattr("moegguf.generate.kv_slots.MAX_LOGITS_BYTES", 4 * llm.n_vocab() * max_rows)
        answer = Answer(llm, scored)
        (delta,) = answer.deltas()
        timing = answer.timing
        assert (timing.prompt_tokens, timing.cached_tokens, timing.answer_tokens) == (len(tokens), 0, 0)
        assert timing.finish == "length" and not delta.text and not delta.logprobs
        assert [each.text for each in delta.prompt] == [llm.vocabulary.text(token) for token in tokens]
        found = [each.logprob for each in delta.prompt[1:]]
        assert found == pytest.approx([expected[n, token] for n, token in enumerate(tokens[1:])], abs=0.05)
        best = [llm.vocabulary.text(int(token)) for token in expected[:-1].argmax(axis=1)]
        assert [each.top[0][0] for each in delta.prompt[1:]] == best
