"""LangChain with `moegguf.Llama` behind it. Runs where langchain-community is installed."""

from collections.abc import Iterator
from typing import Any

import pytest
from answering import DEMO, QUESTION

from moegguf import Llama
from moegguf.native import library

pytest.importorskip("langchain_community")
pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, Any] = {"model_path": str(DEMO), "n_ctx": 512, "n_threads": 1, "verbose": False}


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program does before it imports LangChain's classes: `llama_cpp.Llama = moegguf.Llama`."""
    monkeypatch.setattr(library.llama_cpp(), "Llama", Llama)


@pytest.fixture
def llm() -> Iterator[Any]:
    from langchain_community.llms import LlamaCpp

    llm = LlamaCpp(**OPTIONS, temperature=0.0, max_tokens=12, model_kwargs={"expert_cache": "50%"})
    yield llm
    llm.client.close()


def test_a_completion_and_its_stream(llm: Any) -> None:
    assert isinstance(llm.client, Llama)
    whole = llm.invoke("moegguf runs")
    assert whole
    assert "".join(llm.stream("moegguf runs")) == whole
    assert llm.client.stats().lookups > 0
    assert llm.get_num_tokens("hello there") > 1


def test_stop_words_and_grammars(llm: Any) -> None:
    assert "s" not in llm.invoke("moegguf run", stop=["s"])
    llm.grammar = library.llama_cpp().LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    assert llm.invoke("Is it?") in ("yes", "no")


def test_a_chain(llm: Any) -> None:
    from langchain_core.prompts import PromptTemplate

    assert (PromptTemplate.from_template("{name} runs") | llm).invoke({"name": "moegguf"})


def test_a_chat_and_its_stream() -> None:
    from langchain_community.chat_models import ChatLlamaCpp

    chat = ChatLlamaCpp(**OPTIONS, temperature=0.0, max_tokens=40)
    whole = chat.invoke(QUESTION).content
    assert str(whole).startswith("moegguf runs Mixture-of-Experts models")
    assert "".join(str(part.content) for part in chat.stream(QUESTION)) == whole
    chat.client.close()


def test_embeddings() -> None:
    from langchain_community.embeddings import LlamaCppEmbeddings

    embeddings = LlamaCppEmbeddings(**OPTIONS)
    vector = embeddings.embed_query("a cat")
    assert vector
    vectors = embeddings.embed_documents(["a cat", "a dog"])  # of each token: this model does not pool
    assert {len(vector) for vector in vectors} == {embeddings.client.n_embd()}
    embeddings.client.close()
