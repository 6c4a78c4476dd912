"""One answer: from a request to deltas of text, computed on the thread that iterates; it can be cancelled."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from moegguf.errors import GenerationCancelled
from moegguf.generate.decoding import Cancellation, OnProgress, decode, prefill, reuse_prefix, shift_context
from moegguf.generate.request import Delta, GenerationRequest
from moegguf.generate.sequence import SequenceState

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.generate.prompt import Prompt


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
