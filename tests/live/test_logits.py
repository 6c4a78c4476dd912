"""Tests that logits can be read only after the pass that computed them.

An empty prompt becomes BOS or an error. Other tests cover logprobs of prompts, and
grammars for the methods that `Llama` inherits from llama_cpp.
"""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import DEMO, QUESTION, Answer, Load, TinyModel, ask, endless, reply

from moegguf.engine.llama import Llama
from moegguf.engine.sequences import SequenceTokens
from moegguf.engine.upstream import UpstreamLlama
from moegguf.errors import ExpertIOError, GenerationCancelled, OptionError, SchemaError
from moegguf.generate.request import Sampling
from moegguf.generate.sampler import Sampler, logprob_of
from moegguf.native import library
from moegguf.native.events import Phase
from moegguf.testing.library import arm_fault

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
        with pytest.raises(OptionError, match="this request has no logits"):
            read(llm)


@pytest.mark.parametrize("options", [{"seed": 1}, {"exact": True}, {}], ids=str)
def test_a_prompt_rendered_empty_by_its_template_is_refused(
    demo: Llama, options: dict[str, Any]
) -> None:
    reply(demo, "Who are you?", max_tokens=1)
    with pytest.raises(
        OptionError, match="the prompt is empty once its template has rendered it"
    ):
        Answer(demo, ask(QUESTION, template=EMPTY, **options))


@pytest.mark.parametrize("options", [{"seed": 1}, {"exact": True}, {}], ids=str)
def test_an_empty_prompt_becomes_bos(load: Load, options: dict[str, Any]) -> None:
    llm = load(DEMO, **WITH_BOS)
    expected = llm.vocabulary.bos_tokens
    assert expected
    for request in (
        ask(QUESTION, template=EMPTY, n_logprobs=0, max_tokens=1, **options),
        ask(prompt="", **options),
    ):
        answer = Answer(llm, request)
        assert answer.prompt.tokens == expected
        answer.deltas()
        assert answer.summary.prompt_tokens == 1


def test_a_cancelled_prompt_leaves_no_logits(load: Load) -> None:
    llm = load(DEMO, n_batch=32, logits_all=False)
    reply(llm, "Who are you?", max_tokens=1)
    answer = Answer(llm, ask("word " * 100))
    answer.deltas(answer.cancel)
    assert answer.summary.finish == "cancelled" and answer.summary.answer_tokens == 0
    assert_no_logits(llm)


def test_a_failed_prompt_leaves_no_logits(tiny: TinyModel, load: Load) -> None:
    llm = load(tiny(), expert_cache="40%", logits_all=False)
    llm.eval([1, 2, 3])
    arm_fault("stat", 1, sticky=True)
    with pytest.raises(ExpertIOError):
        llm.eval([4, 5, 6])
    arm_fault("stat", 0)
    assert_no_logits(llm)
    llm.cancel()
    with pytest.raises(GenerationCancelled):
        llm.eval([4, 5, 6])
    llm.resume()
    assert_no_logits(llm)
    llm.eval([4])
    for read in READERS:
        read(llm)


@pytest.mark.parametrize("given", ["", ["a cat", ""], [""]], ids=str)
def test_embeddings_of_empty_texts_are_refused(load: Load, given: Any) -> None:
    llm = load(DEMO, embedding=True, pooling_type=1, logits_all=False)
    for call in (llm.embed, llm.create_embedding):
        with pytest.raises(OptionError, match="a text is empty"):
            call(given)
    assert len(llm.embed(["a cat", "b"])) == 2


def test_completions_of_empty_prompts_are_refused(demo: Llama) -> None:
    demo("Who are you?", max_tokens=1)
    for call in (
        lambda: demo(""),
        lambda: demo.create_completion([]),
        lambda: list(demo.generate([])),
    ):
        with pytest.raises(OptionError, match="there is nothing to continue"):
            call()


def test_a_loaded_state_has_no_logits(load: Load) -> None:
    llm = load(DEMO)
    llm.eval([5, 6, 7])
    state = llm.save_state()
    llm.eval([8, 9])
    llm.load_state(state)
    with pytest.raises(OptionError, match="this request has no logits"):
        next(llm.generate([], reset=False))
    llm.eval([8])
    assert next(llm.generate([], reset=False, temp=0.0)) >= 0


def test_logits_are_readable_only_for_output_rows_of_the_pass(load: Load) -> None:
    llm = load(DEMO, n_seq_max=2, logits_all=False)
    rows = llm.context.eval_sequences(
        [
            SequenceTokens(0, [5, 6], 0, 1, Phase.PREFILL),
            SequenceTokens(1, [7], 0, 2, Phase.PREFILL, False),
        ]
    )
    assert rows == [1, 2]
    llm.context.logits(1)
    for row in (-1, 0, 2, 3):
        with pytest.raises(OptionError, match="this request has no logits"):
            llm.context.logits(row)
    with pytest.raises(OptionError, match="has no tokens"):
        llm.context.eval_sequences(
            [
                SequenceTokens(0, [8], 2, 1, Phase.DECODE),
                SequenceTokens(1, [], 1, 2, Phase.DECODE),
            ]
        )
    with pytest.raises(OptionError, match="this request has no logits"):
        llm.context.logits(1)


@pytest.mark.parametrize("n_seq_max", [1, 2])
def test_prompt_logprobs_equal_the_logits_of_a_plain_eval(
    load: Load, n_seq_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = load(DEMO).tokenize(
        b"moegguf runs Mixture-of-Experts models whose experts do not fit in memory."
    )
    plain = load(DEMO, logits_all=True)
    plain.eval(tokens)
    logits = plain.scores[: len(tokens)].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    llm = load(DEMO, n_seq_max=n_seq_max, logits_all=False)
    scored = ask(
        prompt="",
        context=tuple(tokens),
        n_logprobs=2,
        prompt_logprobs=True,
        prompt_only=True,
    )
    # Evaluates a prefix, which the scored requests must not reuse.
    reply(llm, prompt="", context=tuple(tokens), max_tokens=2)
    for n_logits in (llm.context.n_logits, 5 + n_seq_max):
        monkeypatch.setattr(llm.context, "n_logits", n_logits)
        answer = Answer(llm, scored)
        (delta,) = answer.deltas()
        summary = answer.summary
        assert (
            summary.prompt_tokens,
            summary.cached_tokens,
            summary.answer_tokens,
        ) == (len(tokens), 0, 0)
        assert summary.finish == "length" and not delta.text and not delta.logprobs
        assert [each.token for each in delta.prompt] == tokens
        found = [each.logprob for each in delta.prompt[1:]]
        assert found == pytest.approx(
            [expected[n, token] for n, token in enumerate(tokens[1:])], abs=0.05
        )
        assert [each.top[0].token for each in delta.prompt[1:]] == expected[:-1].argmax(
            axis=1
        ).tolist()


bindings = library.llama_cpp()
A_OR_B = 'root ::= "a" | "b"'


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Any:
    with Llama(tiny(), n_ctx=256, n_threads=1, verbose=False) as llm:
        yield llm


def grammar(text: str) -> Any:
    return bindings.LlamaGrammar.from_string(text, verbose=False)


@pytest.mark.parametrize("has_end", [True, False])
def test_a_grammar_ends_the_answer_at_a_complete_text(
    model: Llama, has_end: bool
) -> None:
    options: dict[str, Any] = {
        "max_tokens": 9,
        "logit_bias": {} if has_end else endless(model, -float("inf")),
    }
    for form in (grammar(A_OR_B), A_OR_B):
        choice = model("hello", grammar=form, **options)["choices"][0]
        assert choice["text"] in ("a", "b") and choice["finish_reason"] == "stop"
    parts = [
        part["choices"][0]
        for part in model("hello", grammar=A_OR_B, stream=True, **options)
    ]
    assert (
        "".join(part["text"] for part in parts) in ("a", "b")
        and parts[-1]["finish_reason"] == "stop"
    )


@pytest.mark.parametrize("has_end", [True, False])
def test_a_chat_follows_its_response_format(model: Llama, has_end: bool) -> None:
    form = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
    }
    reply = model.create_chat_completion(
        [{"role": "user", "content": "hi"}],
        response_format={"type": "json_object", "schema": form},
        max_tokens=40,
        logit_bias={} if has_end else endless(model, -float("inf")),
    )
    choice = reply["choices"][0]
    assert choice["message"]["content"].replace(" ", "") in (
        '{"a":true}',
        '{"a":false}',
    )
    assert choice["finish_reason"] == "stop"


def test_invalid_grammars_raise_schema_error(model: Llama) -> None:
    for text in (
        "root ::= none",
        "word ::= [a-z]",
        "root ::= (",
        'root ::= root "a" | "a"',
    ):
        with pytest.raises(SchemaError, match="a grammar must be GBNF"):
            model("hello", grammar=text, max_tokens=3)
    assert model("hello", max_tokens=1)["choices"][0]["text"] is not None


def test_generate_with_a_grammar_gives_the_tokens_of_llama_cpp(
    model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a grammar whose texts can always continue, because llama.cpp's samplers
    crash at the end of a grammar."""
    form = grammar(r'root ::= ([a-z]+ | [0-9]+ | ", ")+')

    def tokens() -> list[int]:
        model.set_seed(7)
        return list(
            islice(
                model.generate([5, 6, 7], grammar=form, temp=1.0, repeat_penalty=1.1),
                40,
            )
        )

    ours = tokens()
    own = UpstreamLlama.__mro__[1]._init_sampler
    monkeypatch.setattr(UpstreamLlama, "_init_sampler", own)
    assert tokens() == ours


def test_an_answer_after_one_with_a_grammar_is_unconstrained(model: Llama) -> None:
    model("hello", grammar=A_OR_B, max_tokens=3)
    free = model("hello", max_tokens=12, temperature=0)["choices"][0]
    assert free["finish_reason"] == "length" and free["text"] not in ("a", "b")
