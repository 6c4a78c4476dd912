"""A model's vocabulary: the text of each token, tokenization, and the special
tokens."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moegguf.errors import OptionError
from moegguf.native import library
from moegguf.text import to_utf8

if TYPE_CHECKING:
    from moegguf.engine.upstream import UpstreamLlama


class Vocabulary:
    """The tokens of a model. This object is valid while the model is open."""

    def __init__(self, llm: UpstreamLlama) -> None:
        self._bindings = library.llama_cpp()
        # `llm` is not kept, because it refers to this object.
        self._model = llm._model
        self._tokenizer = llm.tokenizer_
        self._vocab = llm._model.vocab
        self.n_tokens = int(llm.n_vocab())
        self._end_tokens: list[int] | None = None

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the bytes that a token adds to the text. Control tokens
        (<|im_start|>) add bytes only with `special`.

        A code point may be spread over several tokens. llama-cpp-python's detokenize()
        would cut tokens that are longer than 32 bytes.
        """
        size = 64
        while True:
            buffer = c.create_string_buffer(size)
            n = self._bindings.llama_token_to_piece(
                self._vocab, token, buffer, size, 0, special
            )
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def all_pieces(self) -> list[bytes]:
        """Returns the pieces of all tokens, shape [n_tokens], including control tokens.
        Each call builds a new list."""
        return [self.piece(token, special=True) for token in range(self.n_tokens)]

    def is_end(self, token: int) -> bool:
        """Returns True if this token ends generation."""
        return bool(self._bindings.llama_vocab_is_eog(self._vocab, token))

    def end_tokens(self) -> list[int]:
        """Returns all end-of-generation tokens. Only the first call searches for
        them."""
        if self._end_tokens is None:
            self._end_tokens = [
                token for token in range(self.n_tokens) if self.is_end(token)
            ]
        return self._end_tokens

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the tokens of a text, without BOS or EOS. special: the text of a
        control token becomes that token."""
        if text:
            return list(
                self._tokenizer.tokenize(to_utf8(text), add_bos=False, special=special)
            )
        return []

    def token(self, text: str) -> int | None:
        """Returns the token with this text, which may be a control token; None if the
        text has several tokens or none."""
        tokens = self.tokens(text)
        return tokens[0] if len(tokens) == 1 else None

    def check(self, tokens: Iterable[int]) -> None:
        """Raises OptionError if one of these numbers is not a token of this model."""
        bad = next((token for token in tokens if not 0 <= token < self.n_tokens), None)
        if bad is not None:
            raise OptionError(
                f"{bad} is not a token of this model, whose tokens are 0 to {self.n_tokens - 1}."
            )

    @property
    def bos_tokens(self) -> list[int]:
        """The tokens that the model adds at the beginning of every text: BOS, or
        none."""
        bos = self._model.token_bos()
        return [bos] if bos != -1 and self._model.add_bos_token() else []

    @property
    def fim_tokens(self) -> tuple[int, int, int] | None:
        """The prefix, suffix and middle tokens of fill-in-the-middle; None for a model
        without them."""
        marks = (
            self._model.token_prefix(),
            self._model.token_suffix(),
            self._model.token_middle(),
        )
        return None if -1 in marks else marks

    @property
    def repository_tokens(self) -> tuple[int, int] | None:
        """The tokens that precede a repository's name and a file's name in
        fill-in-the-middle; None if the model has none."""
        bindings = self._bindings
        marks = (
            bindings.llama_vocab_fim_rep(self._vocab),
            bindings.llama_vocab_fim_sep(self._vocab),
        )
        return None if -1 in marks else marks

    def token_text(self, token: int) -> str:
        """Returns a token's text as the file spells it; "" for -1, which means a token
        that the model does not have."""
        return str(self._model.token_get_text(token)) if token != -1 else ""
