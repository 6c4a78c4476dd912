"""A request in the batch loop, from its submission to its end: prompt, sampler,
constraint, text, stops and limits.

`batching` evaluates the tokens of a sequence, and `kv_sequences` assigns its place in
the KV cache.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from moegguf.engine.drafts import N_MAX
from moegguf.errors import OptionError
from moegguf.generate.constraint import constraint_for
from moegguf.generate.parsing import new_transcript
from moegguf.generate.prompt import Prompt, read_prompt
from moegguf.generate.request import (
    MAX_TOP_LOGPROBS,
    AnswerSummary,
    Delta,
    PromptProgress,
    Request,
    TokenLogprob,
)
from moegguf.generate.sampler import Sampler, logprob_of
from moegguf.generate.thinking_budget import thinking_budget_of

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.engine.projector import ImageSpan
    from moegguf.engine.stats import Stats


# If the context can shift, an answer is at most this many times as long as the context,
# as in Ollama.
MAX_CONTEXTS = 10

MAX_PERIOD = 4  # maximum length, in tokens, of a cycle that is treated as repetition
# A cycle may repeat this many times as often as a single token, as it does in tables of
# numbers.
CYCLE_PATIENCE = 8
# Separates the request's owner from the adapter's scale in `Sequence.owner`.
AT_SCALE = " adapter at "

_tickets = itertools.count(1)


class AnswerEvents(Protocol):
    """Callbacks for one answer, which the batch loop's thread calls. An exception from
    a callback stops the whole loop. After the loop has been closed, another thread may
    call `on_end`."""

    def on_progress(self, progress: PromptProgress) -> object:
        """Called after each pass that evaluated a part of the prompt, and before the
        first pass of a prompt that is longer than a batch."""
        return None

    def on_delta(self, delta: Delta) -> object:
        """Called with each part of the answer."""

    def on_end(self, summary: AnswerSummary, error: Exception | None) -> object:
        """Called once, after all other callbacks, when the answer has ended. `error` is
        None if there was no error."""


@dataclass(eq=False)
class KvSequence:
    """A place in the context: one sequence id of llama.cpp, and the tokens that the KV
    cache contains for it."""

    seq_id: int
    tokens: list[int] = field(default_factory=list)
    owner: str = ""  # owner of these tokens, as `Sequence.owner` returns it
    # The sequence that uses the place; None if the place is free.
    sequence: Sequence | None = None
    n_used: int = 0  # number of the last step that used the place
    # number of leading tokens whose values do not depend on tokens that a shift has
    # dropped; None: all tokens
    n_clean: int | None = None


@dataclass(eq=False)
class Task:
    """Work that needs the whole model: the batch loop runs it while no answer is being
    generated."""

    run: Callable[[], object]
    # Ends `run` early; called by another thread, or by the loop's thread before `run`.
    stop: Callable[[], object]
    # Called instead of `run` if the task is cancelled or the loop ends first.
    fail: Callable[[Exception], object]
    client_key: str = ""  # key of the client that started the task
    # True if the task computes nothing and leaves the tokens in the context.
    keeps_context: bool = False
    ticket: int = field(default_factory=lambda: next(_tickets))  # order of arrival
    cancelled: bool = False


class Sequence:
    """A request while the batch loop processes it. The `summary` is complete when the
    answer has ended.

    A `Schedule` may read `ticket`, `context`, `n_evaluated`, `number`, `decodes` and
    `generated`. `prompt`, `sampler`, `shifts`, `n_ctx` and `limit` exist after `read`
    if `error` is None.
    """

    prompt: Prompt
    sampler: Sampler
    shifts: bool  # True if the older half of a full context is dropped
    n_ctx: int  # tokens of the context that this request may use
    limit: int  # maximum number of tokens of the answer; 0: no token is sampled

    def __init__(self, request: Request, events: AnswerEvents) -> None:
        self.ticket = next(_tickets)  # order of arrival
        self.request = request
        self.events = events
        self.summary = AnswerSummary(finish="cancelled")
        # Tokens of prompt and answer so far; a shift removes some of them.
        self.context: list[int] = []
        self.generated: list[int] = []  # tokens of the answer, without an end token
        self.n_next = 0  # tokens of `context` that the next pass evaluates
        # Drafted tokens that the next pass evaluates after the tokens of `context`.
        self.draft: tuple[int, ...] = ()
        self.number = -1  # number of the request in routing events; -1: not begun
        self.cancelled = False
        self.error: Exception | None = None  # error of `read`
        self.kv: KvSequence | None = None
        # False until the known prefix of the prompt has been copied to the sequence's
        # place.
        self.has_begun = False
        self.ended = False  # True after the last token was sampled
        self._llm: Llama
        self._prompt_logprobs: list[TokenLogprob] = []  # not sent yet
        # Texts of the most recent tokens, the newest first.
        self._last_texts = deque[bytes](maxlen=MAX_PERIOD)
        # {n: number of most recent tokens that each equal the token n places before}.
        self._n_repeats = Counter[int]()
        self._start_s = 0.0
        # The model's counters when the sequence began.
        self._before: Stats | None = None
        # The model's counters at the first sampled token.
        self._first: Stats | None = None

    def read(self, llm: Llama) -> None:
        """Creates the prompt, the sampler and the limits from the request. Sets `error`
        if the request cannot be answered, usually to a ContextError, TemplateError,
        CapabilityError, SchemaError or OptionError."""
        self._llm = llm
        request = self.request
        try:
            llm.context.check_generates()
            if request.lora_scale is not None:
                llm.context.check_adapter()
            self.prompt = prompt = read_prompt(llm, request)
            if (n := request.n_logprobs) is not None and not 0 <= n <= MAX_TOP_LOGPROBS:
                raise OptionError(
                    f"n_logprobs must be a number from 0 to {MAX_TOP_LOGPROBS}, but is {n}."
                )
            token_of = llm.vocabulary.token
            constraint = constraint_for(
                request, prompt.template, prompt.end, prompt.continuation, token_of
            )
            budget = thinking_budget_of(llm, request, prompt)
            self.sampler = Sampler(
                llm, request.sampling, prompt.text_tokens, constraint, budget
            )
            self._transcript = new_transcript(request, prompt, llm.vocabulary)
        except Exception as error:
            self.error = error
            return
        self.summary.cut_messages = prompt.cut_messages
        self.summary.cut_tokens = prompt.cut_tokens
        self.shifts = request.shift and prompt.images is None
        self.n_ctx = request.sampling.context_within(llm.n_ctx())
        self.limit = (
            MAX_CONTEXTS * self.n_ctx
            if self.shifts
            else self.n_ctx - len(prompt.tokens)
        )
        if request.prompt_only:
            self.limit = 0
        elif (wanted := request.sampling.max_tokens) is not None and wanted > 0:
            self.limit = min(self.limit, wanted)

    def fail(self, error: Exception) -> None:
        """Ends an answer with an error before it has begun."""
        self.events.on_end(self.summary, error)

    @property
    def owner(self) -> str:
        """The name of the owner of the computed tokens: the request's owner, and the
        scale of the model's adapter if it differs from the loaded one. Only requests
        with the same name may reuse the tokens."""
        owner, scale = self.request.owner, self._scale
        is_loaded = scale == self._llm.lora_scale
        return owner if is_loaded else f"{owner}{AT_SCALE}{scale}"

    @property
    def _scale(self) -> float:
        """The scale of the model's adapter for this request."""
        scale = self.request.lora_scale
        return self._llm.lora_scale if scale is None else scale

    def computes_with(self, other: Sequence) -> bool:
        """Returns True if both sequences may be in one pass: neither has to be
        processed alone, and both use the same scale of the model's adapter."""
        return self._scale == other._scale and not self.alone and not other.alone

    @property
    def reuses_prefix(self) -> bool:
        """True if the sequence may reuse tokens of earlier requests. False with prompt
        logprobs, which need the logits of all tokens. If the model is not
        batch-invariant, also False with a seed or `exact`. The last bits of K and V
        then depend on the other tokens of the passes that computed them."""
        sampling = self.request.sampling
        is_same = self._llm.batch_invariant or (
            sampling.seed is None and not sampling.exact
        )
        return is_same and not self.request.prompt_logprobs

    @property
    def alone(self) -> bool:
        """True if the sequence must be processed alone: if it has images, or if it has
        `exact` and other sequences could change bits of the answer. This is possible if
        the model is not batch-invariant or if a shift may move cells. A shift moves
        cells if the model allows this and the sequence is processed alone. In a context
        with several places, a shift otherwise re-evaluates tokens, which rounds
        differently."""
        if self.prompt.images is not None:
            return True
        may_shift = self.shifts and len(self.prompt.tokens) + self.limit > self.n_ctx
        return self.request.sampling.exact and (
            (may_shift and self._llm.context.can_shift) or not self._llm.batch_invariant
        )

    @property
    def place(self) -> KvSequence:
        """The place of the sequence in the context. The sequence must have a place."""
        assert self.kv is not None
        return self.kv

    @property
    def n_evaluated(self) -> int:
        """The number of tokens of `context` that are in the KV cache, or 0 if the
        sequence has no place."""
        return len(self.kv.tokens) if self.kv is not None else 0

    @property
    def n_pending(self) -> int:
        """The number of tokens of `context` that must be evaluated before the next
        token is sampled."""
        return len(self.context) - self.n_evaluated

    @property
    def decodes(self) -> bool:
        """True if only the last sampled token still has to be evaluated."""
        return self.n_pending == 1 and bool(self.generated)

    @property
    def repeats(self) -> bool:
        """True if tokens of a draft are evaluated again, because the state has returned
        to the beginning of the draft. Also True if few enough of an answer's tokens
        have to be evaluated again for another reason."""
        return 1 < self.n_pending <= N_MAX + 1 and bool(self.generated)

    @property
    def image(self) -> ImageSpan | None:
        """The next image of the prompt that has not been evaluated yet, or None if
        there is none."""
        spans = self.prompt.images.spans if self.prompt.images is not None else ()
        return next((span for span in spans if span.begin >= self.n_evaluated), None)

    def begin(self, number: int, stats: Stats) -> None:
        """Starts processing the sequence. `number`: its number in routing events.
        `stats`: the model's current counters."""
        self.number, self.context = number, list(self.prompt.tokens)
        self._start_s, self._before = time.perf_counter(), stats

    def progress(self) -> PromptProgress:
        """Returns the progress of the prompt's evaluation."""
        n_tokens = len(self.prompt.tokens)
        seconds = time.perf_counter() - self._start_s
        return PromptProgress(
            n_tokens,
            self.summary.cached_tokens,
            min(self.n_evaluated, n_tokens),
            seconds,
        )

    def note_prompt(self, n_done: int, n_tokens: int, row: int) -> None:
        """Stores the logprobs of prompt tokens from a pass that evaluated `n_tokens` of
        them after the first `n_done`. The logits of each evaluated token determine the
        logprob of the next one. `row`: row of the logits for the last evaluated
        token."""
        tokens, known = self.prompt.tokens, self._prompt_logprobs
        vocabulary, has_own_begin = (
            self._llm.vocabulary,
            self.request.begins_with_token or len(tokens) == 1,
        )
        n_bos = 0 if has_own_begin else len(vocabulary.bos_tokens)
        if not known:
            known.append(
                TokenLogprob(
                    tokens[n_bos], vocabulary.piece(tokens[n_bos], special=True), 0.0
                )
            )
        n_top = self.request.n_logprobs or 0
        for n in range(
            max(n_done + 1, n_bos + len(known)), min(n_done + n_tokens + 1, len(tokens))
        ):
            known.append(
                logprob_of(tokens[n], self._llm, n_top, row - n_done - n_tokens + n)
            )

    def sample(self, row: int, stats: Callable[[], Stats]) -> Exception | None:
        """Samples the next token from a row of the logits and sends the new part of the
        answer. The token may end the answer. If `limit` is 0, ends the answer instead.
        Returns the error, or None if there is none. `stats` returns the model's
        counters."""
        if self._prompt_logprobs:
            self.events.on_delta(Delta(prompt=tuple(self._prompt_logprobs)))
            self._prompt_logprobs = []
        delta = None
        try:
            token = self.sampler.sample(row) if self.limit else None
            if self._first is None:
                self.summary.prompt_s, self._first = (
                    time.perf_counter() - self._start_s,
                    stats(),
                )
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
        summary = self.summary
        transcript = self._transcript
        n_top = self.request.n_logprobs
        summary.answer_tokens += 1
        if self._llm.vocabulary.is_end(token):
            self._end("stop")
            return None
        self.generated.append(token)
        delta = transcript.feed(
            token, None if n_top is None else logprob_of(token, self._llm, n_top, row)
        )
        if delta is not None and delta.thinking:
            summary.thinking_tokens = summary.answer_tokens
        if self._count_repeats(token):
            self._end("length")
        if transcript.stop_string or summary.answer_tokens >= self.limit:
            self._end("stop" if transcript.stop_string else "length")
        return delta

    def _count_repeats(self, token: int) -> bool:
        """Counts how often the last tokens have repeated one token, or a short cycle of
        tokens. Returns True if the answer should end because of these repeats. A cycle
        may repeat for many more tokens than one token may. Leading and trailing
        whitespace of a token's text is ignored."""
        if not (limit := self.request.repeat_limit):
            return False
        text = self._llm.vocabulary.piece(token, special=True).strip()
        ended = False
        for period, before in enumerate(self._last_texts, 1):
            self._n_repeats[period] = (
                self._n_repeats[period] + 1 if text == before else 0
            )
            most = limit if period == 1 else limit * period * CYCLE_PATIENCE
            ended = ended or self._n_repeats[period] > most
        self._last_texts.appendleft(text)
        return ended

    def _end(self, reason: str) -> None:
        self.ended, self.summary.finish = True, reason

    def complete(self, stats: Stats, error: Exception | None) -> Exception | None:
        """Completes the summary. If `error` is None, also sends the text that was held
        back. Returns `error`, or the error from parsing this text, or None if there is
        neither."""
        try:
            delta = (
                self._transcript.end(cut=self.summary.finish == "length")
                if error is None
                else None
            )
        except Exception as found:
            delta, error = None, found
        if delta is not None:
            self.events.on_delta(delta)
        summary = self.summary
        stop = self._transcript.stop_string
        summary.stop_string = stop if stop in self.request.sampling.stop else ""
        if self.request.return_context:
            summary.context = (*self.prompt.text_tokens, *self.generated)
        summary.total_s = time.perf_counter() - self._start_s
        summary.prompt_s = summary.prompt_s or summary.total_s
        summary.answer_s = summary.total_s - summary.prompt_s
        summary.stats = stats - (self._before or stats)
        summary.answer_stats = stats - (self._first or stats)
        return error
