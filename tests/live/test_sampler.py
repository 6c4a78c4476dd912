"""Sampling: every option, and constraints."""

from __future__ import annotations

import json
import math
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from answering import QUESTION, Answer, ask, ends_of, reply

from moegguf.engine.llama import Llama
from moegguf.errors import OptionError, SchemaError
from moegguf.generate import sampler
from moegguf.generate.constraint import Constraint
from moegguf.generate.sampler import Sampler


def test_a_token_can_be_forbidden_and_wanted(demo: Llama, whole: str) -> None:
    first = demo.vocabulary.tokens(whole)[0]
    assert not reply(demo, QUESTION, max_tokens=4, logit_bias={first: -1000.0})[0].startswith(whole[:2])
    wanted = demo.vocabulary.tokens("llama")
    assert reply(demo, QUESTION, max_tokens=1, logit_bias={wanted[0]: 1000.0})[0] == demo.vocabulary.text(wanted[0])
    for bias in ({-1: 1.0}, {demo.n_vocab(): 1.0}, {5: math.nan}):
        with pytest.raises(OptionError, match="logit_bias"):
            Answer(demo, ask(QUESTION, logit_bias=bias))


def test_penalties_look_at_the_prompt_and_the_answer(demo: Llama) -> None:
    free = {"prompt": " the", "max_tokens": 40, "logit_bias": dict.fromkeys(ends_of(demo), -1000.0)}
    repeated = reply(demo, **free)[1].context[1:]
    penalized = reply(demo, **free, presence_penalty=100.0, repeat_last_n=-1)[1].context
    assert len(set(penalized)) == len(penalized), "a token came twice, or the prompt's came again"
    assert len(set(repeated)) < len(repeated)
    short = reply(demo, **free, presence_penalty=100.0, repeat_last_n=2)[1].context
    assert all(a not in short[max(0, i - 2) : i] for i, a in enumerate(short))
    assert reply(demo, **free, presence_penalty=100.0, repeat_last_n=0)[1].context[1:] == repeated
    assert reply(demo, **free, repeat_penalty=50.0, repeat_last_n=64)[1].context[1:] != repeated


@pytest.mark.parametrize(
    "option", [{"top_k": 1}, {"top_p": 0.0001}, {"min_p": 1.0}, {"temperature": 0.0}, {"temperature": -1.0}], ids=str
)
def test_each_option_alone_can_leave_only_the_likeliest(demo: Llama, whole: str, option: dict[str, float]) -> None:
    assert reply(demo, QUESTION, **{"temperature": 3.0, "top_k": 0, "top_p": 1.0, **option})[0] == whole


def test_typical_p_changes_what_is_drawn(demo: Llama) -> None:
    drawn = {"prompt": "Once", "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 30, "seed": 3}
    assert reply(demo, **drawn, typical_p=0.2)[0] != reply(demo, **drawn)[0]


def test_a_constraint_is_followed_and_the_likeliest_token_taken_within_it(demo: Llama) -> None:
    demo.eval(demo.vocabulary.tokens(QUESTION))
    constraint = Constraint('start: "moegguf " ("runs" | "eats") " " /[0-9]+/ "!"')
    sampler = Sampler(demo, ask(QUESTION).sampling, [], constraint)
    text = b""
    for _ in range(20):
        token = sampler.sample()
        if demo.vocabulary.is_end(token):
            break
        text += demo.vocabulary.piece(token)
        demo.eval([token])
    assert text.startswith(b"moegguf runs ")
    assert text.endswith(b"!") or text[-1:].isdigit()


def test_a_constraint_that_cannot_be_compiled_or_followed_is_an_error(demo: Llama) -> None:
    sampling = ask(QUESTION).sampling
    with pytest.raises(SchemaError):
        Sampler(demo, sampling, [], Constraint("start: ("))
    with pytest.raises(SchemaError, match="decimal"):
        Answer(demo, ask(QUESTION, format={"type": "decimal"}))
    demo.eval(demo.vocabulary.tokens(QUESTION))
    logits = np.ctypeslib.as_array(demo._ctx.get_logits_ith(-1), shape=(demo.n_vocab(),))
    logits[demo.vocabulary.tokens("zz")[0]] = -np.inf
    logits[demo.vocabulary.tokens("z")[0]] = -np.inf
    sampler = Sampler(demo, sampling, [], Constraint('start: "zz"'))
    with pytest.raises(SchemaError, match="no token"):
        sampler.sample()


def test_what_a_constraint_allows_is_sampled_as_without_it(demo: Llama) -> None:
    def drawn(constraint: Constraint | None) -> list[int | None]:
        demo.reset()
        demo.eval(demo.vocabulary.tokens(QUESTION))
        sampler = Sampler(demo, ask(QUESTION, temperature=1.5, seed=7).sampling, [], constraint)
        tokens = []
        for _ in range(20):
            tokens.append(sampler.sample())
            demo.eval([tokens[-1]])
        return tokens

    assert drawn(Constraint("start: /(?s:.*)/ /(?s:.*)/")) == drawn(None)


def test_without_a_token_for_the_end_an_answer_stops_where_its_form_is_complete(
    demo: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(demo.vocabulary), "is_end", lambda self, token: False)
    monkeypatch.setattr(type(demo.vocabulary), "end_tokens", lambda self: [])
    monkeypatch.setattr(sampler, "_matcher_tokens", WeakKeyDictionary())
    text, timing = reply(demo, QUESTION, format={"properties": {"n": {"const": 7}}, "required": ["n"]}, max_tokens=50)
    assert json.loads(text) == {"n": 7}
    assert timing.finish == "stop"
