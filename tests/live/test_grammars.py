"""Tests that a grammar in GBNF allows the tokens that llama.cpp's own grammar sampler
allows.

There are two differences. llama.cpp also allows some bytes that never occur in UTF-8
(NEVER). If a class such as [^é] excludes a multi-byte character, llama.cpp refuses all
characters that begin with the same byte. No grammar here has such a class.
"""

from __future__ import annotations

import ctypes as c
import random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from moegguf.generate.constraint import constraint_for
from moegguf.generate.request import Request
from moegguf.generate.sampler import Matcher, matcher_tokens
from moegguf.native import library
from tools import vendor

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

FOLDER = vendor.VENDOR / "llama.cpp" / "grammars"
# Bytes that never occur in UTF-8, but that llama.cpp may allow.
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}
OWN = {
    "parts that may be divided anyhow": 'root ::= a b c\na ::= [a-z ]*\nb ::= " the" | "th" a\nc ::= [^z\\n]{0,9} "."',
    "recursion on the right": 'root ::= string\nstring ::= "\\"" rest\nrest ::= [^"\\\\] rest | "\\\\" . rest | "\\""',
    "recursion in the middle": 'root ::= "(" root ")" root | [a-z.\\u00e0-\\u00ff]{2,3} | ""',
    "repetitions of repetitions": 'root ::= ((("a" | "an")? " "){1,3} "b"+ [^ab]){2,}',
}
# Files in which no class excludes a multi-byte character.
NAMES = ("arithmetic", "c", "chess", "english", "json")
GRAMMARS = {name: (FOLDER / f"{name}.gbnf").read_text() for name in NAMES} | OWN


class Upstream:
    """llama.cpp's own grammar sampler for one grammar. `mask` returns the tokens that
    it allows next."""

    def __init__(self, llm: Llama, grammar: str) -> None:
        self._bindings = library.llama_cpp()
        self._sampler = self._bindings.llama_sampler_init_grammar(
            llm.vocabulary._vocab, grammar.encode(), b"root"
        )
        assert self._sampler
        self._array = self._bindings._internals.LlamaTokenDataArray(
            n_vocab=llm.n_vocab()
        )

    def mask(self) -> npt.NDArray[np.bool_]:
        self._array.copy_logits(np.zeros(self._array.n_vocab, np.float32))
        self._bindings.llama_sampler_apply(
            self._sampler, c.pointer(self._array.candidates)
        )
        allowed = np.zeros(self._array.n_vocab, np.bool_)
        data = self._array.candidates_data[: self._array.candidates.size]
        allowed[data["id"]] = np.isfinite(data["logit"])
        return allowed

    def accept(self, token: int) -> None:
        self._bindings.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        self._bindings.llama_sampler_free(self._sampler)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_allows_the_tokens_of_llama_cpp(name: str, demo: Llama) -> None:
    for seed in range(3):
        dice, upstream = random.Random(seed), Upstream(demo, GRAMMARS[name])
        constraint = constraint_for(Request(messages=(), grammar=GRAMMARS[name]), None)
        assert constraint is not None
        matcher = Matcher(constraint, matcher_tokens(demo.vocabulary))
        for _ in range(25):
            allowed = matcher.mask()
            different = [
                int(token) for token in np.flatnonzero(allowed != upstream.mask())
            ]
            assert [
                piece
                for token in different
                if not NEVER & {*(piece := demo.vocabulary.piece(token))}
            ] == []
            tokens = [
                int(token)
                for token in np.flatnonzero(allowed)
                if not demo.vocabulary.is_end(int(token))
            ]
            if not tokens:
                break
            token = dice.choice(tokens)
            matcher.accept(token)
            upstream.accept(token)
        upstream.close()
