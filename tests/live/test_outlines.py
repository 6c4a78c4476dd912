"""outlines with a `moegguf.Llama`. Runs where outlines is installed."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from answering import DEMO, QUESTION

from moegguf import Llama

pytest.importorskip("outlines")


@pytest.fixture
def model() -> Iterator[Any]:
    import outlines

    with Llama(DEMO, n_ctx=512, n_threads=1, verbose=False, expert_cache="50%") as llm:
        yield outlines.from_llamacpp(llm)


def test_free_text_and_its_stream(model: Any) -> None:
    whole = model(QUESTION, max_tokens=30, temperature=0.0)
    assert whole.startswith("moegguf runs")
    assert "".join(model.stream(QUESTION, max_tokens=30, temperature=0.0)) == whole


def test_a_choice(model: Any) -> None:
    assert model("Is moegguf fast?", Literal["yes", "no"], max_tokens=5) in ("yes", "no")


def test_a_schema(model: Any) -> None:
    from pydantic import BaseModel

    class Found(BaseModel):
        name: Literal["moegguf", "llama"]
        n: int

    found = Found(**json.loads(model(QUESTION, Found, max_tokens=100, temperature=0.0)))
    assert found.name in ("moegguf", "llama")
