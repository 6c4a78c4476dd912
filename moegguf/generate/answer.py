"""One answer: from a request to deltas of text, yielded while they are computed; it can be cancelled.

`Answer` computes on the thread that iterates. `BackgroundAnswer` computes on its own thread, so that the iterating
thread can be interrupted: a pass may wait for a slow disk in C, where Python handles no signals.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Protocol

from moegguf.generate.batched_answer import BatchedAnswer
from moegguf.generate.batching import BatchLoop
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing
from moegguf.generate.sequence import SequenceState

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.generate.prompt import Prompt

POLL_S = 0.1  # a signal that another thread receives does not interrupt queue.get()
CANCEL_TIMEOUT_S = 1.0

OnProgress = Callable[[PromptProgress], object]


class AnyAnswer(Protocol):
    """What `BackgroundAnswer` needs: an `Answer`, or one that is computed elsewhere."""

    @property
    def timing(self) -> Timing:
        """Counts and times."""

    def cancel(self) -> None:
        """Ends the answer, from any thread."""

    def deltas(self, on_progress: OnProgress | None = None) -> Generator[Delta, None, None]:
        """The parts of the answer; iterate once."""


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


class BackgroundAnswer:
    """An answer whose deltas are computed on its own thread. Iterate over it once; it raises what `Answer.deltas` does.

    Ending the loop early, also by Ctrl-C, cancels the answer and waits for up to CANCEL_TIMEOUT_S: see `running`.
    """

    def __init__(self, answer: AnyAnswer, on_progress: OnProgress | None = None) -> None:
        self._answer = answer
        self._on_progress = on_progress
        self._deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="moegguf-answer", daemon=True)

    @property
    def timing(self) -> Timing:
        """Complete once the answer is not `running`."""
        return self._answer.timing

    @property
    def running(self) -> bool:
        """Whether the model still computes the answer; do not use or close it before that ends."""
        return self._thread.is_alive()

    def __iter__(self) -> Iterator[Delta]:
        self._thread.start()
        try:
            while (delta := self._next_delta()) is not None:
                yield delta
        finally:
            self.cancel(CANCEL_TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def _next_delta(self) -> Delta | None:
        while True:
            try:
                return self._deltas.get(timeout=POLL_S)
            except queue.Empty:
                continue

    def cancel(self, timeout_s: float | None = None) -> bool:
        """Cancels the answer and waits until the model has stopped; False when it has not after `timeout_s` seconds."""
        if self.running:
            self._answer.cancel()
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout_s)
        return not self.running

    def _run(self) -> None:
        try:
            for delta in self._answer.deltas(self._on_progress):
                self._deltas.put(delta)
        except BaseException as error:  # raised again by __iter__
            self._error = error
        finally:
            self._deltas.put(None)
