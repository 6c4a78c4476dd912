"""One request in a loop, from its submission to its end: prompt, sampler, constraint, text, stops, limits, and the slot
that it computes in; all but the evaluation of tokens, which is `batching`'s."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from moegguf.errors import OptionError
from moegguf.generate.constraint import constraint_for
from moegguf.generate.parsing import new_transcript
from moegguf.generate.prompt import Prompt, read_prompt
from moegguf.generate.request import MAX_TOP_LOGPROBS, Delta, GenerationRequest, PromptProgress, Timing, TokenLogprob
from moegguf.generate.sampler import Sampler, logprob_of
from moegguf.generate.thinking_budget import thinking_budget_of

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.engine.projector import ImageSpan
    from moegguf.engine.stats import Stats


MAX_CONTEXTS = 10  # of tokens in an answer without a limit, when the context shifts; Ollama's number

_tickets = itertools.count(1)


class AnswerEvents(Protocol):
    """Receives an answer while it is computed, on the loop's thread. What it raises ends the loop."""

    def on_progress(self, progress: PromptProgress) -> object:
        """A part of the prompt was evaluated."""
        return None

    def on_delta(self, delta: Delta) -> object:
        """A part of the answer."""

    def on_end(self, timing: Timing, error: Exception | None) -> object:
        """The answer has ended, with `error` or without. Called once, last."""


@dataclass(eq=False)
class Slot:
    """A sequence of the context: the tokens that its KV cache holds, their owner, and the answer that uses it, if
    any."""

    sequence: int
    tokens: list[int] = field(default_factory=list)
    owner: str = ""
    answer: BatchedAnswer | None = None
    n_used: int = 0  # the step in which it was last used
    n_clean: int | None = None  # tokens at the beginning of a shifted context, as if nothing had shifted


@dataclass(eq=False)
class Task:
    """Work that needs the model for itself: `run`, which `stop` ends. `fail` is called instead where it does not begin
    any more. `asker`: the client that it is for. `ticket`: its place in the order of arrival."""

    run: Callable[[], object]
    stop: Callable[[], object]
    fail: Callable[[Exception], object]
    asker: str = ""
    ticket: int = field(default_factory=lambda: next(_tickets))
    cancelled: bool = False


class BatchedAnswer:
    """A request in a loop. Its `timing` is complete at the end.

    For a `Schedule`: `ticket` (order of arrival), `context` (tokens that the KV cache has to hold before the next one
    is sampled), `n_evaluated` (of these, those that it holds) and `number` (of the request in routing events).
    `generated`: the tokens of the answer, without an end token; `draft`: tokens that the next pass evaluates behind
    them. `prompt`, `sampler`, `shifts`, `n_ctx` (tokens of the context at most) and `limit` (of the answer at most) are
    there once it was read.
    """

    prompt: Prompt
    sampler: Sampler
    shifts: bool
    n_ctx: int
    limit: int

    def __init__(self, request: GenerationRequest, events: AnswerEvents) -> None:
        self.ticket = next(_tickets)
        self.request = request
        self.events = events
        self.timing = Timing(finish="cancelled")
        self.context: list[int] = []
        self.generated: list[int] = []
        self.draft: tuple[int, ...] = ()
        self.number = -1
        self.cancelled = False
        self.error: Exception | None = None  # of reading the request
        self.slot: Slot | None = None
        self.has_begun = False  # since it got its slot
        self.ended = False  # its last token was sampled
        self._llm: Llama
        self._prompt_logprobs: list[TokenLogprob] = []  # until they are sent
        self._start_s = 0.0
        self._before: Stats | None = None
        self._first: Stats | None = None

    def read(self, llm: Llama) -> None:
        """Reads the request; `error` is then what is wrong with it: ContextError, TemplateError, CapabilityError,
        SchemaError, OptionError."""
        request, self._llm = self.request, llm
        try:
            llm.context.check_generates()
            self.prompt = prompt = read_prompt(llm, request)
            self.timing.cut_messages, self.timing.cut_tokens = prompt.cut_messages, prompt.cut_tokens
            if (n := request.n_logprobs) is not None and not 0 <= n <= MAX_TOP_LOGPROBS:
                raise OptionError(f"n_logprobs is a number from 0 to {MAX_TOP_LOGPROBS}, but is {n}.")
            token_of = llm.vocabulary.token
            constraint = constraint_for(request, prompt.template, prompt.end, prompt.continuation, token_of)
            budget = thinking_budget_of(llm, request, prompt)
            self.sampler = Sampler(llm, request.sampling, prompt.text_tokens, constraint, budget)
            stops = (*request.sampling.stop, *prompt.stops)
            stopped = replace(request, sampling=replace(request.sampling, stop=stops))
            self._transcript = new_transcript(stopped, prompt, llm.vocabulary)
        except Exception as error:
            self.error = error
            return
        self.shifts = request.shift and llm.context.can_shift and prompt.images is None
        self.n_ctx = request.sampling.context_within(llm.n_ctx())
        most = MAX_CONTEXTS * self.n_ctx if self.shifts else self.n_ctx - len(prompt.tokens)
        asked = request.sampling.max_tokens
        self.limit = 0 if request.prompt_only else min(asked, most) if asked is not None and asked > 0 else most

    @property
    def reuses_prefix(self) -> bool:
        """Whether tokens of earlier requests may be reused: they were evaluated beside other tokens, which changes the
        last bits of their K and V where the model is not batch-invariant. Prompt logprobs need all of its logits."""
        sampling = self.request.sampling
        is_same = self._llm.batch_invariant or (sampling.seed is None and not sampling.exact)
        return is_same and not self.request.prompt_logprobs

    @property
    def alone(self) -> bool:
        """Whether it has to be computed without others: one with images, and an `exact` one where others in its passes
        may change bits. That is so of a context that becomes full, too: among others it is evaluated again, which
        rounds otherwise than moving its cells."""
        if self.prompt.images is not None:
            return True
        may_shift = self.shifts and len(self.prompt.tokens) + self.limit > self.n_ctx
        return self.request.sampling.exact and (may_shift or not self._llm.batch_invariant)

    @property
    def held(self) -> Slot:
        """Its slot. It must have one."""
        assert self.slot is not None
        return self.slot

    @property
    def n_evaluated(self) -> int:
        """Tokens of `context` that the KV cache holds."""
        return len(self.slot.tokens) if self.slot is not None else 0

    @property
    def n_pending(self) -> int:
        """Tokens of `context` to evaluate before the next one is sampled."""
        return len(self.context) - self.n_evaluated

    @property
    def decodes(self) -> bool:
        """Whether only the token that was sampled last is to be evaluated."""
        return self.n_pending == 1 and bool(self.generated)

    @property
    def image(self) -> ImageSpan | None:
        """The next image of the prompt that is to be evaluated."""
        spans = self.prompt.images.spans if self.prompt.images is not None else ()
        return next((span for span in spans if span.begin >= self.n_evaluated), None)

    def begin(self, number: int, stats: Stats) -> None:
        """It is computed from now on."""
        self.number, self.context = number, list(self.prompt.tokens)
        self._start_s, self._before = time.perf_counter(), stats

    def progress(self) -> PromptProgress:
        """How much of the prompt is evaluated."""
        n_tokens = len(self.prompt.tokens)
        seconds = time.perf_counter() - self._start_s
        return PromptProgress(n_tokens, self.timing.cached_tokens, min(self.n_evaluated, n_tokens), seconds)

    def note_prompt(self, n_done: int, n_tokens: int, row: int) -> None:
        """Keeps logprobs of `n_tokens` tokens of the prompt after the first `n_done`. `row`: of the last one."""
        tokens, known = self.prompt.tokens, self._prompt_logprobs
        vocabulary, has_own_begin = self._llm.vocabulary, self.request.begins_with_token or len(tokens) == 1
        n_bos = 0 if has_own_begin else len(vocabulary.bos_tokens)
        if not known:
            known.append(TokenLogprob(tokens[n_bos], vocabulary.piece(tokens[n_bos], special=True), 0.0))
        n_top = self.request.n_logprobs or 0
        for n in range(max(n_done + 1, n_bos + len(known)), min(n_done + n_tokens + 1, len(tokens))):
            known.append(logprob_of(tokens[n], self._llm, n_top, row - n_done - n_tokens + n))

    def sample(self, row: int, stats: Callable[[], Stats]) -> Exception | None:
        """Takes the next token by that row of logits and passes on what it adds to the answer, which may be the
        end; returns what was wrong. stats: the model's now."""
        if self._prompt_logprobs:
            self.events.on_delta(Delta(prompt=tuple(self._prompt_logprobs)))
            self._prompt_logprobs = []
        delta = None
        try:
            token = self.sampler.sample(row) if self.limit else None
            if self._first is None:
                self.timing.prompt_s, self._first = time.perf_counter() - self._start_s, stats()
            if token is None:
                self._end("stop" if self.limit else "length")
            else:
                delta = self._accept(token, row)
        except Exception as error:
            return error
        if delta is not None:
            self.events.on_delta(delta)
        if token is not None and not self.ended:
            self.context.append(token)
        return None

    def _accept(self, token: int, row: int) -> Delta | None:
        timing, transcript, n_top = self.timing, self._transcript, self.request.n_logprobs
        timing.answer_tokens += 1
        if self._llm.vocabulary.is_end(token):
            self._end("stop")
            return None
        self.generated.append(token)
        delta = transcript.feed(token, None if n_top is None else logprob_of(token, self._llm, n_top, row))
        if delta is not None and delta.thinking:
            timing.thinking_tokens = timing.answer_tokens
        if transcript.stop_string or timing.answer_tokens >= self.limit:
            self._end("stop" if transcript.stop_string else "length")
        return delta

    def _end(self, reason: str) -> None:
        self.ended, self.timing.finish = True, reason

    def complete(self, stats: Stats, error: Exception | None) -> Exception | None:
        """Passes on the text that was held back, and completes the timing of an answer that has begun; returns `error`,
        or the error of reading the text."""
        try:
            delta = self._transcript.end(cut=self.timing.finish == "length") if error is None else None
        except Exception as found:
            delta, error = None, found
        if delta is not None:
            self.events.on_delta(delta)
        timing = self.timing
        stop = self._transcript.stop_string
        timing.stop_string = stop if stop in self.request.sampling.stop else ""
        if self.request.return_context:
            timing.context = (*self.prompt.text_tokens, *self.generated)
        timing.total_s = time.perf_counter() - self._start_s
        timing.prompt_s = timing.prompt_s or timing.total_s
        timing.answer_s = timing.total_s - timing.prompt_s
        timing.stats = stats - (self._before or stats)
        timing.answer_stats = stats - (self._first or stats)
        return error
