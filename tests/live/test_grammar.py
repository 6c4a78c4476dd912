"""GBNF grammars through llama-cpp-python's class: they end where no token may follow, and never end the process."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from answering import ends_of

from moegguf.engine.llama import Llama
from moegguf.engine.upstream import UpstreamLlama
from moegguf.errors import SchemaError
from moegguf.native import library

bindings = library.llama_cpp()
A_OR_B = 'root ::= "a" | "b"'


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Any:
    with Llama(tiny(), n_ctx=256, n_threads=1, verbose=False) as llm:
        yield llm


def grammar(text: str) -> Any:
    return bindings.LlamaGrammar.from_string(text, verbose=False)


def without_end(llm: Llama) -> dict[int, float]:
    """The bias that makes a model one without an end-of-text token: no token may follow a complete text."""
    return dict.fromkeys(ends_of(llm), -float("inf"))


@pytest.mark.parametrize("has_end", [True, False])
def test_a_complete_text_ends_the_answer(model: Llama, has_end: bool) -> None:
    options: dict[str, Any] = {"max_tokens": 9, "logit_bias": {} if has_end else without_end(model)}
    for form in (grammar(A_OR_B), A_OR_B):
        choice = model("hello", grammar=form, **options)["choices"][0]
        assert choice["text"] in ("a", "b") and choice["finish_reason"] == "stop"
    parts = [part["choices"][0] for part in model("hello", grammar=A_OR_B, stream=True, **options)]
    assert "".join(part["text"] for part in parts) in ("a", "b") and parts[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("has_end", [True, False])
def test_a_chat_follows_its_response_format(model: Llama, has_end: bool) -> None:
    form = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    reply = model.create_chat_completion(
        [{"role": "user", "content": "hi"}],
        response_format={"type": "json_object", "schema": form},
        max_tokens=40,
        logit_bias={} if has_end else without_end(model),
    )
    choice = reply["choices"][0]
    assert choice["message"]["content"].replace(" ", "") in ('{"a":true}', '{"a":false}')
    assert choice["finish_reason"] == "stop"


def test_a_grammar_that_cannot_be_read_is_a_typed_error(model: Llama) -> None:
    for text in ("root ::= none", "word ::= [a-z]", "root ::= (", 'root ::= root "a" | "a"'):
        with pytest.raises(SchemaError, match="a grammar is GBNF"):
            model("hello", grammar=text, max_tokens=3)
    assert model("hello", max_tokens=1)["choices"][0]["text"] is not None


def test_the_tokens_are_those_of_llama_cpp(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose own chain is safe where the text never ends."""
    form = grammar(r'root ::= ([a-z]+ | [0-9]+ | ", ")+')

    def tokens() -> list[int]:
        model.set_seed(7)
        return list(islice(model.generate([5, 6, 7], grammar=form, temp=1.0, repeat_penalty=1.1), 40))

    ours = tokens()
    own = UpstreamLlama.__mro__[1]._init_sampler
    monkeypatch.setattr(UpstreamLlama, "_init_sampler", own)
    assert tokens() == ours


def test_a_plain_answer_after_one_with_a_grammar_is_free(model: Llama) -> None:
    model("hello", grammar=A_OR_B, max_tokens=3)
    free = model("hello", max_tokens=12, temperature=0)["choices"][0]
    assert free["finish_reason"] == "length" and free["text"] not in ("a", "b")
