"""Which of the running sequences compute in a step. The loop (batching.py) asks before, and tells after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moegguf.generate.answer import BatchedAnswer


@dataclass(frozen=True)
class Step:
    """A step that was computed: the sequences that took part, their tokens together, and how long it took."""

    answers: tuple[BatchedAnswer, ...]
    n_tokens: int
    seconds: float


class Schedule(Protocol):
    """Chooses who computes. Both methods are called on the loop's thread, and must not take long."""

    def choose(self, running: Sequence[BatchedAnswer]) -> Sequence[BatchedAnswer]:
        """Those of `running` (never empty, oldest first) that compute in the next step, in the order in which prompts
        share the step's budget. Who is left out keeps its place in the KV cache. Where none is chosen, all compute."""

    def ran(self, step: Step) -> None:
        """A step was computed."""


class Fifo:
    """All of them, the oldest prompts first."""

    def choose(self, running: Sequence[BatchedAnswer]) -> Sequence[BatchedAnswer]:
        """All of `running`."""
        return running

    def ran(self, step: Step) -> None:
        """Nothing depends on it."""
