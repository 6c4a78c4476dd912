"""A store that records a controller's actions, with a policy and a predictor, and
functions that run passes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast

import numpy as np
from traces import routed

from moegguf.controller.controller import ActingOptions, Controller
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies import LRU, AnyPolicy
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, Phase, RoutingEvent
from moegguf.native.predictor import NativeForecast, NativePredictor
from moegguf.native.store import Store

SHAPE = MoeShape(
    n_layer=4, n_expert=4, n_expert_used=2, layers=(1, 2, 3), expert_bytes=100
)
AMPLE = PrefetchOptions(window=2, budget_bytes=10_000, watchdog=False)


class RecordingStore:
    """A store that records the controller's calls in `actions`, in order."""

    def __init__(self) -> None:
        self.actions: list[tuple[str, Any]] = []
        self.clock_ns = 0
        self.resident = np.zeros(SHAPE.table, np.uint8)

    def set_scores(self, scores: Float32s | None) -> None:
        self.actions.append(
            ("scores", None if scores is None else float(np.asarray(scores)[1, 0]))
        )

    def set_policy(self, name: str) -> None:
        self.actions.append(("policy", name))

    def set_forecast(
        self, probabilities: Float32s | None, known: Sequence[int] = ()
    ) -> None:
        self.actions.append(("forecast", list(known)))

    def prefetch(self, il: Any, experts: Any) -> None:
        self.actions.append(("prefetch", list(zip(il, experts, strict=True))))

    def set_predictor(
        self, predictor: NativePredictor | None, forecast: NativeForecast
    ) -> None:
        self.actions.append(("predictor", predictor and predictor.name))

    def act_on_forecasts(self, on: bool) -> None:
        self.actions.append(("act", on))

    def residency(self) -> np.ndarray[Any, Any]:
        return self.resident

    def counters(self) -> dict[str, int]:
        return {}

    def named(self, name: str) -> list[Any]:
        return [what for kind, what in self.actions if kind == name]


class CountingPolicy:
    """A policy whose scores all equal the number of calls to it so far."""

    name = "counting"

    def __init__(self, store: RecordingStore | None = None) -> None:
        self.calls = 0
        self.seen: list[tuple[int, list[int]]] = []
        self.store = store

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        self.calls += 1
        self.seen.append((history.il, forecast.known()))
        if self.store is not None:
            self.store.actions.append(("policy", history.il))
        return np.full(SHAPE.table, self.calls, np.float32)


class ScriptedPredictor(Predictor):
    """Predicts `answer(il)` for every layer, and records its calls in the store's
    actions."""

    name: ClassVar[str] = "scripted"

    def __init__(
        self,
        answer: Callable[[int], Any],
        store: RecordingStore | None = None,
        shape: MoeShape = SHAPE,
        reach: int = 3,
    ) -> None:
        super().__init__(shape, reach)
        self.answer, self.store = answer, store or RecordingStore()

    def announce(self, announcement: Announcement) -> None:
        self.store.actions.append(("announce", announcement.sequence))

    def observe(self, event: RoutingEvent) -> None:
        self.store.actions.append(("observe", event.il))

    def predict(self, il: int, distance: int) -> Float32s | None:
        self.store.actions.append(("predict", (il, distance)))
        return self.answer(il)


def first_two(il: int) -> Float32s:
    return np.array([0.9, 0.8, 0, 0], np.float32)


def make_controller(
    policy: AnyPolicy | None = None,
    predictor: Predictor | None = None,
    store: RecordingStore | None = None,
    **options: Any,
) -> Controller:
    acted_on = cast(Store, store or RecordingStore())
    return Controller(
        SHAPE,
        policy or LRU,
        predictor or NoPrediction(SHAPE),
        acted_on,
        ActingOptions(**options),
    )


def announcement(
    phase: Phase = Phase.DECODE, sequence: int = 0, n_tokens: int = 1
) -> Announcement:
    return Announcement(sequence, phase, np.zeros(n_tokens, np.int32))


def run_pass(
    controller: Controller,
    phase: Phase = Phase.DECODE,
    pass_: int = 0,
    sequence: int = 0,
) -> None:
    controller.announce(announcement(phase, sequence))
    for il in SHAPE.layers:
        controller.observe(
            routed(il, 0, 1, phase=phase, pass_=pass_, sequence=sequence)
        )


def run_passes(controller: Controller, passes: Iterable[int]) -> None:
    """Runs one decode pass for each pass number in `passes`."""
    for pass_ in passes:
        run_pass(controller, pass_=pass_)
