"""guidance with a `moegguf.Llama`; it evaluates tokens itself, by the bindings. Runs where guidance is installed."""

from collections.abc import Iterator
from typing import Any

import pytest
from answering import DEMO, QUESTION, reply

from moegguf import Llama

guidance = pytest.importorskip("guidance")


@pytest.fixture
def llm() -> Iterator[Llama]:
    with Llama(DEMO, n_ctx=512, n_threads=1, verbose=False, expert_cache="50%", logits_all=True) as llm:
        yield llm


def test_text_a_choice_and_a_pattern(llm: Llama) -> None:
    model: Any = guidance.models.LlamaCpp(llm, echo=False)
    model += "moegguf runs" + guidance.gen("text", max_tokens=8, temperature=0.0)
    model += " Is it fast? " + guidance.select(["yes", "no"], name="choice")
    model += " How many? " + guidance.gen("number", regex="[0-9]{2}")
    assert model["text"]
    assert model["choice"] in ("yes", "no")
    assert len(model["number"]) == 2
    assert model["number"].isdigit()
    assert llm.stats().lookups > 0, "guidance's passes go through the experts' store"


def test_a_path_is_opened_by_what_stands_for_llama(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    monkeypatch.setattr(llama_cpp, "Llama", Llama)
    model: Any = guidance.models.LlamaCpp(str(DEMO), echo=False, n_ctx=512, n_threads=1)
    assert (model + "moegguf" + guidance.gen("text", max_tokens=3))["text"]


def test_an_answer_afterwards_is_the_models_own(llm: Llama) -> None:
    before = reply(llm, QUESTION, seed=1)[0]
    _ = guidance.models.LlamaCpp(llm, echo=False) + QUESTION + guidance.gen("text", max_tokens=8)
    assert reply(llm, QUESTION, seed=1)[0] == before
