"""One answer: from a request to deltas of text, computed on the thread that iterates; it can be cancelled."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from moegguf.generate.batched_answer import BatchedAnswer
from moegguf.generate.batching import BatchLoop
from moegguf.generate.request import Delta, GenerationRequest, OnProgress, Timing
from moegguf.generate.sequence import SequenceState

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.generate.prompt import Prompt


class _Collected:
    """Collects the events of an answer, until they are taken."""

    def __init__(self) -> None:
        self.on_progress: OnProgress = lambda _progress: None
        self.deltas: list[Delta] = []
        self.ended = False
        self.error: Exception | None = None

    def on_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def on_end(self, timing: Timing, error: Exception | None) -> None:
        self.ended, self.error = True, error

    def take(self) -> list[Delta]:
        """The deltas since the last call."""
        taken, self.deltas = self.deltas, []
        return taken


class Answer:
    """One answer to one request, computed while its `deltas` are iterated: a loop of one request (`BatchLoop`).

    `timing` is complete when they end, also by an exception. Raises what `SequenceState` raises, before anything is
    computed.
    """

    def __init__(self, llm: Llama, request: GenerationRequest) -> None:
        self.llm = llm
        self.request = request
        self._state = SequenceState(llm, request)
        self._events = _Collected()
        self._answer = BatchedAnswer(request, self._events, self._state)
        self._loop = BatchLoop(llm, n_slots=1)

    @property
    def timing(self) -> Timing:
        """Counts and times."""
        return self._state.timing

    @property
    def prompt(self) -> Prompt:
        """The prompt as it is evaluated."""
        return self._state.prompt

    def cancel(self) -> None:
        """Ends the answer, from any thread: the iteration ends normally, within one token.

        A model with experts stops in the middle of a pass, another one after it; a prompt stops after a batch.
        """
        self._loop.cancel(self._answer)

    def deltas(self, on_progress: OnProgress | None = None) -> Generator[Delta, None, None]:
        """The parts of the answer as they are generated; iterate once. Closing the generator ends the answer.

        `on_progress` is called after every n_batch tokens of the prompt. Raises ExpertIOError, ClosedError, ...
        """
        if on_progress is not None:
            self._events.on_progress = on_progress
        return self.llm.context.as_request(self._deltas())

    def _deltas(self) -> Generator[Delta, None, None]:
        self.timing.finish = "cancelled"
        self._loop.submit_read(self._answer)
        try:
            while not self._events.ended:
                self._loop.take_turn()
                yield from self._events.take()
        finally:
            self._loop.close()
            self._loop.end_all()
        if self._events.error is not None:
            raise self._events.error
