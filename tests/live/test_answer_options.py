"""Tests a request's options: stop strings, sampling, logprobs, fill-in-the-middle,
tools, templates, and formats."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import templates
from answering import QUESTION, Answer, Load, TinyModel, ask, endless, reply, text_of

from moegguf.engine.llama import Llama
from moegguf.errors import CapabilityError, ContextError, OptionError, SchemaError
from moegguf.generate import sampler
from moegguf.generate.constraint import Constraint
from moegguf.generate.parsing import Transcript
from moegguf.generate.prompt import MAX_WHOLE_CHARACTERS
from moegguf.generate.request import Delta, TokenLogprob
from moegguf.generate.sampler import Sampler
from moegguf.models.catalog import demo_path
from moegguf.text import to_utf8

THINKER = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | length }}</tool_call>{% endif %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    "{# <think> </think> #}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    "stop", ["of-Experts", " models", "f", "It leaves the exp", "moe", "."]
)
def test_a_stop_string_ends_the_answer_and_is_not_returned(
    demo: Llama, whole: str, stop: str
) -> None:
    answer = Answer(demo, ask(QUESTION, stop=("not there at all", stop)))
    assert text_of(answer.deltas()) == whole[: whole.index(stop)]
    assert answer.summary.finish == "stop" and answer.summary.stop_string == stop
    assert answer.summary.answer_tokens <= len(demo.tokenize(whole.encode(), False))


def test_transcript_joins_code_points_split_over_tokens(demo: Llama) -> None:
    text = "naïve 漢字 🦙 e\u0301"
    vocabulary = demo.vocabulary
    tokens = vocabulary.tokens(text)
    pieces = [vocabulary.piece(token) for token in tokens]
    assert b"".join(pieces) == text.encode()
    assert any("\ufffd" in piece.decode(errors="replace") for piece in pieces), (
        "no token splits a code point"
    )
    transcript = Transcript(vocabulary)
    deltas = [transcript.feed(token) for token in tokens]
    assert "".join(delta.text for delta in deltas if delta) == text
    assert transcript.end() is None


def test_transcript_ends_a_partial_code_point_with_a_replacement_character(
    demo: Llama,
) -> None:
    cut = demo.vocabulary.tokens("🦙")[:-1]
    transcript = Transcript(demo.vocabulary)
    assert [transcript.feed(token) for token in cut] == [None] * len(cut)
    assert transcript.end() == Delta("\ufffd")


def test_lone_surrogates_become_replacement_characters(demo: Llama) -> None:
    assert to_utf8(json.loads('"a\\ud800b\\ud83e\\udd99"')) == "a\ufffdb🦙".encode()
    assert reply(demo, "say \ud800", max_tokens=2)[1].answer_tokens == 2


def test_temperature_0_takes_the_likeliest_of_sorted_logprobs(demo: Llama) -> None:
    answer = Answer(demo, ask(QUESTION, max_tokens=12, n_logprobs=20))
    deltas = answer.deltas()
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert len(logprobs) == answer.summary.answer_tokens == 12
    for logprob in logprobs:
        chances = [each.logprob for each in logprob.top]
        likeliest = logprob.top[0]
        assert (logprob.token, logprob.piece, logprob.logprob) == (
            likeliest.token,
            likeliest.piece,
            likeliest.logprob,
        )
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == 20
        assert 0.9 < sum(map(math.exp, chances)) <= 1.0001
    assert "".join(logprob.text for logprob in logprobs) == text_of(deltas)


def test_logprobs_are_computed_before_bias_and_temperature(demo: Llama) -> None:
    def first(**options: object) -> TokenLogprob:
        deltas = Answer(
            demo, ask(QUESTION, max_tokens=1, n_logprobs=3, **options)
        ).deltas()
        return next(logprob for delta in deltas for logprob in delta.logprobs)

    plain = first()
    other = first(logit_bias={plain.token: -100.0}, temperature=2.0, top_k=1)
    assert other.token == plain.top[1].token
    assert [each.token for each in other.top] == [each.token for each in plain.top]
    assert other.logprob == pytest.approx(plain.top[1].logprob, abs=0.1)


def test_logprobs_are_returned_on_request_up_to_twenty(demo: Llama) -> None:
    assert all(
        piece.logprobs == ()
        for piece in Answer(demo, ask(QUESTION, max_tokens=3)).deltas()
    )
    deltas = Answer(demo, ask(QUESTION, max_tokens=3, n_logprobs=0)).deltas()
    assert [len(piece.logprobs) for piece in deltas] == [1, 1, 1]
    assert all(logprob.top == () for delta in deltas for logprob in delta.logprobs)
    for n in (-1, 21):
        with pytest.raises(OptionError, match="0 to 20"):
            Answer(demo, ask(QUESTION, n_logprobs=n))


def test_logprobs_of_a_stop_string_are_not_returned(demo: Llama, whole: str) -> None:
    stop = "Experts models"
    deltas = Answer(demo, ask(QUESTION, stop=(stop,), n_logprobs=0)).deltas()
    returned = "".join(logprob.text for delta in deltas for logprob in delta.logprobs)
    assert returned == text_of(deltas) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("n", "expected"), [(1, 1), (5, 5), (None, 508), (0, 508), (-1, 508)]
)
def test_max_tokens_limits_the_answer(
    demo: Llama, n: int | None, expected: int
) -> None:
    _, summary = reply(
        demo,
        prompt="What does moegguf",
        max_tokens=n,
        logit_bias=endless(demo),
        shift=False,
    )
    room = 512 - summary.prompt_tokens - summary.cached_tokens
    assert (summary.answer_tokens, summary.finish) == (min(expected, room), "length")
    assert (
        len(summary.context)
        == summary.prompt_tokens + summary.cached_tokens + summary.answer_tokens
    )


def test_context_of_an_earlier_answer_is_continued(demo: Llama) -> None:
    _, first = reply(demo, prompt="moegguf is", max_tokens=5)
    text, second = reply(demo, prompt=" and", context=first.context, max_tokens=3)
    assert second.context[: len(first.context)] == first.context
    assert second.cached_tokens >= len(first.context) - 1
    assert demo.detokenize(list(second.context)).decode().endswith(" and" + text)
    with pytest.raises(OptionError, match="is not a token of this model"):
        Answer(demo, ask(prompt="x", context=(demo.n_vocab(),)))


def test_a_context_of_tokens_and_texts_keeps_their_order(
    demo: Llama, tiny: TinyModel, load: Load
) -> None:
    words = demo.vocabulary.tokens
    answer = Answer(
        demo, ask(prompt="", context=(5, "An expert", 7, " is"), max_tokens=2)
    )
    assert answer.prompt.tokens == [5, *words("An expert"), 7, *words(" is")]
    with pytest.raises(ContextError, match="exceed context window"):
        Answer(
            demo,
            ask(
                prompt="",
                context=(5, "An expert " * 100_000),
                truncate=False,
                shift=False,
            ),
        )
    with_bos = load(tiny(), kv_overrides={"tokenizer.ggml.add_bos_token": True})
    bos, words = with_bos.vocabulary.bos_tokens, with_bos.vocabulary.tokens
    assert bos
    for context, expected in (
        ((5, "a"), [5, *words("a")]),
        (("a", 5), [*bos, *words("a"), 5]),
    ):
        request = ask(
            prompt="",
            context=context,
            n_logprobs=0,
            prompt_logprobs=True,
            prompt_only=True,
        )
        answer = Answer(with_bos, request)
        assert answer.prompt.tokens == expected
        (delta,) = answer.deltas()
        assert [each.token for each in delta.prompt] == expected[len(expected) - 2 :]


def test_deltas_have_their_tokens_with_return_tokens(demo: Llama, whole: str) -> None:
    stop = "Experts models"
    for more in ({}, {"n_logprobs": 1}):
        deltas = Answer(
            demo, ask(QUESTION, stop=(stop,), return_tokens=True, **more)
        ).deltas()
        tokens = [token for delta in deltas for token in delta.tokens]
        assert all(delta.tokens for delta in deltas)
        assert (
            b"".join(demo.vocabulary.piece(token) for token in tokens).decode()
            == whole[: whole.index(stop)]
        )
    assert not any(
        delta.tokens
        for delta in Answer(demo, ask(QUESTION, n_logprobs=1, max_tokens=3)).deltas()
    )


def test_pieces_of_logprobs_join_to_the_characters_of_the_text(demo: Llama) -> None:
    deltas = Answer(
        demo, ask(QUESTION, format={"const": "日é"}, n_logprobs=0, max_tokens=30)
    ).deltas()
    pieces = [logprob.piece for delta in deltas for logprob in delta.logprobs]
    assert b"".join(pieces).decode() == '"日é"'
    assert any("\ufffd" in piece.decode(errors="replace") for piece in pieces)


def test_ignore_eos_runs_to_the_limit_unless_a_format_ends_the_answer(
    demo: Llama,
) -> None:
    assert reply(demo, "Hi", max_tokens=100)[1].finish == "stop"
    text, summary = reply(demo, "Hi", max_tokens=100, ignore_eos=True)
    assert (summary.answer_tokens, summary.finish) == (100, "length")
    text, summary = reply(
        demo, "Hi", max_tokens=100, ignore_eos=True, format={"const": 7}
    )
    assert (text, summary.finish) == ("7", "stop")


def test_text_bias_applies_to_each_token_of_the_text(demo: Llama) -> None:
    tokens = demo.vocabulary.tokens("llama", special=False)
    by_token = reply(
        demo, QUESTION, max_tokens=8, logit_bias=dict.fromkeys(tokens, 9.0)
    )
    assert (
        reply(demo, QUESTION, max_tokens=8, text_bias=(("llama", 9.0),))[0]
        == by_token[0]
    )
    half = dict.fromkeys(tokens, 4.0)
    assert (
        reply(
            demo, QUESTION, max_tokens=8, text_bias=(("llama", 5.0),), logit_bias=half
        )[0]
        == by_token[0]
    )
    assert by_token[0] != reply(demo, QUESTION, max_tokens=8)[0]


def test_num_ctx_answers_like_a_model_with_that_context(load: Load) -> None:
    large, small = load(demo_path(), n_ctx=512), load(demo_path(), n_ctx=256)
    long = "What is an expert? " * 60
    turns = (long, "An expert.", QUESTION)
    for request in (
        ask(*turns, max_tokens=20),
        ask(prompt=long, max_tokens=20),
        ask(prompt="An expert", max_tokens=300, logit_bias=endless(large)),
        ask(prompt="An expert", max_tokens=300, logit_bias=endless(large), shift=False),
    ):
        within = replace(request, sampling=replace(request.sampling, num_ctx=256))
        answers = [Answer(large, within), Answer(small, request)]
        texts = [text_of(answer.deltas()) for answer in answers]
        assert texts[0] == texts[1]
        assert answers[0].prompt.tokens == answers[1].prompt.tokens
        for name in (
            "cut_messages",
            "cut_tokens",
            "n_shifts",
            "answer_tokens",
            "finish",
        ):
            assert getattr(answers[0].summary, name) == getattr(
                answers[1].summary, name
            )
    with pytest.raises(ContextError, match="context window of 256"):
        Answer(large, ask(prompt=long, truncate=False, num_ctx=256))


def test_a_suffix_is_refused_or_written_with_fim_tokens(
    demo: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapabilityError, match="insert"):
        Answer(demo, ask(prompt="def f(", suffix="return x"))
    monkeypatch.setattr(
        type(demo.vocabulary), "fim_tokens", property(lambda _: (11, 12, 13))
    )
    tokens = Answer(demo, ask(prompt="def f(", suffix="return x")).prompt.tokens
    words = demo.vocabulary.tokens
    gap = [11, *words("def f("), 12, *words("return x"), 13]
    assert tokens == gap
    files = ask(
        prompt="def f(", suffix="return x", files=(("a.py", "x = 1"), ("b.py", "y"))
    )
    snippet = words("\n\n--- snippet ---\n\n")
    assert Answer(demo, files).prompt.tokens == [
        *snippet,
        *words("x = 1"),
        *snippet,
        *words("y"),
        *gap,
    ]
    monkeypatch.setattr(
        type(demo.vocabulary), "repository_tokens", property(lambda _: (14, 15))
    )
    named = [
        15,
        *words("a.py\n"),
        *words("x = 1"),
        15,
        *words("b.py\n"),
        *words("y"),
        15,
        *words("filename\n"),
    ]
    assert Answer(demo, files).prompt.tokens == [
        14,
        *words("myproject\n"),
        *named,
        *gap,
    ]
    read, sizes = demo.vocabulary.tokens, []
    monkeypatch.setattr(
        type(demo.vocabulary),
        "tokens",
        lambda _, text, **options: (sizes.append(len(text)), read(text, **options))[1],
    )
    with pytest.raises(ContextError, match="exceed context window"):
        Answer(demo, ask(prompt="def f(" * 500_000, suffix="return x"))
    assert max(sizes) <= MAX_WHOLE_CHARACTERS, (
        "a text that is far too long is not read whole"
    )


def test_tools_and_thinking_are_refused_without_template_support(
    tiny: TinyModel, load: Load
) -> None:
    plain = load(tiny())
    with pytest.raises(CapabilityError, match="does not support tools"):
        Answer(plain, ask(QUESTION, tools=(WEATHER,)))
    with pytest.raises(CapabilityError, match="does not support thinking"):
        Answer(plain, ask(QUESTION, think=True))
    Answer(plain, ask(QUESTION, tools=(WEATHER,), tool_choice="none"))
    Answer(plain, ask(QUESTION, think=False))


def test_a_template_of_the_request_replaces_the_template_of_the_model(
    demo: Llama,
) -> None:
    answer = Answer(demo, ask(QUESTION, template=THINKER, max_tokens=10))
    prompt = demo.detokenize(answer.prompt.tokens, special=True).decode()
    assert prompt.endswith(f"[user]{QUESTION}[assistant]<think>\n")
    deltas = answer.deltas()
    assert text_of(deltas) == ""
    assert "".join(piece.thinking for piece in deltas)
    assert 0 < answer.summary.thinking_tokens <= answer.summary.answer_tokens


def test_tool_choice_none_leaves_out_the_tools(demo: Llama) -> None:
    answer = Answer(
        demo, ask(QUESTION, template=templates.QWEN, tools=(WEATHER,), max_tokens=10)
    )
    assert "weather" in demo.detokenize(answer.prompt.tokens).decode()
    assert answer.deltas()
    unoffered = Answer(
        demo,
        ask(QUESTION, template=templates.QWEN, tools=(WEATHER,), tool_choice="none"),
    )
    assert "weather" not in demo.detokenize(unoffered.prompt.tokens).decode()
    with pytest.raises(CapabilityError, match="'rain'"):
        Answer(
            demo,
            ask(
                QUESTION, template=templates.QWEN, tools=(WEATHER,), tool_choice="rain"
            ),
        )


def test_control_tokens_have_an_empty_piece(tiny: TinyModel, load: Load) -> None:
    path: Path = tiny("tiny-mix")
    llm = load(path)
    eos = llm.token_eos()
    assert llm.vocabulary.piece(eos) == b""
    assert (
        llm.vocabulary.piece(eos, special=True)
        == llm.vocabulary.token_text(eos).encode()
    )
    assert llm.vocabulary.is_end(eos)


def test_logit_bias_forbids_and_forces_tokens(demo: Llama, whole: str) -> None:
    first = demo.vocabulary.tokens(whole)[0]
    assert not reply(demo, QUESTION, max_tokens=4, logit_bias={first: -1000.0})[
        0
    ].startswith(whole[:2])
    wanted = demo.vocabulary.tokens("llama")
    assert (
        reply(demo, QUESTION, max_tokens=1, logit_bias={wanted[0]: 1000.0})[0]
        == demo.vocabulary.piece(wanted[0]).decode()
    )
    for bias in ({-1: 1.0}, {demo.n_vocab(): 1.0}, {5: math.nan}):
        with pytest.raises(OptionError, match="logit_bias"):
            Answer(demo, ask(QUESTION, logit_bias=bias))


def test_penalties_apply_to_tokens_of_prompt_and_answer(demo: Llama) -> None:
    free = {"prompt": " the", "max_tokens": 40, "logit_bias": endless(demo)}
    repeated = reply(demo, **free)[1].context[1:]
    penalized = reply(demo, **free, presence_penalty=100.0, repeat_last_n=-1)[1].context
    assert len(set(penalized)) == len(penalized), (
        "a token came twice, or the prompt's came again"
    )
    assert len(set(repeated)) < len(repeated)
    short = reply(demo, **free, presence_penalty=100.0, repeat_last_n=2)[1].context
    assert all(a not in short[max(0, i - 2) : i] for i, a in enumerate(short))
    assert (
        reply(demo, **free, presence_penalty=100.0, repeat_last_n=0)[1].context[1:]
        == repeated
    )
    assert (
        reply(demo, **free, repeat_penalty=50.0, repeat_last_n=64)[1].context[1:]
        != repeated
    )


@pytest.mark.parametrize(
    "option",
    [
        {"top_k": 1},
        {"top_p": 0.0001},
        {"min_p": 1.0},
        {"temperature": 0.0},
        {"temperature": -1.0},
    ],
    ids=str,
)
def test_a_strict_sampling_option_leaves_only_the_likeliest_token(
    demo: Llama, whole: str, option: dict[str, float]
) -> None:
    assert (
        reply(
            demo, QUESTION, **{"temperature": 3.0, "top_k": 0, "top_p": 1.0, **option}
        )[0]
        == whole
    )


def test_typical_p_changes_the_sampled_text(demo: Llama) -> None:
    drawn = {
        "prompt": "Once",
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_tokens": 30,
        "seed": 3,
    }
    assert reply(demo, **drawn, typical_p=0.2)[0] != reply(demo, **drawn)[0]


DRAWN = {
    "prompt": "Once",
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "max_tokens": 30,
    "seed": 3,
}


@pytest.mark.parametrize(
    "options",
    [
        {"top_n_sigma": 0.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {
            "dry_multiplier": 50.0,
            "dry_base": 4.0,
            "dry_allowed_length": 0,
            "dry_sequence_breakers": ("no such text",),
        },
        {"mirostat": 1, "mirostat_tau": 1.0},
        {"mirostat": 2, "mirostat_tau": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_each_further_sampler_changes_the_text_and_repeats_with_a_seed(
    demo: Llama, options: dict[str, Any]
) -> None:
    text = reply(demo, **DRAWN, **options)[0]
    assert text != reply(demo, **DRAWN)[0]
    assert text == reply(demo, **DRAWN, **options)[0]


def test_dry_stops_a_repetition_unless_a_breaker_allows_more(demo: Llama) -> None:
    repeats = {"prompt": "1 2 1 2 1 2 1 2 1 2 1", "max_tokens": 24}
    dry = {"dry_multiplier": 50.0, "dry_allowed_length": 1}
    repeated = reply(demo, **repeats)[0]
    assert " 4 4 4 4" in repeated
    assert (
        " 4 4 4"
        not in reply(demo, **repeats, **dry, dry_sequence_breakers=("no such text",))[0]
    )
    assert reply(demo, **repeats, **dry, dry_sequence_breakers=(" ",))[0] == repeated
    assert reply(demo, **repeats, **dry, dry_penalty_last_n=0)[0] == repeated


def test_xtc_removes_the_likeliest_token_at_temperature_0(demo: Llama) -> None:
    once = {"prompt": "Once", "max_tokens": 24, "seed": 1, "xtc_probability": 1.0}
    alone = reply(demo, prompt="Once", max_tokens=24)[0]
    assert reply(demo, **once, xtc_threshold=0.05)[0] != alone
    assert reply(demo, **once, xtc_threshold=0.6)[0] == alone


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_is_off_at_temperature_0_also_with_xtc(
    demo: Llama, version: int
) -> None:
    drawn = {
        "prompt": "Once",
        "max_tokens": 24,
        "seed": 1,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.05,
    }
    assert (
        reply(demo, **drawn, mirostat=version, mirostat_tau=9.0)[0]
        == reply(demo, **drawn)[0]
    )


def test_mirostat_with_zero_entropy_gives_the_likeliest_answer(
    demo: Llama, whole: str
) -> None:
    for version in (1, 2):
        assert (
            reply(
                demo,
                QUESTION,
                temperature=1.0,
                mirostat=version,
                mirostat_tau=0.0,
                mirostat_eta=1.0,
            )[0]
            == whole
        )


@pytest.mark.parametrize("breakers", [("x" * 41,), ("x",) * 33], ids=["long", "many"])
def test_too_long_or_too_many_dry_breakers_are_refused(
    demo: Llama, breakers: tuple[str, ...]
) -> None:
    with pytest.raises(
        OptionError, match=r"dry_sequence_breakers may have at most .* each, but is "
    ):
        reply(demo, QUESTION, dry_multiplier=1.0, dry_sequence_breakers=breakers)


def test_invalid_or_unsatisfiable_constraints_raise_schema_error(demo: Llama) -> None:
    sampling = ask(QUESTION).sampling
    with pytest.raises(SchemaError):
        Sampler(demo, sampling, [], Constraint("start: ("))
    with pytest.raises(SchemaError, match="decimal"):
        Answer(demo, ask(QUESTION, format={"type": "decimal"}))
    demo.eval(demo.vocabulary.tokens(QUESTION))
    logits = np.ctypeslib.as_array(
        demo._ctx.get_logits_ith(-1), shape=(demo.n_vocab(),)
    )
    logits[demo.vocabulary.tokens("zz")[0]] = -np.inf
    logits[demo.vocabulary.tokens("z")[0]] = -np.inf
    sampler = Sampler(demo, sampling, [], Constraint('start: "zz"'))
    with pytest.raises(SchemaError, match="no token"):
        sampler.sample()


def test_an_answer_follows_a_grammar(demo: Llama) -> None:
    grammar = 'root ::= number "-" [a-z]{2}\nnumber ::= [0-9]{3} # three digits'
    assert re.fullmatch(
        "[0-9]{3}-[a-z]{2}", reply(demo, QUESTION, grammar=grammar, max_tokens=60)[0]
    )
    end = next(
        token for token in range(demo.n_vocab()) if demo.vocabulary.is_end(token)
    )
    assert reply(
        demo,
        QUESTION,
        grammar=f"root ::= <[{demo.vocabulary.tokens('z')[0]}]> !<[{end}]>",
        max_tokens=2,
    )[0]
    with pytest.raises(SchemaError, match="is not a token of this model"):
        Answer(demo, ask(QUESTION, grammar="root ::= <two tokens>"))


def test_strict_schemas_refuse_unsupported_keywords(demo: Llama) -> None:
    form = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": form}}},
    }
    assert reply(demo, QUESTION, format=form, max_tokens=3)[0]
    with pytest.raises(SchemaError, match="uniqueItems"):
        Answer(demo, ask(QUESTION, format=form, strict=True))
    with pytest.raises(SchemaError, match="uniqueItems"):
        Answer(
            demo,
            ask(
                QUESTION,
                tools=({**tool, "function": {**tool["function"], "strict": True}},),
            ),
        )


def test_sampling_with_an_allow_all_constraint_equals_free_sampling(
    demo: Llama,
) -> None:
    def drawn(constraint: Constraint | None) -> list[int | None]:
        demo.reset()
        demo.eval(demo.vocabulary.tokens(QUESTION))
        sampler = Sampler(
            demo, ask(QUESTION, temperature=1.5, seed=7).sampling, [], constraint
        )
        tokens = []
        for _ in range(20):
            tokens.append(sampler.sample())
            demo.eval([tokens[-1]])
        return tokens

    assert drawn(Constraint("start: /(?s:.*)/ /(?s:.*)/")) == drawn(None)


def test_an_answer_without_an_end_token_stops_at_a_complete_format(
    demo: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(demo.vocabulary), "is_end", lambda self, token: False)
    monkeypatch.setattr(type(demo.vocabulary), "end_tokens", lambda self: [])
    monkeypatch.setattr(sampler, "_matcher_tokens", WeakKeyDictionary())
    text, summary = reply(
        demo,
        QUESTION,
        format={"properties": {"n": {"const": 7}}, "required": ["n"]},
        max_tokens=50,
    )
    assert json.loads(text) == {"n": 7}
    assert summary.finish == "stop"
