"""Tests `Engine`, which processes many requests to one model in the caller's process,
and the demo's answers.

`python -m predictors.models.quiz_demo --times 20` sends the demo many more questions.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answering import DEMO, QUESTION, reply

import moegguf
from moegguf.engine.run_hits import read_prompt_token_s, read_run_hits
from moegguf.errors import ClosedError, ContextError, OptionError
from moegguf.generate.engine import Engine
from moegguf.generate.request import REPEAT_LIMIT, Sampling
from moegguf.gguf.experts import read_layout
from moegguf.models.catalog import demo_path
from predictors.models import quiz_demo

GREEDY = Sampling(temperature=0.0, max_tokens=24)
QUESTIONS = [QUESTION, "Who are you?", "What is a hit?"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with moegguf.Engine(DEMO, parallel=4, n_ctx=512, n_threads=1) as engine:
        yield engine


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_engine_answers_chats_in_their_order(engine: Engine) -> None:
    answers = engine.chat([messages(text) for text in QUESTIONS * 5], GREEDY)
    assert [answer.error for answer in answers] == [None] * 15
    with moegguf.Llama(DEMO, n_ctx=512, n_threads=1, verbose=False) as llm:
        expected = [reply(llm, text, max_tokens=24)[0] for text in QUESTIONS]
    assert [answer.text for answer in answers] == expected * 5
    assert engine.chat(messages(QUESTION), GREEDY)[0].text == expected[0]
    assert engine.stats().tokens > 0


def test_generate_accepts_texts_and_tokens(engine: Engine) -> None:
    text = "moegguf runs"
    tokens = engine.llm.vocabulary.tokens(text)
    by_text = engine.generate(text, GREEDY)[0]
    assert by_text.text and by_text.finish in ("stop", "length")
    assert engine.generate([text, "The"], GREEDY)[0].text == by_text.text
    bos = engine.llm.vocabulary.bos_tokens
    assert engine.generate([*bos, *tokens], GREEDY)[0].text == by_text.text
    assert [
        answer.text for answer in engine.generate([[*bos, *tokens]] * 2, [GREEDY] * 2)
    ] == [by_text.text] * 2
    assert engine.generate([], GREEDY) == []


def test_the_hit_rate_of_a_run_is_stored_for_texts_but_not_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    layout = read_layout(demo_path() or "")
    for prompt, is_kept in (([1] * 8, False), ("moegguf runs", True)):
        with moegguf.Engine(
            DEMO, parallel=1, n_ctx=512, n_threads=1, expert_cache="25%"
        ) as engine:
            answer = engine.generate(
                [prompt], Sampling(temperature=0.0, max_tokens=48, ignore_eos=True)
            )[0]
            stats = answer.summary.answer_stats
        assert read_run_hits(layout) == (
            {0.25: pytest.approx(stats.hit_rate)} if is_kept else {}
        )


def test_the_time_of_a_long_prompt_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    layout = read_layout(demo_path() or "")
    for n_words, is_kept in ((4, False), (200, True)):
        with moegguf.Engine(DEMO, parallel=1, n_ctx=512, expert_cache="25%") as engine:
            answer = engine.generate(["run " * n_words], max_tokens=1)[0]
        per_token_s = answer.summary.prompt_s / answer.summary.prompt_tokens
        assert (0 < read_prompt_token_s(layout) <= per_token_s) == is_kept


def test_generate_accepts_sampling_fields_as_keywords(engine: Engine) -> None:
    expected = engine.generate("moegguf runs", Sampling(temperature=0.0, max_tokens=8))
    assert (
        engine.generate("moegguf runs", max_tokens=8, temperature=0)[0].text
        == expected[0].text
    )
    assert (
        engine.generate("moegguf runs", GREEDY, max_tokens=8)[0].text
        == expected[0].text
    )
    unset: dict[str, Any] = dict.fromkeys(
        ("seed", "stop", "num_ctx", "temperature", "dry_sequence_breakers")
    )
    assert (
        engine.generate("moegguf runs", GREEDY, max_tokens=8, **unset)[0].text
        == expected[0].text
    )
    until = expected[0].text[3]
    assert (
        engine.generate("moegguf runs", GREEDY, stop=until)[0].summary.stop_string
        == until
    )
    with pytest.raises(OptionError, match="max_tokens"):
        engine.generate("a", max_token=8)


def test_an_error_of_one_prompt_is_in_its_own_answer(engine: Engine) -> None:
    bad = Sampling(logit_bias={1 << 20: 1.0})
    answers = engine.generate(["a", "b", "c"], [GREEDY, bad, GREEDY])
    assert [type(answer.error) for answer in answers] == [
        type(None),
        OptionError,
        type(None),
    ]
    with pytest.raises(OptionError, match="one for each of 1 prompts, but has 2"):
        engine.generate("a", [GREEDY, GREEDY])
    with pytest.raises(OptionError, match="thinks"):
        engine.chat(messages("a"), GREEDY, thinks=True)


def test_repeat_limit_ends_an_answer_that_repeats_a_token(engine: Engine) -> None:
    """A bias forces one token repeatedly. Tokens that differ only in white space are
    considered equal."""
    always = Sampling(
        temperature=0.0,
        max_tokens=80,
        logit_bias={engine.llm.vocabulary.tokens("a")[0]: 1000.0},
    )
    free, limited = (
        engine.generate("some text", always, repeat_limit=limit)[0]
        for limit in (0, REPEAT_LIMIT)
    )
    assert free.summary.answer_tokens == 80
    assert (limited.summary.answer_tokens, limited.finish) == (
        REPEAT_LIMIT + 2,
        "length",
    )
    assert free.text.startswith(limited.text)


def test_a_too_long_prompt_is_an_error_unless_truncate_is_set(engine: Engine) -> None:
    long = "word " * 2 * engine.llm.n_ctx()
    refused, cut = (
        engine.generate(long, max_tokens=1)[0],
        engine.generate(long, max_tokens=1, truncate=True)[0],
    )
    assert isinstance(refused.error, ContextError) and refused.text == ""
    assert cut.error is None and cut.summary.cut_tokens > 0


def test_streams_run_concurrently_and_end_when_abandoned(engine: Engine) -> None:
    async def text_of(prompt: str) -> str:
        return "".join(
            [delta.text async for delta in engine.stream(messages(prompt), GREEDY)]
        )

    async def run() -> list[str]:
        async for _ in engine.stream("Once", Sampling(max_tokens=400)):
            break
        return await asyncio.gather(*map(text_of, QUESTIONS))

    assert asyncio.run(run()) == [
        answer.text
        for answer in engine.chat([messages(text) for text in QUESTIONS], GREEDY)
    ]

    async def fail() -> None:
        async for _ in engine.stream("a", Sampling(logit_bias={1 << 20: 1.0})):
            pass

    with pytest.raises(OptionError):
        asyncio.run(fail())


def test_a_closed_engine_raises_closed_error() -> None:
    engine = Engine(DEMO, parallel=2, n_ctx=256, n_threads=1)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.generate("a")


def test_an_engine_of_a_loaded_model_keeps_the_model_and_refuses_options() -> None:
    with moegguf.Llama(DEMO, n_ctx=512, n_threads=1, verbose=False) as llm:
        with pytest.raises(OptionError, match="but these are given: n_ctx, kv_tokens"):
            Engine(llm, n_ctx=256, kv_tokens=512)
        with Engine(llm) as engine:
            (answer,) = engine.generate(
                "An expert is", Sampling(max_tokens=4, temperature=0)
            )
        assert answer.text and llm.eval([1, 2]) is None


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def quizzed() -> Iterator[Engine]:
    with Engine("demo", parallel=8, n_ctx=2048, n_threads=1) as engine:
        yield engine


def test_the_demo_answers_its_starters_right(quizzed: Engine) -> None:
    cases = list(quiz_demo.starter_cases())
    answers = quiz_demo.ask(quizzed, cases)
    wrong = [
        (c.where, c.question, a)
        for c, a in zip(cases, answers, strict=True)
        if a not in c.right
    ]
    assert not wrong
    longest = [
        case.messages
        for case in cases
        if case.where.endswith("1,500 tokens of conversation")
    ]
    (read,) = quizzed.chat([longest[0]], max_tokens=1)
    assert read.summary.prompt_tokens + read.summary.cached_tokens > 1000


def test_the_demo_admits_half_of_the_unknowable_questions(quizzed: Engine) -> None:
    """The demo must answer at least half of the unanswerable questions (rounded down)
    by admitting that it does not know.

    Its model card states the measured share.
    """
    cases = [
        case for case in quiz_demo.heldout_cases() if case.where == "cannot be known"
    ]
    answers = quiz_demo.ask(quizzed, cases)
    assert (
        sum(answer in case.right for case, answer in zip(cases, answers, strict=True))
        >= len(cases) // 2
    )


def test_the_demo_calls_the_required_tool(quizzed: Engine) -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    (found,) = quizzed.chat(
        asked, tools=(WEATHER,), tool_choice="required", max_tokens=200
    )
    assert [call.name for call in found.tool_calls] == ["get_weather"]


def test_the_demo_file_is_smaller_than_32_mb() -> None:
    path = demo_path()
    assert path is not None and path.stat().st_size < 32_000_000
