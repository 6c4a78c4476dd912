"""Policies and predictors that fail, return invalid values or take too long."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_store import (
    AMPLE,
    SHAPE,
    CountingPolicy,
    RecordingStore,
    ScriptedPredictor,
    announcement,
    first_two,
    make_controller,
    run_pass,
    run_passes,
)
from traces import routed

from moegguf.controller.controller import ActingOptions, build_controller
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies import LRU
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.watchdog import Watchdog, WatchdogOptions
from moegguf.errors import AllocationError
from moegguf.native.events import Float32s, Phase
from moegguf.native.predictor import NativeForecast, NativePredictor


class Bad(CountingPolicy):
    """A policy that does `act` at its third event."""

    name = "bad"

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        good = super().scores(history, forecast)
        return self.act() if self.calls == 3 else good


def raises() -> Any:
    raise ZeroDivisionError("mine")


BAD_ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raises, "raised ZeroDivisionError: mine"),
    "flat": (lambda: np.zeros(16, np.float32), r"the shape \(16,\), not \(4, 4\)"),
    "slow": (lambda: time.sleep(0.06), r"took 0\.\d s at one routing event"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_bad_policy_is_dropped_with_one_warning_and_lru_goes_on(kind: str) -> None:
    act, why = BAD_ANSWERS[kind]
    store, policy = RecordingStore(), Bad(act)
    controller = make_controller(policy, ScriptedPredictor(first_two), store, prefetch=AMPLE, slowest_s=0.05)
    with pytest.warns(UserWarning, match=f"the policy bad .*{why}.*; going on with LRU") as caught:
        run_passes(controller, range(3))
    assert len(caught) == 1
    assert policy.calls == 3
    assert store.named("scores") == [1.0, 2.0, None]
    assert controller.policy is None
    assert len(store.named("prefetch")) > 3  # the predictor is not to blame


@pytest.mark.parametrize("where", ["announce", "observe", "predict"])
def test_a_predictor_that_raises_is_dropped_with_one_warning(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, policy, predictor = RecordingStore(), CountingPolicy(), ScriptedPredictor(first_two)
    controller = make_controller(policy, predictor, store, prefetch=AMPLE)
    run_pass(controller)
    n_fetched = len(store.named("prefetch"))
    monkeypatch.setattr(predictor, where, lambda *_: raises())
    with pytest.warns(
        UserWarning, match="the predictor scripted raised ZeroDivisionError: mine; going on with"
    ) as caught:
        run_passes(controller, range(1, 4))
    assert len(caught) == 1
    assert policy.calls == 12
    assert len(store.named("scores")) == 12
    assert len(store.named("prefetch")) <= n_fetched + 1
    assert not controller.may_prefetch


INVALID: dict[str, Callable[[int], Any]] = {
    "nan": lambda il: np.array([0, np.nan, 0, 0], np.float32),
    "slow": lambda il: time.sleep(0.06),
}


@pytest.mark.parametrize("kind", INVALID)
def test_a_predictor_with_invalid_output_is_dropped_with_one_warning(kind: str) -> None:
    store, policy = RecordingStore(), CountingPolicy()
    controller = make_controller(policy, ScriptedPredictor(INVALID[kind]), store, prefetch=AMPLE, slowest_s=0.05)
    with pytest.warns(UserWarning, match="the predictor scripted .*; going on without it") as caught:
        run_passes(controller, range(3))
    assert len(caught) == 1
    assert policy.calls == 9  # the policy is not to blame
    assert store.named("prefetch") == []
    assert all(known == [] for _, known in policy.seen)


def test_the_forecast_of_a_dropped_predictor_is_discarded() -> None:
    policy = CountingPolicy()
    predictor = ScriptedPredictor(first_two)
    controller = make_controller(policy, predictor)
    controller.announce(announcement())
    controller.observe(routed(1, 0, 1))
    predictor.answer = lambda il: raises()
    with pytest.warns(UserWarning, match="going on without it"):
        controller.observe(routed(2, 0, 1))
    run_pass(controller, pass_=1)
    assert [known for _, known in policy.seen] == [[2, 3], [], [], [], []]


def test_an_error_after_stop_is_no_warning() -> None:
    store = RecordingStore()
    controller = make_controller(Bad(lambda: [controller.stop(), raises()]), None, store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_pass(controller)
    assert store.named("scores") == [1.0, 2.0]


class Foretold(ScriptedPredictor):
    """One that the store computes."""

    def native(self) -> NativePredictor:
        return NativePredictor("previous-token")


def test_a_store_that_cannot_begin_to_predict_again_is_one_warning() -> None:
    class Full(RecordingStore):
        def set_predictor(self, predictor: NativePredictor | None, forecast: NativeForecast) -> None:
            super().set_predictor(predictor, forecast)
            if predictor is not None and len(self.named("predictor")) > 1:
                raise AllocationError("cannot start the predictor's thread")

    store = Full()
    options = ActingOptions(prefetch=PrefetchOptions())
    controller = build_controller(SHAPE, LRU, Foretold(first_two), store, options)
    assert controller.native
    brief = WatchdogOptions(off_tokens=2, on_tokens=2, periods=1, warm_tokens=0, gain=0.9, pause_tokens=4)
    controller.watchdog = Watchdog(brief)

    def decode() -> None:
        for token in range(30):
            controller.count_token(Phase.DECODE, token)

    with pytest.warns(UserWarning, match="the predictor scripted .*thread; going on without it") as caught:
        decode()
    assert len(caught) == 1
    assert store.named("predictor") == ["previous-token", None, "previous-token", None]
    assert not controller.may_prefetch
