"""One request at a time per model, and what is left of a model after close().

A context holds one conversation's tokens, so two requests at once would mix them, or end the process in llama.cpp's
assertions. Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, TypeVar

from moegguf.errors import ClosedError, GenerationCancelled

Step = TypeVar("Step")


class RequestLock:
    """Requests of other threads wait; one of the same thread ends the stream that this thread left unfinished."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: tuple[int, object] | None = None  # thread, and an object that is this request's alone

    def hold(self, steps: Generator[Step, Any, None]) -> Generator[Step, Any, None]:
        """The same steps; the turn is held from the first to the last, or to close() of the generator.

        Raises GenerationCancelled from a step that comes after another request of the same thread has begun.
        """
        mine = self._begin()
        try:
            sent = None
            while True:
                try:
                    step = steps.send(sent)
                except StopIteration:
                    return
                sent = yield step
                if self._holder is not mine:
                    raise GenerationCancelled("another request has begun on this model; this one cannot go on.")
        finally:
            steps.close()
            self._end(mine)

    def _begin(self) -> tuple[int, object]:
        thread = threading.get_ident()
        with self._changed:
            while self._holder is not None and self._holder[0] != thread:
                self._changed.wait()
            self._holder = mine = (thread, object())
        return mine

    def _end(self, mine: tuple[int, object]) -> None:
        with self._changed:
            if self._holder is mine:
                self._holder = None
                self._changed.notify_all()


class ClosedModel:
    """Stands where the model, its context and its tokenizer were: whatever is asked of it raises ClosedError."""

    def __getattr__(self, _name: str) -> Any:
        raise ClosedError("the model is closed; load it again.")
