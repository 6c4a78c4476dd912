"""Tokens of an answer: what the context still holds is reused, the rest of the prompt evaluated, then one by one.

Computes on the thread that asks for the next token. Knows nothing of text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from moegguf.errors import GenerationCancelled
from moegguf.generate.request import PromptProgress

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.generate.sampler import Sampler

OnProgress = Callable[[PromptProgress], object]


class Stop:
    """Ends a computation from any thread: a model with experts in the middle of a pass, others after it."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._computing = False
        self.wanted = False

    def want(self) -> None:
        with self._lock:
            self.wanted = True
            if self._computing:
                self._llm.cancel()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While the model works for the answer that this belongs to: a pass of another's must not be ended."""
        with self._lock:
            self._computing = True
        try:
            yield
        finally:
            with self._lock:
                self._computing = False
                if self.wanted:
                    self._llm.resume()

    def check(self) -> None:
        """Raises GenerationCancelled once a stop is wanted."""
        if self.wanted:
            raise GenerationCancelled("the answer was stopped.")


def reuse(llm: Llama, prompt: Sequence[int], *, afresh: bool = False) -> int:
    """Takes the context back to the longest beginning of `prompt` that it holds; returns its tokens.

    At least one token is left to evaluate. 0, and an empty context, with `afresh` and where the model's state cannot
    be taken back (recurrent ones).
    """
    n = 0 if afresh else _common(llm, prompt)
    if n and llm._ctx.kv_cache_seq_rm(-1, n, -1):
        llm.n_tokens, llm._requires_eval = n, True
        return n
    llm.reset()
    return 0


def _common(llm: Llama, prompt: Sequence[int]) -> int:
    n = min(llm.n_tokens, len(prompt) - 1)
    differ = np.flatnonzero(llm.input_ids[:n] != np.asarray(prompt[:n], np.intc))
    return int(differ[0]) if differ.size else n


def read(llm: Llama, prompt: Sequence[int], n_cached: int, stop: Stop, on_progress: OnProgress | None) -> None:
    """Evaluates the prompt's tokens from `n_cached` on, n_batch at a time. Raises GenerationCancelled in between."""
    start = time.perf_counter()

    def tell() -> None:
        if on_progress is not None:
            on_progress(PromptProgress(len(prompt), n_cached, llm.n_tokens, time.perf_counter() - start))

    def after_batch() -> None:
        tell()
        stop.check()

    if len(prompt) - n_cached > llm.n_batch:
        tell()
    llm.eval(prompt[n_cached:], after_batch)


def decode(llm: Llama, sampler: Sampler, stop: Stop) -> Generator[int, None, None]:
    """Tokens after those in the context; each is evaluated when the next one is asked for.

    Without end, except for a constrained answer that is complete where the model has no token that says so.
    """
    choose, evaluate = sampler.choose, llm.eval
    while (token := choose()) is not None:
        yield token
        stop.check()
        evaluate((token,))
