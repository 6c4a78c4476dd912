"""Which token comes next: llama.cpp's samplers, in llama-cpp-python's order, and a matcher that is asked last.

A matcher looks at one token, the one that was chosen; only when it refuses that one are the others masked and the
samplers run again. (llama.cpp's own `common_sampler_sample` goes the same way.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moegguf.generate.request import TokenLogprob

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama


import ctypes as c
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from moegguf.errors import OptionError, SchemaError
from moegguf.generate.constraint import Constraint, Matcher, matcher_tokens
from moegguf.generate.request import Sampling
from moegguf.native import library

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama


def logprob_of(token: int, llm: Llama, n_top: int) -> TokenLogprob:
    """The chance of `token` after the last pass, and of the `n_top` likeliest tokens (it may be among them)."""
    logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
    most = logits.max()
    log_total = most + np.log(np.exp(logits - most, dtype=np.float64).sum())
    top = np.argpartition(logits, -n_top)[-n_top:] if n_top else np.empty(0, np.intp)
    top = top[np.argsort(-logits[top], kind="stable")]
    text = llm.vocabulary.text
    likeliest = tuple((text(int(other)), float(logits[other] - log_total)) for other in top)
    return TokenLogprob(text(token), float(logits[token] - log_total), likeliest)


class TokenMask(Protocol):
    """What may follow the tokens accepted so far: `constraint.Matcher`, or `GbnfMatcher`."""

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """[n_vocab], True for each token that may come next."""

    def accept(self, token: int) -> None:
        """Goes on behind `token`, which must be allowed and not end the answer."""


class Sampler:
    """Chooses tokens for one answer, from the logits of the last pass.

    `constraint`: the form of the answer, or a grammar in llama.cpp's notation (GBNF, root symbol "root"). Raises
    OptionError for a logit_bias that is not for a token of the model, SchemaError for a constraint that cannot be
    followed.
    """

    def __init__(
        self, llm: Llama, sampling: Sampling, prompt: Sequence[int], constraint: Constraint | str | None = None
    ) -> None:
        self._bindings = library.llama_cpp()
        self._llm = llm
        self._n_vocab = llm.n_vocab()
        self._samplers = self._bindings._internals.LlamaSampler()
        self._add(sampling, prompt)
        self._matcher = self._matcher_of(constraint)
        self._all: Any = None
        if self._matcher is not None:
            self._all = self._bindings._internals.LlamaTokenDataArray(n_vocab=self._n_vocab)

    def _matcher_of(self, constraint: Constraint | str | None) -> TokenMask | None:
        if isinstance(constraint, str):
            return GbnfMatcher(self._llm, constraint, self._n_vocab)
        if constraint is None:
            return None
        return Matcher(constraint, matcher_tokens(self._llm.vocabulary))

    def _add(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        samplers = self._samplers
        if sampling.logit_bias:
            samplers.add_logit_bias(self._n_vocab, self._checked(sampling))
        if (sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
            n_last = self._llm.n_ctx() if sampling.repeat_last_n < 0 else sampling.repeat_last_n
            samplers.add_penalties(
                self._n_vocab, n_last, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty
            )
            for token in prompt[-n_last:] if n_last else ():
                samplers.accept(token)
        if sampling.temperature <= 0:
            samplers.add_greedy()
            return
        samplers.add_top_k(sampling.top_k)
        samplers.add_typical(sampling.typical_p, 1)
        samplers.add_top_p(sampling.top_p, 1)
        samplers.add_min_p(sampling.min_p, 1)
        samplers.add_temp(sampling.temperature)
        samplers.add_dist(random.getrandbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF)

    def _checked(self, sampling: Sampling) -> dict[int, float]:
        for token, bias in sampling.logit_bias.items():
            if not 0 <= token < self._n_vocab or math.isnan(bias):
                raise OptionError(
                    f"logit_bias is a number for tokens from 0 to {self._n_vocab - 1}, but has {bias} for {token}."
                )
        return dict(sampling.logit_bias)

    def choose(self) -> int | None:
        """The next token. None when the answer is complete and the model has no token that says so.

        Raises SchemaError when the constraint allows no token that the samplers leave.
        """
        if self._matcher is None:
            return int(self._samplers.sample(self._llm._ctx))
        token = self._sampled()
        if not self._matcher.allows(token):
            allowed = self._matcher.mask()
            if not allowed.any():
                return None
            token = self._sampled(allowed)
        self._samplers.accept(token)
        if not self._llm.vocabulary.ends(token):
            self._matcher.accept(token)
        return token

    def _sampled(self, allowed: npt.NDArray[np.bool_] | None = None) -> int:
        """A token by the samplers, which do not note it; of those `allowed`, or of all."""
        array, candidates = self._all, self._all.candidates
        array.copy_logits(np.ctypeslib.as_array(self._llm._ctx.get_logits_ith(-1), shape=(self._n_vocab,)))
        candidates.selected = -1
        if allowed is not None:
            logits = array.candidates_data.logit
            logits[~allowed] = -np.inf
            if not np.isfinite(logits).any():
                raise SchemaError("no token of this model can go on in the format asked for; try another one.")
        self._bindings.llama_sampler_apply(self._samplers.sampler, c.pointer(candidates))
        return int(candidates.data[candidates.selected].id)


class GbnfMatcher:
    """What a user's own grammar (GBNF, root symbol "root") allows, by llama.cpp's grammar sampler.

    Raises SchemaError for a grammar that llama.cpp cannot read.
    """

    def __init__(self, llm: Llama, grammar: str, n_vocab: int) -> None:
        self._bindings = library.llama_cpp()
        self._vocab = llm._model.vocab
        self._sampler = self._bindings.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
        if not self._sampler:
            raise SchemaError("llama.cpp cannot read this grammar (GBNF); it needs a rule named root.")
        self._all = self._bindings._internals.LlamaTokenDataArray(n_vocab=n_vocab)
        self._zeros = np.zeros(n_vocab, np.single)
        self._one = self._bindings.llama_token_data()
        self._only = self._bindings.llama_token_data_array(data=c.pointer(self._one), size=1)

    def mask(self) -> npt.NDArray[np.bool_]:
        """[n_vocab], True for each token that may come next; milliseconds with a large vocabulary."""
        self._all.copy_logits(self._zeros)
        self._bindings.llama_sampler_apply(self._sampler, c.pointer(self._all.candidates))
        return np.isfinite(self._all.candidates_data.logit)

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        self._one.id, self._one.logit = token, 1.0
        self._only.size = 1
        self._bindings.llama_sampler_apply(self._sampler, c.pointer(self._only))
        return math.isfinite(self._one.logit)

    def accept(self, token: int) -> None:
        """Goes on behind `token`, which must be allowed: llama.cpp ends the process otherwise."""
        self._bindings.llama_sampler_accept(self._sampler, token)

    def __del__(self) -> None:
        if getattr(self, "_sampler", None):
            self._bindings.llama_sampler_free(self._sampler)
