"""Many requests to one model in process."""

import asyncio
from collections.abc import Iterator

import pytest
from answering import DEMO, QUESTION, reply

import moegguf
from moegguf.errors import ClosedError, OptionError
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=24)
QUESTIONS = [QUESTION, "Who are you?", "What is a hit?"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with moegguf.Engine(DEMO, parallel=4, n_ctx=512, n_threads=1) as engine:
        yield engine


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chats_are_answered_in_their_order(engine: Engine) -> None:
    answers = engine.chat([messages(text) for text in QUESTIONS * 5], GREEDY)
    assert [answer.error for answer in answers] == [None] * 15
    with moegguf.Llama(DEMO, n_ctx=512, n_threads=1, verbose=False) as llm:
        expected = [reply(llm, text, max_tokens=24)[0] for text in QUESTIONS]
    assert [answer.text for answer in answers] == expected * 5
    assert engine.chat(messages(QUESTION), GREEDY)[0].text == expected[0]
    assert engine.stats().tokens > 0


def test_prompts_are_texts_or_tokens(engine: Engine) -> None:
    text = "moegguf runs"
    tokens = engine.llm.vocabulary.tokens(text)
    by_text = engine.generate(text, GREEDY)[0]
    assert by_text.text and by_text.finish in ("stop", "length")
    assert engine.generate([text, "The"], GREEDY)[0].text == by_text.text
    bos = engine.llm.vocabulary.bos_tokens
    assert engine.generate([*bos, *tokens], GREEDY)[0].text == by_text.text
    assert [answer.text for answer in engine.generate([[*bos, *tokens]] * 2, [GREEDY] * 2)] == [by_text.text] * 2
    assert engine.generate([], GREEDY) == []


def test_fields_of_sampling_are_keywords(engine: Engine) -> None:
    expected = engine.generate("moegguf runs", Sampling(temperature=0.0, max_tokens=8))
    assert engine.generate("moegguf runs", max_tokens=8, temperature=0)[0].text == expected[0].text
    assert engine.generate("moegguf runs", GREEDY, max_tokens=8)[0].text == expected[0].text
    until = expected[0].text[3]
    assert engine.generate("moegguf runs", GREEDY, stop=until)[0].timing.stop_string == until
    with pytest.raises(OptionError, match="max_tokens"):
        engine.generate("a", max_token=8)


def test_what_is_wrong_with_one_prompt_is_the_error_of_its_answer(engine: Engine) -> None:
    bad = Sampling(logit_bias={1 << 20: 1.0})
    answers = engine.generate(["a", "b", "c"], [GREEDY, bad, GREEDY])
    assert [type(answer.error) for answer in answers] == [type(None), OptionError, type(None)]
    with pytest.raises(OptionError, match="2 elements for 1 prompts"):
        engine.generate("a", [GREEDY, GREEDY])
    with pytest.raises(OptionError, match="thinks"):
        engine.chat(messages("a"), GREEDY, thinks=True)


def test_streams_run_side_by_side_and_end_when_they_are_left(engine: Engine) -> None:
    async def text_of(prompt: str) -> str:
        return "".join([delta.text async for delta in engine.stream(messages(prompt), GREEDY)])

    async def run() -> list[str]:
        async for _ in engine.stream("Once", Sampling(max_tokens=400)):
            break
        return await asyncio.gather(*map(text_of, QUESTIONS))

    assert asyncio.run(run()) == [answer.text for answer in engine.chat([messages(text) for text in QUESTIONS], GREEDY)]

    async def fail() -> None:
        async for _ in engine.stream("a", Sampling(logit_bias={1 << 20: 1.0})):
            pass

    with pytest.raises(OptionError):
        asyncio.run(fail())


def test_a_closed_engine_says_so() -> None:
    engine = Engine(DEMO, parallel=2, n_ctx=256, n_threads=1)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.generate("a")


def test_a_loaded_model_answers_stays_loaded_and_takes_no_options() -> None:
    with moegguf.Llama(DEMO, n_ctx=512, n_threads=1, verbose=False) as llm:
        with pytest.raises(OptionError, match="n_ctx, kv_tokens would change"):
            Engine(llm, n_ctx=256, kv_tokens=512)
        with Engine(llm) as engine:
            (answer,) = engine.generate("An expert is", Sampling(max_tokens=4, temperature=0))
        assert answer.text and llm.eval([1, 2]) is None
