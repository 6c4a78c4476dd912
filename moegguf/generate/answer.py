"""One answer: from a request to deltas of text, yielded while they are computed; it can be cancelled.

`Answer` computes on the thread that iterates. `BackgroundAnswer` computes on its own thread, so that the iterating
thread can be interrupted: a pass may wait for a slow disk in C, where Python handles no signals.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Protocol

from moegguf.errors import GenerationCancelled
from moegguf.generate.decoding import Cancellation, OnProgress, decode, prefill, reuse_prefix, shift_context
from moegguf.generate.request import Delta, GenerationRequest, Timing
from moegguf.generate.sequence import SequenceState

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.generate.prompt import Prompt

POLL_S = 0.1  # a signal that another thread receives does not interrupt queue.get()
CANCEL_TIMEOUT_S = 1.0


class AnyAnswer(Protocol):
    """What `BackgroundAnswer` needs: an `Answer`, or one that is computed elsewhere."""

    timing: Timing

    def cancel(self) -> None:
        """Ends the answer, from any thread."""

    def deltas(self, on_progress: OnProgress | None = None) -> Generator[Delta, None, None]:
        """The parts of the answer; iterate once."""


class Answer:
    """One answer to one request, computed while its `deltas` are iterated. `state`: of the request, where it was read
    already.

    `timing` is complete when they end, also by an exception. Raises what `SequenceState` raises, before anything is
    computed.
    """

    def __init__(self, llm: Llama, request: GenerationRequest, state: SequenceState | None = None) -> None:
        self.llm = llm
        self.request = request
        self._state = SequenceState(llm, request) if state is None else state
        self.timing = self._state.timing
        self._cancellation = Cancellation(llm)
        self._n_clean: int | None = None  # tokens at the beginning of a shifted context, as if nothing had shifted

    @property
    def prompt(self) -> Prompt:
        """The prompt as it is evaluated."""
        return self._state.prompt

    def cancel(self) -> None:
        """Ends the answer, from any thread: the iteration ends normally, within one token.

        A model with experts stops in the middle of a pass, another one after it; a prompt stops after a batch.
        """
        self._cancellation.request()

    def deltas(self, on_progress: OnProgress | None = None) -> Generator[Delta, None, None]:
        """The parts of the answer as they are generated; iterate once. Closing the generator ends the answer.

        `on_progress` is called after every n_batch tokens of the prompt. Raises ExpertIOError, ClosedError, ...
        """
        return self.llm.as_request(self._deltas(on_progress))

    def _deltas(self, on_progress: OnProgress | None) -> Generator[Delta, None, None]:
        timing, start, before = self.timing, time.perf_counter(), self.llm.stats()
        timing.finish = "cancelled"
        try:
            with self._cancellation.computing():
                self._prefill(on_progress)
                yield from self._decode(start)
        except GenerationCancelled:
            pass  # timing.finish is "cancelled"
        finally:
            timing.total_s = time.perf_counter() - start
            timing.prompt_s = timing.prompt_s or timing.total_s
            timing.answer_s = timing.total_s - timing.prompt_s
            timing.stats = self.llm.stats() - before

    def _prefill(self, on_progress: OnProgress | None) -> None:
        prompt, timing = self._state.prompt, self.timing
        self._cancellation.check()
        timing.cached_tokens = reuse_prefix(self.llm, prompt, enabled=self._state.reuses_prefix)
        prefill(self.llm, prompt, timing.cached_tokens, self._cancellation, on_progress)
        timing.prompt_tokens = len(prompt.tokens) - timing.cached_tokens

    def _decode(self, start: float) -> Generator[Delta, None, None]:
        """Deltas until the model ends the answer, a stop string or the token limit is reached, or it is cancelled."""
        timing, state, first_stats = self.timing, self._state, None
        try:
            for token in decode(self.llm, state.sampler, self._cancellation, self._shift if state.shifts else None):
                if first_stats is None:
                    timing.prompt_s, first_stats = time.perf_counter() - start, self.llm.stats()
                delta = state.accept(token)
                if delta is not None:
                    yield delta
                if state.ended:
                    break
            else:
                state.end("stop")
        except GenerationCancelled:
            pass  # text that was held back still follows
        finally:
            state.note_end()
            if self._n_clean is not None:
                self.llm.truncate(self._n_clean)
            timing.answer_stats = self.llm.stats() - (first_stats or self.llm.stats())
        if delta := state.last_delta():
            yield delta

    def _shift(self) -> None:
        """Makes room in the full context. What stays was computed with what goes: only the first tokens are reused."""
        self._n_clean = self._state.n_kept
        shift_context(self.llm, self._n_clean)
        self.timing.n_shifts += 1


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
