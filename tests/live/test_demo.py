"""The model that ships is right on the questions that the page and the documentation ask it, at its own sampling.

`python -m predictors.models.quiz_demo --times 20` asks all of them, and many more.
"""

from collections.abc import Iterator

import pytest

from moegguf import Engine
from moegguf.models.catalog import demo_path
from predictors.models import quiz_demo
from predictors.models.demo import questions

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo", parallel=8, n_ctx=2048, n_threads=1) as engine:
        yield engine


def test_starters_are_answered_right_wherever_they_are_asked(engine: Engine) -> None:
    cases = list(quiz_demo.starter_cases())
    answers = quiz_demo.ask(engine, cases)
    wrong = [(c.where, c.question, a) for c, a in zip(cases, answers, strict=True) if a not in c.right]
    assert not wrong
    longest = [case.messages for case in cases if case.where.endswith("1,500 tokens of conversation")]
    (read,) = engine.chat([longest[0]], max_tokens=1)
    assert read.timing.prompt_tokens + read.timing.cached_tokens > 1000


def test_an_answer_is_the_same_each_time(engine: Engine) -> None:
    asked = [[{"role": "user", "content": question}] for question in questions.starters() for _ in range(4)]
    found = [answer.text for answer in engine.chat(asked, max_tokens=64)]
    assert len(set(found)) == len(questions.starters())


def test_much_of_what_it_cannot_know_it_does_not_tell(engine: Engine) -> None:
    """Its card says how much."""
    cases = [case for case in quiz_demo.heldout_cases() if case.where == "cannot be known"]
    answers = quiz_demo.ask(engine, cases)
    assert sum(answer in case.right for case, answer in zip(cases, answers, strict=True)) >= len(cases) // 2


def test_a_forced_call_fits_its_tool(engine: Engine) -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    (found,) = engine.chat(asked, tools=(WEATHER,), tool_choice="required", max_tokens=200)
    assert [call.name for call in found.tool_calls] == ["get_weather"]


def test_its_size() -> None:
    path = demo_path()
    assert path is not None and path.stat().st_size < 32_000_000
