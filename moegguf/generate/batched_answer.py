"""A request among others on one context, from its submission to its end, and the slot that it computes in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing
from moegguf.generate.sequence import SequenceState

if TYPE_CHECKING:
    from moegguf.engine.projector import ImageSpan
    from moegguf.engine.stats import Stats

_tickets = itertools.count(1)


class AnswerEvents(Protocol):
    """Receives an answer while it is computed, on the loop's thread. What it raises ends the loop."""

    def on_progress(self, progress: PromptProgress) -> object:
        """A part of the prompt was evaluated."""

    def on_delta(self, delta: Delta) -> object:
        """A part of the answer."""

    def on_end(self, timing: Timing, error: Exception | None) -> object:
        """The answer has ended, with `error` or without. Called once, last."""


@dataclass(eq=False)
class Slot:
    """A sequence of the context: the tokens that its KV cache holds, and the answer that uses it, if any."""

    sequence: int
    tokens: list[int] = field(default_factory=list)
    answer: BatchedAnswer | None = None
    n_used: int = 0  # the step in which it was last used
    n_clean: int | None = None  # tokens at the beginning of a shifted context, as if nothing had shifted


class Task:
    """Work that needs the model for itself. `ticket`: its place in the order of arrival; `fail` is called instead of
    `run` where that does not begin any more."""

    def __init__(
        self, run: Callable[[], object], cancel: Callable[[], object], fail: Callable[[Exception], object]
    ) -> None:
        self.ticket = next(_tickets)
        self.cancelled = False
        self.run = run
        self.stop = cancel
        self.fail = fail


class BatchedAnswer:
    """A request in a loop, from its submission to its end. Its `timing` is complete then. `state`: the request, where
    it was read already.

    For a `Schedule`: `ticket` (order of arrival), `context` (tokens that the KV cache has to hold before the next one
    is sampled), `n_evaluated` (of these, those that it holds) and `number` (of the request in routing events).
    """

    def __init__(self, request: GenerationRequest, events: AnswerEvents, state: SequenceState | None = None) -> None:
        self.ticket = next(_tickets)
        self.request = request
        self.events = events
        self.timing = Timing(finish="cancelled")
        self.context: list[int] = []
        self.number = -1
        self.cancelled = False
        self.state = state
        self.error: Exception | None = None  # of reading the request
        self.slot: Slot | None = None
        self.has_begun = False  # since it got its slot
        self._start_s = 0.0
        self._before: Stats | None = None
        self._first: Stats | None = None

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
        return self.n_pending == 1 and bool(self.sequence.generated)

    @property
    def sequence(self) -> SequenceState:
        """The request, as it was read. It must have been."""
        assert self.state is not None
        return self.state

    @property
    def image(self) -> ImageSpan | None:
        """The next image of the prompt that is to be evaluated."""
        images = self.sequence.prompt.images
        return next(iter(images.spans_from(self.n_evaluated)), None) if images is not None else None

    @property
    def alone(self) -> bool:
        """Whether it has to be computed without others."""
        return self.state is None or self.state.is_exact_alone or self.state.prompt.images is not None

    def begin(self, number: int, stats: Stats) -> None:
        """It is computed from now on."""
        self.number, self.context = number, list(self.sequence.prompt.tokens)
        self.timing = self.sequence.timing
        self.timing.finish = "cancelled"
        self._start_s, self._before = time.perf_counter(), stats

    def note_token(self, stats: Callable[[], Stats]) -> None:
        """A token was sampled."""
        if self._first is None:
            self.timing.prompt_s, self._first = time.perf_counter() - self._start_s, stats()

    def note_end(self, stats: Stats) -> None:
        """Completes the timing of an answer that has begun."""
        timing = self.timing
        self.sequence.note_end()
        timing.total_s = time.perf_counter() - self._start_s
        timing.prompt_s = timing.prompt_s or timing.total_s
        timing.answer_s = timing.total_s - timing.prompt_s
        timing.stats = stats - (self._before or stats)
        timing.answer_stats = stats - (self._first or stats)

    def progress(self) -> PromptProgress:
        """How much of the prompt is evaluated."""
        n_tokens = len(self.sequence.prompt.tokens)
        seconds = time.perf_counter() - self._start_s
        return PromptProgress(n_tokens, self.timing.cached_tokens, min(self.n_evaluated, n_tokens), seconds)
