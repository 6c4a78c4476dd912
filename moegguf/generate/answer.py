"""One answer: from a request to deltas of text, yielded while they are computed; it can be cancelled.

`Answer` computes on the thread that iterates. `BackgroundAnswer` computes on a thread of its own, so that the waiting
thread can still be interrupted: one pass may wait for a slow disk in C, where Python's signals do not reach. Neither
knows terminals or HTTP.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from moegguf.errors import GenerationCancelled, OptionError
from moegguf.generate.constraint import constraint_for
from moegguf.generate.decoding import OnProgress, Stop, decode, read, reuse
from moegguf.generate.prompt import read_prompt
from moegguf.generate.request import Delta, GenerationRequest, Timing, TokenLogprob
from moegguf.generate.sampler import Sampler, logprob_of
from moegguf.generate.transcript import new_transcript

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

WAKE_S = 0.1  # a signal that another thread took wakes nobody: the waiting one looks for itself
MOST_CHANCES = 20


class Answer:
    """One answer to one request, computed while its `pieces` are iterated.

    `timing` is complete when they end, however they end. Raises ContextError, TemplateError, CapabilityError,
    SchemaError and OptionError, before anything is computed.
    """

    def __init__(self, llm: Llama, request: GenerationRequest) -> None:
        self.llm = llm
        self.request = request
        self.timing = Timing()
        self._prompt = read_prompt(llm, llm.vocabulary, request)
        self.timing.cut_messages = self._prompt.cut_messages
        self._n_logprobs = _checked_n_logprobs(request.n_logprobs)
        constraint = constraint_for(request, self._prompt.template, self._prompt.end)
        self._sampler = Sampler(llm, request.sampling, self._prompt.tokens, constraint)
        self._stop = Stop(llm)

    def cancel(self) -> None:
        """Ends the answer, from any thread: the iteration ends as if the model had ended it, within one token.

        A model with experts stops in the middle of a pass, another one after it, and after each batch of a prompt.
        """
        self._stop.want()

    def deltas(self, on_progress: OnProgress | None = None) -> Generator[Delta, None, None]:
        """The answer as it is written, once; closing it ends the answer.

        `on_progress` hears of every n_batch tokens of the prompt. Raises what the model raises: ExpertIOError, ...
        """
        return self.llm.as_request(self._pieces(on_progress))

    def _pieces(self, on_progress: OnProgress | None) -> Generator[Delta, None, None]:
        timing, start, before = self.timing, time.perf_counter(), self.llm.stats()
        timing.finish = "cancelled"
        try:
            with self._stop.computing():
                self._read(on_progress)
                yield from self._write(start)
        except GenerationCancelled:
            pass  # as asked
        finally:
            timing.total_s = time.perf_counter() - start
            timing.prompt_s = timing.prompt_s or timing.total_s
            timing.answer_s = timing.total_s - timing.prompt_s
            timing.stats = self.llm.stats() - before

    def _read(self, on_progress: OnProgress | None) -> None:
        tokens, timing = self._prompt.tokens, self.timing
        self._stop.check()
        # Reused tokens were evaluated in batches of other sizes, which changes the last bits of their numbers.
        timing.cached_tokens = reuse(self.llm, tokens, afresh=self.request.sampling.seed is not None)
        read(self.llm, tokens, timing.cached_tokens, self._stop, on_progress)
        timing.prompt_tokens = len(tokens) - timing.cached_tokens

    def _write(self, start: float) -> Generator[Delta, None, None]:
        """Pieces until the model ends the answer, the limit is reached or someone stops it."""
        timing, ends = self.timing, self.llm.vocabulary.ends
        transcript = new_transcript(self.request, self._prompt, self.llm.vocabulary)
        written, limit, first = list[int](), self._token_limit(), None
        try:
            for token in decode(self.llm, self._sampler, self._stop):
                if first is None:
                    timing.prompt_s, first = time.perf_counter() - start, self.llm.stats()
                timing.answer_tokens += 1
                if ends(token):
                    timing.finish = "stop"
                    break
                written.append(token)
                delta = transcript.feed(token, self._chance(token))
                if delta is not None:
                    yield delta
                if transcript.stopped or timing.answer_tokens >= limit:
                    timing.finish = "stop" if transcript.stopped else "length"
                    break
            else:
                timing.finish = "stop"
        except GenerationCancelled:
            pass  # what was held back is still part of the answer
        finally:
            timing.answer_stats = self.llm.stats() - (first or self.llm.stats())
            if self.request.tell_context:
                timing.context = (*self._prompt.tokens, *written)
        if delta := transcript.end():
            yield delta

    def _token_limit(self) -> int:
        n_ctx, asked = self.llm.n_ctx(), self.request.sampling.max_tokens
        room = n_ctx - len(self._prompt.tokens)
        return min(asked, room) if asked is not None and asked > 0 else room

    def _chance(self, token: int) -> TokenLogprob | None:
        if self._n_logprobs is None:
            return None
        return logprob_of(token, self.llm, self._n_logprobs)


def _checked_n_logprobs(n_logprobs: int | None) -> int | None:
    if n_logprobs is not None and not 0 <= n_logprobs <= MOST_CHANCES:
        raise OptionError(f"n_logprobs is a number from 0 to {MOST_CHANCES}, but is {n_logprobs}.")
    return n_logprobs


class BackgroundAnswer:
    """An answer whose pieces are computed on a thread of its own. Iterate over it, once.

    Leaving the loop early, by Ctrl-C too, stops the model and waits for that, for a second at most: `running` tells.
    Iterating raises what the model raised.
    """

    PATIENCE_S = 1.0

    def __init__(self, answer: Answer, on_progress: OnProgress | None = None) -> None:
        self._answer = answer
        self._on_progress = on_progress
        self._pieces: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="moegguf-answer", daemon=True)

    @property
    def timing(self) -> Timing:
        """Complete once nothing is `running`."""
        return self._answer.timing

    @property
    def running(self) -> bool:
        """The model still computes; it must not be used or closed before it has stopped."""
        return self._thread.is_alive()

    def __iter__(self) -> Iterator[Delta]:
        self._thread.start()
        try:
            while (delta := self._next_piece()) is not None:
                yield delta
        finally:
            self.cancel(self.PATIENCE_S)
        if self._error is not None:
            raise self._error

    def _next_piece(self) -> Delta | None:
        while True:
            try:
                return self._pieces.get(timeout=WAKE_S)
            except queue.Empty:
                continue

    def cancel(self, timeout_s: float | None = None) -> bool:
        """Stops the model and waits until it has stopped; False when it has not after `timeout_s`."""
        if self.running:
            self._answer.cancel()
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout_s)
        return not self.running

    def _work(self) -> None:
        try:
            for delta in self._answer.deltas(self._on_progress):
                self._pieces.put(delta)
        except BaseException as error:  # raised again where the pieces are read
            self._error = error
        finally:
            self._pieces.put(None)
