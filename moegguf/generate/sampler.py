"""Choice of the next token: llama.cpp's samplers, in llama-cpp-python's order, and the constraint after them.

The constraint is checked for the sampled token only; if it forbids that one, the others are masked and the samplers run
again, as llama.cpp's `common_sampler_sample` (common/sampling.cpp) does.
"""

from __future__ import annotations

import ctypes as c
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError, SchemaError
from moegguf.generate.constraint import Constraint
from moegguf.generate.matcher import Matcher, matcher_tokens
from moegguf.generate.request import Sampling, TokenLogprob
from moegguf.native import library

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama


def logprob_of(token: int, llm: Llama, n_top: int, row: int = -1) -> TokenLogprob:
    """The log probability of `token` by a row of the last pass's logits, and of the `n_top` likeliest tokens, which may
    include it."""
    logits = llm.context.logits(row)
    most = logits.max()
    log_total = most + np.log(np.exp(logits - most, dtype=np.float64).sum())
    top = np.argpartition(logits, -n_top)[-n_top:] if n_top else np.empty(0, np.intp)
    top = top[np.argsort(-logits[top], kind="stable")]
    text = llm.vocabulary.text
    likeliest = tuple((text(int(other)), float(logits[other] - log_total)) for other in top)
    return TokenLogprob(text(token), float(logits[token] - log_total), likeliest)


class Sampler:
    """Samples the tokens of one answer from the logits of the last pass. `prompt`: tokens that penalties count.

    Raises OptionError for a logit_bias that is not for a token of the model, SchemaError for a constraint that cannot
    be followed.
    """

    def __init__(
        self, llm: Llama, sampling: Sampling, prompt: Sequence[int], constraint: Constraint | None = None
    ) -> None:
        self._bindings = library.llama_cpp()
        self._llm = llm
        self._n_vocab = llm.n_vocab()
        self._chain = self._bindings._internals.LlamaSampler()
        self._add_samplers(sampling, prompt)
        self._matcher: Matcher | None = None
        self._candidates: Any = None
        if constraint is not None:
            self._matcher = Matcher(constraint, matcher_tokens(llm.vocabulary))
            self._candidates = self._bindings._internals.LlamaTokenDataArray(n_vocab=self._n_vocab)

    def _add_samplers(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        chain = self._chain
        if sampling.logit_bias:
            chain.add_logit_bias(self._n_vocab, self._checked_bias(sampling))
        if (sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
            n_last = self._llm.n_ctx() if sampling.repeat_last_n < 0 else sampling.repeat_last_n
            chain.add_penalties(
                self._n_vocab, n_last, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty
            )
            for token in prompt[-n_last:] if n_last else ():
                chain.accept(token)
        if sampling.temperature <= 0:
            chain.add_greedy()
            return
        chain.add_top_k(sampling.top_k)
        chain.add_typical(sampling.typical_p, 1)
        chain.add_top_p(sampling.top_p, 1)
        chain.add_min_p(sampling.min_p, 1)
        chain.add_temp(sampling.temperature)
        chain.add_dist(random.getrandbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF)

    def _checked_bias(self, sampling: Sampling) -> dict[int, float]:
        for token, bias in sampling.logit_bias.items():
            if not 0 <= token < self._n_vocab or math.isnan(bias):
                raise OptionError(
                    f"logit_bias is a number for tokens from 0 to {self._n_vocab - 1}, but has {bias} for {token}."
                )
        return dict(sampling.logit_bias)

    def sample(self, row: int = -1) -> int | None:
        """The next token, by that row of the last pass's logits; -1: the last one. None when the answer is complete and
        the model has no end-of-generation token.

        Raises SchemaError when the constraint allows no token of finite logit, and what `Context.check_logits` raises.
        """
        if self._matcher is None:
            self._llm.context.check_logits(row)
            return int(self._chain.sample(self._llm._ctx, row))
        token = self._apply(row)
        if not self._matcher.allows(token):
            allowed = self._matcher.mask()
            if not allowed.any():
                return None
            token = self._apply(row, allowed)
        self._chain.accept(token)
        if not self._llm.vocabulary.is_end(token):
            self._matcher.accept(token)
        return token

    def _apply(self, row: int, allowed: npt.NDArray[np.bool_] | None = None) -> int:
        """A token by the samplers, not yet accepted by them; [n_vocab] `allowed` masks the others."""
        array, candidates = self._candidates, self._candidates.candidates
        array.copy_logits(self._llm.context.logits(row))
        candidates.selected = -1
        if allowed is not None:
            logits = array.candidates_data.logit
            logits[~allowed] = -np.inf
            if not np.isfinite(logits).any():
                raise SchemaError("no token of this model can continue the requested format; try another one.")
        self._bindings.llama_sampler_apply(self._chain.sampler, c.pointer(candidates))
        return int(candidates.data[candidates.selected].id)
