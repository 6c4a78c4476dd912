"""Tests guidance, LangChain and outlines with a `moegguf.Llama`. Skips tests of a
library that is not installed."""

import importlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from answering import DEMO, QUESTION, reply
from pydantic import BaseModel

from moegguf import Llama
from moegguf.native import library

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False}


@pytest.fixture
def llm() -> Iterator[Llama]:
    with Llama(DEMO, expert_cache="50%", logits_all=True, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets `llama_cpp.Llama = moegguf.Llama`, as a program does before it imports a
    library's classes."""
    monkeypatch.setattr(library.llama_cpp(), "Llama", Llama)


def test_guidance_generates_through_the_expert_store(llm: Llama, ours: None) -> None:
    guidance = pytest.importorskip("guidance")
    before = reply(llm, QUESTION, seed=1)[0]
    model: Any = guidance.models.LlamaCpp(llm, echo=False)
    model += "moegguf runs" + guidance.gen("text", max_tokens=8, temperature=0.0)
    model += " Is it fast? " + guidance.select(["yes", "no"], name="choice")
    model += " How many? " + guidance.gen("number", regex="[0-9]{2}")
    assert model["text"] and model["choice"] in ("yes", "no")
    assert len(model["number"]) == 2 and model["number"].isdigit()
    assert llm.stats().lookups > 0, "guidance's passes go through the experts' store"
    assert reply(llm, QUESTION, seed=1)[0] == before
    opened: Any = guidance.models.LlamaCpp(
        str(DEMO), echo=False, n_ctx=512, n_threads=1
    )
    assert (opened + "moegguf" + guidance.gen("text", max_tokens=3))["text"]


def community(module: str, name: str, **options: Any) -> Any:
    """Returns an instance of a class of langchain_community with the demo model. Skips
    the test if the package is missing.
    """
    pytest.importorskip("langchain_community")
    return getattr(importlib.import_module(f"langchain_community.{module}"), name)(
        model_path=str(DEMO), **OPTIONS, **options
    )


def test_langchain_llm_invokes_streams_and_follows_a_grammar(ours: None) -> None:
    llm = community(
        "llms",
        "LlamaCpp",
        temperature=0.0,
        max_tokens=12,
        model_kwargs={"expert_cache": "50%"},
    )
    from langchain_core.prompts import PromptTemplate

    assert isinstance(llm.client, Llama)
    whole = llm.invoke("moegguf runs")
    assert whole and "".join(llm.stream("moegguf runs")) == whole
    assert (PromptTemplate.from_template("{name} runs") | llm).invoke(
        {"name": "moegguf"}
    ) == whole
    assert llm.client.stats().lookups > 0 and llm.get_num_tokens("hello there") > 1
    assert "s" not in llm.invoke("moegguf run", stop=["s"])
    llm.grammar = library.llama_cpp().LlamaGrammar.from_string(
        'root ::= "yes" | "no"', verbose=False
    )
    assert llm.invoke("Is it?") in ("yes", "no")
    llm.client.close()


def test_langchain_chat_invokes_and_streams(ours: None) -> None:
    chat = community("chat_models", "ChatLlamaCpp", temperature=0.0, max_tokens=40)
    whole = chat.invoke(QUESTION).content
    assert str(whole).startswith("moegguf runs Mixture-of-Experts models")
    assert "".join(str(part.content) for part in chat.stream(QUESTION)) == whole
    chat.client.close()


def test_langchain_embeddings_have_vectors_of_n_embd(ours: None) -> None:
    embeddings = community("embeddings", "LlamaCppEmbeddings")
    assert embeddings.embed_query("a cat")
    # A vector for each token: this model does not pool.
    vectors = embeddings.embed_documents(["a cat", "a dog"])
    assert {len(vector) for vector in vectors} == {embeddings.client.n_embd()}
    embeddings.client.close()


class Found(BaseModel):
    """The schema of an answer: a name and a number."""

    name: Literal["moegguf", "llama"]
    n: int


def test_outlines_generates_text_choices_and_schemas(llm: Llama) -> None:
    model = pytest.importorskip("outlines").from_llamacpp(llm)
    whole = model(QUESTION, max_tokens=30, temperature=0.0)
    assert whole.startswith("moegguf runs")
    assert "".join(model.stream(QUESTION, max_tokens=30, temperature=0.0)) == whole
    assert model("Is moegguf fast?", Literal["yes", "no"], max_tokens=5) in (
        "yes",
        "no",
    )
    assert Found(**json.loads(model(QUESTION, Found, max_tokens=100, temperature=0.0)))
