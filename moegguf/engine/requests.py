"""Requests on one context: one at a time, each with a number, its prompt and its decoded tokens distinguished.

A context holds the tokens of one conversation: two requests at once would mix them, or end the process in one of
llama.cpp's assertions. llama.cpp does not report which request and phase tokens belong to; routing events carry both.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, TypeVar

from moegguf.errors import GenerationCancelled
from moegguf.native.events import Phase

Step = TypeVar("Step")


class RequestLock:
    """Requests of other threads wait; one of the same thread ends the request that this thread left unfinished."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: tuple[int, object] | None = None  # thread, and an object unique to the request

    def run(self, steps: Generator[Step, Any, None]) -> Generator[Step, Any, None]:
        """The same steps; the lock is held from the first to the last, or to close() of the generator.

        Raises GenerationCancelled from a step that comes after another request of the same thread has begun.
        """
        request = self._acquire()
        try:
            sent = None
            while True:
                try:
                    step = steps.send(sent)
                except StopIteration:
                    return
                sent = yield step
                if self._owner is not request:
                    raise GenerationCancelled("another request has begun on this model; this one cannot go on.")
        finally:
            steps.close()
            self._release(request)

    def _acquire(self) -> tuple[int, object]:
        thread = threading.get_ident()
        with self._changed:
            while self._owner is not None and self._owner[0] != thread:
                self._changed.wait()
            self._owner = request = (thread, object())
        return request

    def _release(self, request: tuple[int, object]) -> None:
        with self._changed:
            if self._owner is request:
                self._owner = None
                self._changed.notify_all()


class RequestCounter:
    """Counts the requests of one context.

    A request is one call that generates: its first evaluation is the prompt, all later ones decode. Without such a
    call, an evaluation from an empty context begins a request, single tokens after it decode.
    """

    def __init__(self) -> None:
        self.sequence = -1
        self._at_prompt = False
        self._generating = False

    def run(self, steps: Generator[Step, Any, None]) -> Generator[Step, Any, None]:
        """The same steps, counted as one request."""
        self._at_prompt = self._generating = True
        try:
            yield from steps
        finally:
            self._at_prompt = self._generating = False

    def begin(self) -> int:
        """Begins a request of another kind, such as an embedding; returns its number."""
        self.sequence += 1
        return self.sequence

    def next_phase(self, n_past: int, n_tokens: int) -> Phase:
        """The phase of the next `n_tokens` tokens after `n_past`; `sequence` is then the number of their request."""
        if self._at_prompt or (n_past == 0 and not self._generating) or self.sequence < 0:
            self._at_prompt = False
            self.sequence += 1
            return Phase.PREFILL
        return Phase.DECODE if self._generating or n_tokens == 1 else Phase.PREFILL
