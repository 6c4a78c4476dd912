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

from moegguf.errors import GenerationCancelled, OptionError
from moegguf.generate.constraint import constraint_for
from moegguf.generate.decoding import Cancellation, OnProgress, decode, prefill, reuse_prefix, shift_context
from moegguf.generate.options import MAX_TOP_LOGPROBS
from moegguf.generate.prompt import read_prompt
from moegguf.generate.request import Delta, GenerationRequest, Timing, TokenLogprob
from moegguf.generate.sampler import Sampler, logprob_of
from moegguf.generate.transcript import new_transcript

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

POLL_S = 0.1  # a signal that another thread receives does not interrupt queue.get()
CANCEL_TIMEOUT_S = 1.0
MAX_CONTEXTS = 10  # of tokens in an answer without a limit, when the context shifts; Ollama's number


class AnyAnswer(Protocol):
    """What `BackgroundAnswer` needs: an `Answer`, or one that is computed elsewhere."""

    timing: Timing

    def cancel(self) -> None:
        """Ends the answer, from any thread."""

    def deltas(self, on_progress: OnProgress | None = None) -> Generator[Delta, None, None]:
        """The parts of the answer; iterate once."""


class Answer:
    """One answer to one request, computed while its `deltas` are iterated.

    `timing` is complete when they end, also by an exception. Raises ContextError, TemplateError, CapabilityError,
    SchemaError and OptionError, before anything is computed.
    """

    def __init__(self, llm: Llama, request: GenerationRequest) -> None:
        self.llm = llm
        self.request = request
        self.timing = Timing()
        llm.check_generates()
        self._prompt = read_prompt(llm, llm.vocabulary, request)
        self.timing.cut_messages, self.timing.cut_tokens = self._prompt.cut_messages, self._prompt.cut_tokens
        self._n_logprobs = _checked_n_logprobs(request.n_logprobs)
        constraint = constraint_for(request, self._prompt.template, self._prompt.end, self._prompt.continuation)
        self._sampler = Sampler(llm, request.sampling, self._prompt.text_tokens, constraint)
        self._cancellation = Cancellation(llm)
        self._n_clean: int | None = None  # tokens at the beginning of a shifted context, as if nothing had shifted

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
        tokens, timing = self._prompt.tokens, self.timing
        self._cancellation.check()
        # Reused tokens were evaluated in batches of other sizes, which changes the last bits of their K and V.
        timing.cached_tokens = reuse_prefix(self.llm, self._prompt, enabled=self.request.sampling.seed is None)
        prefill(self.llm, self._prompt, timing.cached_tokens, self._cancellation, on_progress)
        timing.prompt_tokens = len(tokens) - timing.cached_tokens

    def _decode(self, start: float) -> Generator[Delta, None, None]:
        """Deltas until the model ends the answer, a stop string or the token limit is reached, or it is cancelled."""
        timing, is_end = self.timing, self.llm.vocabulary.is_end
        transcript = new_transcript(self.request, self._prompt, self.llm.vocabulary)
        generated, first_stats = list[int](), None
        shifts = self.request.shift and self.llm.can_shift and self._prompt.images is None
        limit = self._token_limit(shifts=shifts)
        try:
            for token in decode(self.llm, self._sampler, self._cancellation, self._shift if shifts else None):
                if first_stats is None:
                    timing.prompt_s, first_stats = time.perf_counter() - start, self.llm.stats()
                timing.answer_tokens += 1
                if is_end(token):
                    timing.finish = "stop"
                    break
                generated.append(token)
                delta = transcript.feed(token, self._logprob(token))
                if delta is not None:
                    if delta.thinking:
                        timing.thinking_tokens = timing.answer_tokens
                    yield delta
                if transcript.stopped or timing.answer_tokens >= limit:
                    timing.finish = "stop" if transcript.stopped else "length"
                    break
            else:
                timing.finish = "stop"
        except GenerationCancelled:
            pass  # text that was held back still follows
        finally:
            timing.stop_string = transcript.stop_string
            if self._n_clean is not None:
                self.llm.truncate(self._n_clean)
            timing.answer_stats = self.llm.stats() - (first_stats or self.llm.stats())
            if self.request.return_context:
                timing.context = (*self._prompt.text_tokens, *generated)
        if delta := transcript.end():
            yield delta

    def _shift(self) -> None:
        """Makes room in the full context. What stays was computed with what goes: only the first tokens are reused."""
        n_keep = self.request.sampling.num_keep
        n_first = len(self._prompt.tokens) if n_keep < 0 else n_keep + len(self.llm.vocabulary.bos_tokens)
        self._n_clean = shift_context(self.llm, n_first)
        self.timing.n_shifts += 1

    def _token_limit(self, *, shifts: bool) -> int:
        n_ctx = self.llm.n_ctx()
        most = MAX_CONTEXTS * n_ctx if shifts else n_ctx - len(self._prompt.tokens)
        limit = self.request.sampling.max_tokens
        return min(limit, most) if limit is not None and limit > 0 else most

    def _logprob(self, token: int) -> TokenLogprob | None:
        if self._n_logprobs is None:
            return None
        return logprob_of(token, self.llm, self._n_logprobs)


def _checked_n_logprobs(n_logprobs: int | None) -> int | None:
    if n_logprobs is not None and not 0 <= n_logprobs <= MAX_TOP_LOGPROBS:
        raise OptionError(f"n_logprobs is a number from 0 to {MAX_TOP_LOGPROBS}, but is {n_logprobs}.")
    return n_logprobs


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
