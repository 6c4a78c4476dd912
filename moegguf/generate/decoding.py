"""Token loop of an answer: reuses tokens in the context, prefills the rest of the prompt, decodes token by token.

Computes on the calling thread. Works with tokens only, not with text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from moegguf.errors import GenerationCancelled
from moegguf.generate.request import PromptProgress

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.generate.prompt import Prompt
    from moegguf.generate.sampler import Sampler

MIN_SHIFTED = 4  # tokens at the end of the context that a shift may drop; llama.cpp's number

OnProgress = Callable[[PromptProgress], object]


class Cancellation:
    """Ends a computation from any thread: in the middle of a pass for a model with experts, else after it."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._computing = False
        self.requested = False

    def request(self) -> None:
        """Ends the computation now, or as soon as it begins."""
        with self._lock:
            self.requested = True
            if self._computing:
                self._llm.cancel()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Marks the block in which the model computes this answer; no pass outside it is ended."""
        with self._lock:
            self._computing = True
        try:
            yield
        finally:
            with self._lock:
                self._computing = False
                if self.requested:
                    self._llm.resume()

    def check(self) -> None:
        """Raises GenerationCancelled after `request`."""
        if self.requested:
            raise GenerationCancelled("the answer was stopped.")


def reuse_prefix(llm: Llama, prompt: Prompt, *, enabled: bool = True) -> int:
    """Truncates the context to the longest prefix that it shares with `prompt`; returns that prefix's tokens.

    At least one token is left to evaluate. 0, and an empty context, unless `enabled` and where the model's state
    cannot be truncated (recurrent models).
    """
    n = _common_prefix(llm, prompt) if enabled else 0
    if n and llm.truncate(n):
        return n
    llm.reset()
    return 0


def _common_prefix(llm: Llama, prompt: Prompt) -> int:
    n = min(llm.n_tokens, len(prompt.tokens) - 1)
    differ = np.flatnonzero(llm.input_ids[:n] != np.asarray(prompt.tokens[:n], np.intc))
    n = int(differ[0]) if differ.size else n
    return llm.images.common_prefix(n, prompt.images.spans if prompt.images else ())


def prefill(
    llm: Llama, prompt: Prompt, n_cached: int, cancellation: Cancellation, on_progress: OnProgress | None
) -> None:
    """Evaluates the prompt's tokens from `n_cached` on, n_batch at a time. Raises GenerationCancelled in between."""
    tokens, start = prompt.tokens, time.perf_counter()

    def report() -> None:
        if on_progress is not None:
            on_progress(PromptProgress(len(tokens), n_cached, llm.n_tokens, time.perf_counter() - start))

    def after_batch() -> None:
        report()
        cancellation.check()

    if len(tokens) - n_cached > llm.n_batch:
        report()
    n_done = n_cached
    if prompt.images is not None:
        for span in prompt.images.spans_from(n_cached):
            if span.begin > n_done:
                llm.eval(tokens[n_done : span.begin], after_batch)
            llm.eval_image(prompt.images, span)
            after_batch()
            n_done = span.end
    llm.eval(tokens[n_done:], after_batch)


def decode(
    llm: Llama, sampler: Sampler, cancellation: Cancellation, on_full: Callable[[], object] | None = None
) -> Generator[int, None, None]:
    """Tokens after those in the context; each is evaluated when the next one is requested.

    Endless, except for a complete constrained answer of a model without an end-of-generation token. `on_full` is
    called when the context is about to be full, and makes room.
    """
    sample, evaluate, last = sampler.sample, llm.eval, llm.n_ctx() - 1
    while (token := sample()) is not None:
        yield token
        cancellation.check()
        if on_full is not None and llm.n_tokens >= last:
            on_full()
        evaluate((token,))


def shifted_first(llm: Llama, n_keep: int) -> int:
    """How many of the first `n_keep` tokens can stay when the context shifts."""
    return min(n_keep, llm.n_ctx() - MIN_SHIFTED)


def shift_context(llm: Llama, n_keep: int) -> None:
    """Drops the older half of the tokens after the first `n_keep`."""
    llm.shift(n_keep, n_shifted(llm.n_tokens, n_keep))


def n_shifted(n_tokens: int, n_keep: int) -> int:
    """How many tokens after the first `n_keep` a shift of `n_tokens` drops."""
    return (n_tokens - n_keep) // 2
