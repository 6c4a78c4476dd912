"""Answers with drafts, one at a time, for measurements and records."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

from moegguf.engine.llama import Llama
from moegguf.generate.batching import BatchLoop
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Sampling, Timing


class Answering:
    """`with Answering(llm) as answering:` computes on a thread of its own. Also the events of each answer."""

    def __init__(self, llama: Llama) -> None:
        self._loop = BatchLoop(llama)
        self._thread = threading.Thread(target=self._loop.run, name="moegguf-answering")
        self._ended = threading.Event()
        self._timing = Timing()
        self._error: Exception | None = None

    def answer(self, prompt: Sequence[int], sampling: Sampling) -> Timing:
        """A request for one answer, with all tokens of its prompt; what the context holds of them is reused. Raises
        what evaluations raise."""
        request = GenerationRequest(prompt="", context=tuple(prompt), sampling=sampling, return_context=True)
        self._ended.clear()
        answer = self._loop.submit(request, self)
        try:
            self._ended.wait()
        except BaseException:  # an interrupt
            self._loop.cancel(answer)
            raise
        if self._error is not None:
            raise self._error
        return self._timing

    def on_progress(self, progress: PromptProgress) -> None:
        """Nobody looks."""

    def on_delta(self, delta: Delta) -> None:
        """Nobody reads."""

    def on_end(self, timing: Timing, error: Exception | None) -> None:
        """The answer has ended."""
        self._timing, self._error = timing, error
        self._ended.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()
        self._thread.join()
