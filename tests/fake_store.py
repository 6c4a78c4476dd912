"""A controller on a store that only takes notes, and what it is fed: gates, a policy, a predictor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from moegguf.controller.controller import ActingOptions, Controller
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies.base import LRU, AnyPolicy
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, Phase, RoutingEvent

SHAPE = MoeShape(n_layer=4, n_expert=4, n_expert_used=2, layers=(1, 2, 3), expert_bytes=100)
AMPLE = PrefetchOptions(window=2, budget_bytes=10_000, watchdog=False)


class Notes:
    """A store's actions, noted with their order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, Any]] = []
        self.clock_ns = 0
        self.there = np.zeros(SHAPE.table, np.uint8)

    def set_scores(self, scores: Float32s | None) -> None:
        self.done.append(("scores", None if scores is None else float(np.asarray(scores)[1, 0])))

    def set_policy(self, name: str, **parameters: Any) -> None:
        self.done.append(("policy", name))

    def set_forecast(self, probabilities: Float32s | None, known: Sequence[int] = ()) -> None:
        self.done.append(("forecast", list(known)))

    def prefetch(self, il: Any, experts: Any) -> None:
        self.done.append(("prefetch", list(zip(il.tolist(), experts.tolist(), strict=True))))

    def residency(self) -> np.ndarray[Any, Any]:
        return self.there

    def counters(self) -> dict[str, int]:
        return {}

    def named(self, name: str) -> list[Any]:
        return [what for kind, what in self.done if kind == name]


class Counting:
    """A policy whose scores count its calls."""

    name = "counting"

    def __init__(self, notes: Notes | None = None) -> None:
        self.calls = 0
        self.seen: list[tuple[int, list[int]]] = []
        self.notes = notes

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        self.calls += 1
        self.seen.append((history.il, forecast.known()))
        if self.notes is not None:
            self.notes.done.append(("policy", history.il))
        return np.full(SHAPE.table, self.calls, np.float32)


class Saying(Predictor):
    """Answers `answer(il)` for every layer ahead, and notes what it heard."""

    name: ClassVar[str] = "saying"

    def __init__(self, answer: Callable[[int], Any], notes: Notes | None = None) -> None:
        super().__init__(SHAPE, reach=3)
        self.answer, self.notes = answer, notes or Notes()

    def announce(self, announcement: Announcement) -> None:
        self.notes.done.append(("announce", announcement.sequence))

    def observe(self, event: RoutingEvent) -> None:
        self.notes.done.append(("observe", event.il))

    def predict(self, il: int, distance: int) -> Float32s | None:
        self.notes.done.append(("predict", (il, distance)))
        return self.answer(il)


def first_two(il: int) -> Float32s:
    return np.array([0.9, 0.8, 0, 0], np.float32)


def controller(
    policy: AnyPolicy | None = None, predictor: Predictor | None = None, notes: Notes | None = None, **options: Any
) -> Controller:
    made = ActingOptions(**options)
    return Controller(SHAPE, policy or LRU, predictor or NoPrediction(SHAPE), notes or Notes(), made)


def announcement(phase: Phase = Phase.DECODE, sequence: int = 0, n_tokens: int = 1) -> Announcement:
    return Announcement(0, sequence, phase, np.zeros(n_tokens, np.int32))


def routed(il: int, *experts: int, phase: Phase = Phase.DECODE, pass_: int = 0, sequence: int = 0) -> RoutingEvent:
    return RoutingEvent(pass_, 0, 0, sequence, phase, 0, il, np.array([experts or (0, 1)], np.int32))


def run_pass(of: Controller, phase: Phase = Phase.DECODE, pass_: int = 0, sequence: int = 0) -> None:
    of.announce(announcement(phase, sequence))
    for il in SHAPE.layers:
        of.observe(routed(il, phase=phase, pass_=pass_, sequence=sequence))


def run_passes(of: Controller, passes: Iterable[int]) -> None:
    """Decode passes with these numbers."""
    for pass_ in passes:
        run_pass(of, pass_=pass_)
