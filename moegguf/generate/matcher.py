"""A constraint as a mask over one model's tokens, by llguidance, which is imported when an answer is constrained."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from moegguf.errors import SchemaError
from moegguf.generate.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from moegguf.engine.vocabulary import Vocabulary

MAX_STEP_S = 1.0  # of computing time, for one token
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # regexes of one grammar: about 20 ms
    "step_lexer_fuel": 200_000,  # regexes for one token: about 15 ms
    "step_max_items": 50_000,  # Earley items for one token: about 3 ms
    "max_lexer_states": 50_000,  # of one answer: about 25 MB
    "max_grammar_size": 500_000,
}


@dataclass(frozen=True)
class MatcherTokens:
    """A model's vocabulary as `Matcher` needs it: `n_tokens` tokens and the end-of-generation tokens among them.

    In `tokenizer` the latter are special tokens without text; an additional token, n_tokens, is its end token.
    """

    tokenizer: LLTokenizer
    n_tokens: int
    end_tokens: frozenset[int]


_matcher_tokens: WeakKeyDictionary[Vocabulary, MatcherTokens] = WeakKeyDictionary()


def matcher_tokens(vocabulary: Vocabulary) -> MatcherTokens:
    """A model's tokens for its matchers, built once per model: 0.5 s and 60 MB for 150,000 tokens."""
    found = _matcher_tokens.get(vocabulary)
    if found is None:
        found = _matcher_tokens[vocabulary] = build_matcher_tokens(vocabulary)
    return found


def build_matcher_tokens(vocabulary: Vocabulary) -> MatcherTokens:
    """A model's tokens for its matchers.

    End-of-generation tokens have no text. Other control tokens have theirs, because the marks around thinking and calls
    are control tokens in some models and plain text in others.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    pieces, end_tokens = vocabulary.all_pieces(), vocabulary.end_tokens()
    tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(pieces, end_tokens)))
    return MatcherTokens(tokenizer, len(pieces), frozenset(end_tokens))


class _Tokens:
    """The interface that llguidance's TokenizerWrapper needs."""

    def __init__(self, pieces: list[bytes], end_tokens: list[int]) -> None:
        # 0xFF marks special tokens in llguidance, and never occurs in UTF-8
        self.tokens = [*(b"" if piece.startswith(b"\xff") else piece for piece in pieces), b""]
        self.bos_token_id = None
        self.eos_token_id = len(pieces)
        self.special_token_ids = [*end_tokens, self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        """Unused: llguidance tokenizes only forced text, which is switched off."""
        return []


@functools.cache
def _parser_limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**_LIMITS, verbose_errors=False)


class Matcher:
    """Which tokens of one model may follow the tokens accepted so far.

    Raises SchemaError when the grammar cannot be compiled, exceeds its limits or allows nothing at all.
    """

    def __init__(self, constraint: Constraint, tokens: MatcherTokens) -> None:
        from llguidance import LLMatcher

        self._n_tokens, self._end_tokens = tokens.n_tokens, tokens.end_tokens
        self._mask: npt.NDArray[np.bool_] | None = None
        self._bits = np.zeros((tokens.tokenizer.vocab_size + 31) // 32, np.int32)
        # without forcing, the only possible text may be split into any tokens
        grammar = LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + constraint.lark)
        self._matcher: LLMatcher = LLMatcher(tokens.tokenizer, grammar, log_level=0, limits=_parser_limits())
        self._check()
        self._accept_text(constraint.begun, tokens.tokenizer)
        self.mask()

    def _accept_text(self, text: str, tokenizer: LLTokenizer) -> None:
        """Advances past what an answer begins with. Raises SchemaError when the format does not begin like that."""
        tokens = tokenizer.greedy_tokenize(text)
        if self._matcher.try_consume_tokens(tokens) < len(tokens):
            raise SchemaError(
                f"the message to continue does not begin as the requested format demands: {text[:50]!r}; change one."
            )
        self._check()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        error = self._matcher.get_error()
        if error.startswith("NoExtension"):
            raise SchemaError(
                "no token of this model can continue the requested format, or nothing matches it; try another one."
            )
        raise SchemaError(f"the format cannot be followed: {_short_message(error)}; simplify the schema.")

    @property
    def finished(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def mask(self) -> npt.NDArray[np.bool_]:
        """[n_tokens], True for tokens that may come next, end-of-generation tokens included where the answer may end.

        Raises SchemaError when no token may come next, or when computing the mask exceeds the limits.
        """
        if self._mask is None:
            with self._step():
                self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            bits = np.unpackbits(self._bits.view(np.uint8), count=self._n_tokens, bitorder="little")
            bits[list(self._end_tokens)] = self.finished
            self._mask = bits.view(np.bool_)
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether `token` may come next, far cheaper than the whole mask. Raises SchemaError as `mask` does."""
        if token in self._end_tokens:
            return self.finished
        with self._step():
            return self._matcher.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """Advances past `token`, which must be allowed and not end the answer. Raises SchemaError as `mask` does."""
        self._mask = None
        with self._step():
            self._matcher.consume_token(token)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """A call of llguidance for one token: raises SchemaError for an error, and when it took too long."""
        begin_s = time.thread_time()
        yield
        self._check()
        if time.thread_time() - begin_s > MAX_STEP_S:
            raise SchemaError(f"the format takes more than {MAX_STEP_S:g} s for one token; simplify the schema.")


def _short_message(error: str) -> str:
    """llguidance's message without the grammar and the parser's state."""
    message = re.split(r"\n +\d+ \| ", error.replace("<non-verbose/>", ""), maxsplit=1)[0]
    message = re.sub(r"\A(at \d+\(\d+\): )?(failed to (compile JSON schema|parse .%json.): )?", "", message)
    return " ".join(message.split())[:300].rstrip(". ")
