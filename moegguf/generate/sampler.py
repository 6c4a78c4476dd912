"""Chooses the next token with llama.cpp's samplers, in llama-cpp-python's order, under
an optional constraint.

llguidance computes which tokens the constraint's grammar allows. First, only the
sampled token is checked. If the constraint forbids it, all forbidden tokens are masked
and the samplers run again, as in llama.cpp's `common_sampler_sample`
(common/sampling.cpp). llguidance is imported for the first answer with a constraint.
"""

from __future__ import annotations

import ctypes as c
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError, SchemaError
from moegguf.generate.constraint import Constraint
from moegguf.generate.request import Sampling, TokenChance, TokenLogprob
from moegguf.generate.sandbox_pool import LimitedError, reply_of
from moegguf.native import library
from moegguf.text import without_surrogates

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from moegguf.engine.llama import Llama
    from moegguf.engine.vocabulary import Vocabulary
    from moegguf.generate.thinking_budget import ThinkingBudget

_TOKEN = re.compile(r"<\[(\^?)[0-9]+\]>")  # a token in a grammar, written as its number
# Number of tokens from which Mirostat 1 estimates the distribution, as in llama.cpp.
MIROSTAT_TOKENS = 100
# Maximum number of DRY sequence breakers; each is compared with every token of the
# vocabulary.
MAX_BREAKERS = 32
# Maximum length of a DRY sequence breaker; llama.cpp would cut longer ones.
MAX_BREAKER_BYTES = 40
MAX_STEP_S = 1.0  # maximum CPU seconds of one call to llguidance about a token
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # work on the regexes of one grammar: about 20 ms
    "step_lexer_fuel": 200_000,  # work on regexes for one token: about 15 ms
    # Earley items for one token: about 25 ms; a GBNF grammar needs up to 200,000.
    "step_max_items": 500_000,
    "max_lexer_states": 50_000,  # lexer states during one answer: about 25 MB
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


@dataclass(frozen=True)
class MatcherTokens:
    """A model's vocabulary for `Matcher`. `n_tokens`: number of tokens. `end_tokens`:
    the end-of-generation tokens.

    In `tokenizer` the end-of-generation tokens are special tokens, which match no text
    of a grammar. The tokenizer's own end token is an additional token with the id
    `n_tokens`.
    """

    tokenizer: LLTokenizer
    n_tokens: int
    end_tokens: frozenset[int]


_matcher_tokens: WeakKeyDictionary[Vocabulary, MatcherTokens] = WeakKeyDictionary()


def matcher_tokens(vocabulary: Vocabulary) -> MatcherTokens:
    """Returns a model's tokens for its matchers. They are created once per model, which
    takes 0.5 s and 60 MB for 150,000 tokens.

    End-of-generation tokens match no text of a grammar. Other control tokens keep their
    text, because the delimiters around thinking and calls are control tokens in some
    models and plain text in others.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if (found := _matcher_tokens.get(vocabulary)) is not None:
        return found
    pieces, end_tokens = vocabulary.all_pieces(), vocabulary.end_tokens()
    tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(pieces, end_tokens)))
    _matcher_tokens[vocabulary] = made = MatcherTokens(
        tokenizer, len(pieces), frozenset(end_tokens)
    )
    return made


class _Tokens:
    """A vocabulary with the interface that llguidance's TokenizerWrapper needs."""

    def __init__(self, pieces: list[bytes], end_tokens: list[int]) -> None:
        # 0xFF marks special tokens in llguidance; it never occurs in UTF-8
        self.tokens = [
            *(b"" if piece.startswith(b"\xff") else piece for piece in pieces),
            b"",
        ]
        self.bos_token_id = None
        self.eos_token_id = len(pieces)
        self.special_token_ids = [*end_tokens, self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns no tokens. llguidance would only tokenize forced text, and forced
        text is switched off."""
        return []


class Matcher:
    """Follows a grammar: computes which tokens may come after the tokens accepted so
    far.

    Raises SchemaError if the grammar cannot be compiled, exceeds the limits, allows no
    text, or does not match the message that the answer continues.
    """

    def __init__(self, constraint: Constraint, tokens: MatcherTokens) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self._n_tokens, self._end_tokens = tokens.n_tokens, tokens.end_tokens
        self._mask: npt.NDArray[np.bool_] | None = None
        # "no_forcing": if the grammar allows only one text, the model may split this
        # text into tokens in any way
        grammar = LLMatcher.grammar_from_lark(
            '%llguidance {"no_forcing": true}\n' + constraint.lark
        )
        limits = LLParserLimits(**_LIMITS)
        try:
            # the sandbox compiles with bytes instead of the model's tokens, so token
            # numbers become 0
            reply_of({"grammar": _TOKEN.sub(r"<[\g<1>0]>", grammar), "limits": _LIMITS})
        except LimitedError as error:
            raise SchemaError(
                f"the format cannot be followed: {error}; simplify the schema or the grammar."
            ) from error
        self._matcher: LLMatcher = LLMatcher(
            tokens.tokenizer, grammar, log_level=0, limits=limits
        )
        self._check()
        begun = tokens.tokenizer.greedy_tokenize(constraint.begun)
        if self._matcher.try_consume_tokens(begun) < len(begun):
            raise SchemaError(
                "the message to continue does not begin as the requested format requires:"
                f" {constraint.begun[:50]!r}; change the message or the format."
            )
        self._check()
        self.mask()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        error = self._matcher.get_error()
        if error.startswith("NoExtension"):
            raise SchemaError(
                "no token of this model can continue the requested format, or nothing matches it; send another format."
            )
        # Removes the grammar and the parser's state from the error message.
        message = re.split(
            r"\n +\d+ \| ", error.replace("<non-verbose/>", ""), maxsplit=1
        )[0]
        message = re.sub(
            r"\A(at \d+\(\d+\): )?(failed to (compile JSON schema|parse .%json.): )?",
            "",
            message,
        )
        message = " ".join(message.split())[:300].rstrip(". ")
        raise SchemaError(
            f"the format cannot be followed: {message}; simplify the schema or the grammar."
        )

    @property
    def finished(self) -> bool:
        """True if the answer may end here."""
        return self._matcher.is_accepting()

    def mask(self) -> npt.NDArray[np.bool_]:
        """Returns an array of shape [n_tokens], True for each token that may come next.
        This includes end-of-generation tokens if the answer may end here.

        Raises SchemaError if neither a token nor the end may come next, or if the
        computation exceeds its limits.
        """
        if self._mask is None:
            with self._step():
                packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(packed, count=self._n_tokens, bitorder="little")
            bits[list(self._end_tokens)] = self.finished
            self._mask = bits.view(np.bool_)
        return self._mask

    def allows(self, token: int) -> bool:
        """Returns True if `token` may come next. This is much cheaper than `mask` and
        raises the same errors."""
        if token in self._end_tokens:
            return self.finished
        with self._step():
            return self._matcher.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """Advances the grammar by `token`, which must be allowed and must not end the
        answer. Raises SchemaError as `mask` does."""
        self._mask = None
        with self._step():
            self._matcher.consume_token(token)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Context manager for a call to llguidance about one token. Raises SchemaError
        if the call failed or took too long."""
        begin_s = time.thread_time()
        yield
        self._check()
        if time.thread_time() - begin_s > MAX_STEP_S:
            raise SchemaError(
                f"the format takes more than {MAX_STEP_S:g} s for one token; simplify the schema or the grammar."
            )


def logprob_of(token: int, llm: Llama, n_top: int, row: int = -1) -> TokenLogprob:
    """Returns the log probability of `token` from a row of the last pass's logits. Also
    returns the `n_top` likeliest tokens, which may include `token`."""
    logits = llm.context.logits(row)
    most = logits.max()
    log_total = most + np.log(np.exp(logits - most, dtype=np.float64).sum())
    top = np.argpartition(logits, -n_top)[-n_top:] if n_top else np.empty(0, np.intp)
    top = top[np.argsort(-logits[top], kind="stable")]
    piece = llm.vocabulary.piece

    def chance(of: int) -> tuple[int, bytes, float]:
        return of, piece(of, special=True), float(logits[of] - log_total)

    return TokenLogprob(
        *chance(token), tuple(TokenChance(*chance(int(other))) for other in top)
    )


class Sampler:
    """Samples the tokens of one answer from the logits of the last pass. `prompt`:
    tokens that repetition penalties also consider. `budget` may force the tokens that
    end the thinking, unless the constraint forbids them.

    Raises OptionError if logit_bias has a token that the model lacks, or the value NaN,
    and for invalid DRY sequence breakers. Raises SchemaError for a constraint that
    cannot be followed.
    """

    def __init__(
        self,
        llm: Llama,
        sampling: Sampling,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
        budget: ThinkingBudget | None = None,
    ) -> None:
        self._bindings = library.llama_cpp()
        self._llm = llm
        self._n_vocab = llm.n_vocab()
        self._chain = self._bindings._internals.LlamaSampler()
        self._add_samplers(
            sampling, prompt, ends=constraint is not None or not sampling.ignore_eos
        )
        self._budget = budget
        self._matcher: Matcher | None = None
        self._candidates: Any = None
        if constraint is not None:
            self._matcher = Matcher(constraint, matcher_tokens(llm.vocabulary))
            self._candidates = self._bindings._internals.LlamaTokenDataArray(
                n_vocab=self._n_vocab
            )

    def _add_samplers(
        self, sampling: Sampling, prompt: Sequence[int], *, ends: bool
    ) -> None:
        """Adds the samplers for these options to the chain. `ends`: False forbids the
        end-of-generation tokens. Raises OptionError for an invalid bias or sequence
        breaker."""
        chain, vocabulary = self._chain, self._llm.vocabulary
        biases = dict(sampling.logit_bias)
        for text, bias in sampling.text_bias:
            for token in vocabulary.tokens(text, special=False):
                biases[token] = biases.get(token, 0.0) + bias
        for token, bias in biases.items():
            if not 0 <= token < self._n_vocab or math.isnan(bias):
                raise OptionError(
                    f"logit_bias must have numbers for tokens from 0 to {self._n_vocab - 1}, but has {bias} for"
                    f" {token}."
                )
        if not ends:
            biases |= dict.fromkeys(vocabulary.end_tokens(), -math.inf)
        if biases:
            chain.add_logit_bias(self._n_vocab, biases)
        n_counted = max(self._add_penalties(sampling), self._add_dry(sampling))
        for token in prompt[-n_counted:] if n_counted else ():
            chain.accept(token)
        if sampling.temperature <= 0 and not sampling.xtc_probability:
            chain.add_greedy()
            return
        seed = (
            random.getrandbits(32)
            if sampling.seed is None
            else sampling.seed & 0xFFFFFFFF
        )
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        mirostat = sampling.mirostat if sampling.temperature > 0 else 0
        if mirostat:
            chain.add_temp(sampling.temperature)
        if mirostat == 1:
            chain.add_mirostat(self._n_vocab, seed, tau, eta, MIROSTAT_TOKENS)
        elif mirostat == 2:
            chain.add_mirostat_v2(seed, tau, eta)
        else:
            chain.add_top_n_sigma(sampling.top_n_sigma)
            chain.add_top_k(sampling.top_k)
            chain.add_typical(sampling.typical_p, 1)
            chain.add_top_p(sampling.top_p, 1)
            chain.add_min_p(sampling.min_p, 1)
            chain.add_xtc(sampling.xtc_probability, sampling.xtc_threshold, 1, seed)
            chain.add_temp(sampling.temperature)
            chain.add_dist(seed)

    def _add_penalties(self, sampling: Sampling) -> int:
        """Adds the repetition penalties. Returns the number of most recent tokens that
        they examine, or 0 if they are off."""
        if (
            sampling.repeat_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        ) == (1.0, 0.0, 0.0):
            return 0
        n_last = self._n_last(sampling, sampling.repeat_last_n)
        self._chain.add_penalties(
            self._n_vocab,
            n_last,
            sampling.repeat_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        return n_last

    def _add_dry(self, sampling: Sampling) -> int:
        """Adds the DRY sampler, which penalizes repeated sequences. Returns the number
        of most recent tokens that the sampler examines, or 0 if it is off. Raises
        OptionError for too many or too long sequence breakers."""
        n_last = self._n_last(sampling, sampling.dry_penalty_last_n)
        if not sampling.dry_multiplier or not n_last:
            return 0
        breakers = [without_surrogates(text) for text in sampling.dry_sequence_breakers]
        if len(breakers) > MAX_BREAKERS or any(
            len(text.encode()) > MAX_BREAKER_BYTES for text in breakers
        ):
            raise OptionError(
                f"dry_sequence_breakers may have at most {MAX_BREAKERS} strings of up to {MAX_BREAKER_BYTES} bytes"
                f" each, but is {breakers!r:.200}; leave some out, or shorten them."
            )
        self._chain.add_dry(
            self._llm._model,
            sampling.dry_multiplier,
            sampling.dry_base,
            sampling.dry_allowed_length,
            n_last,
            breakers,
        )
        return n_last

    def _n_last(self, sampling: Sampling, n_last: int) -> int:
        """Returns `n_last`. If `n_last` is negative, returns the number of context
        tokens that the request may use."""
        return sampling.context_within(self._llm.n_ctx()) if n_last < 0 else n_last

    def sample(self, row: int = -1) -> int | None:
        """Returns the next token, sampled from a row of the last pass's logits (-1: the
        last row). Returns None if the answer is complete and the model has no
        end-of-generation token.

        Raises SchemaError as `Matcher.mask` does, and if every token that the
        constraint allows has the logit -inf. Without a constraint, raises the errors of
        `Context.check_logits`.
        """
        token = self._forced()
        if token is not None:
            self._chain.accept(token)
        elif self._matcher is None:
            self._llm.context.check_logits(row)
            token = int(self._chain.sample(self._llm._ctx, row))
        elif (token := self._constrained(self._matcher, row)) is not None:
            self._chain.accept(token)
        if token is None or self._llm.vocabulary.is_end(token):
            return token
        if self._matcher is not None:
            self._matcher.accept(token)
        if self._budget is not None:
            self._budget.accept(token)
        return token

    def _forced(self) -> int | None:
        """Returns the token that the thinking budget forces, or None if there is none
        or the constraint forbids it."""
        if self._budget is None or (token := self._budget.forced) is None:
            return None
        if self._matcher is not None and not self._matcher.allows(token):
            self._budget.release()
            return None
        return token

    def _constrained(self, matcher: Matcher, row: int) -> int | None:
        """Samples a token that the constraint allows. The samplers have not accepted it
        yet. Returns None if the answer is complete and the model has no
        end-of-generation token."""
        token = self._apply(row)
        if matcher.allows(token):
            return token
        allowed = matcher.mask()
        return self._apply(row, allowed) if allowed.any() else None

    def _apply(self, row: int, allowed: npt.NDArray[np.bool_] | None = None) -> int:
        """Runs the samplers and returns the token, which they have not accepted yet.
        `allowed`: array of shape [n_vocab], False for masked tokens."""
        array, candidates = self._candidates, self._candidates.candidates
        array.copy_logits(self._llm.context.logits(row))
        candidates.selected = -1
        if allowed is not None:
            logits = array.candidates_data.logit
            logits[~allowed] = -np.inf
            if not np.isfinite(logits).any():
                raise SchemaError(
                    "no token of this model can continue the requested format; send another format."
                )
        self._bindings.llama_sampler_apply(self._chain.sampler, c.pointer(candidates))
        return int(candidates.data[candidates.selected].id)
