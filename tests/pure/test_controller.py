"""Tests the actions of a controller on its store, their order, and failing policies and
predictors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
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
from watchdog_trials import set_trials

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.controller import ActingOptions, Controller, build_controller
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies import LRU, make_policy
from moegguf.controller.predictors.base import NoPrediction, Predictor, StorePredictor
from moegguf.controller.predictors.counts import previous_token
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.watchdog import Watchdog
from moegguf.errors import AllocationError
from moegguf.native.events import Float32s, Phase, RoutingEvent
from moegguf.native.predictor import NativeForecast, NativePredictor
from moegguf.native.store import NativePolicy


def test_observe_updates_predicts_scores_and_prefetches_in_this_order() -> None:
    store = RecordingStore()
    controller = make_controller(
        CountingPolicy(store),
        ScriptedPredictor(first_two, store),
        store,
        prefetch=AMPLE,
    )
    controller.announce(announcement())
    assert store.actions == [
        ("announce", 0), ("predict", (1, 1)), ("predict", (2, 2)), ("prefetch", [(1, 0), (1, 1), (2, 0), (2, 1)]),
    ]  # fmt: skip
    store.actions.clear()
    controller.observe(routed(1, 0, 1))
    assert store.actions == [
        ("observe", 1), ("predict", (2, 1)), ("predict", (3, 2)), ("policy", 1), ("scores", 1.0),
        ("prefetch", [(3, 0), (3, 1)]),
    ]  # fmt: skip
    assert controller.history.last_use[1].tolist() == [1, 1, -1, -1]
    store = RecordingStore()
    run_pass(
        make_controller(CountingPolicy(), ScriptedPredictor(first_two, store), store)
    )
    assert store.named("prefetch") == []
    assert store.named("predict")[:3] == [(1, 1), (2, 2), (3, 3)]


def test_prompts_clear_the_scores_once_and_cause_no_prefetch() -> None:
    store, policy = RecordingStore(), CountingPolicy()
    controller = make_controller(
        policy, ScriptedPredictor(first_two), store, prefetch=AMPLE
    )
    run_pass(controller, Phase.PREFILL)
    assert store.actions == []
    run_pass(controller, Phase.DECODE, pass_=1)
    assert store.named("scores") == [4.0, 5.0, 6.0]
    run_pass(controller, Phase.PREFILL, pass_=2, sequence=1)
    assert store.named("scores")[3:] == [None]
    run_pass(controller, Phase.DECODE, pass_=3, sequence=1)
    assert policy.calls == 12  # the policy is called for prompts, too


# Lengths of the watchdog's trials.
FOUR_PERIODS = {
    "off_tokens": 4,
    "on_tokens": 4,
    "periods": 2,
    "certainty": float("inf"),
    "warm_tokens": 0,
    "pause_tokens": 10,
}


def test_stopped_controller_ignores_events_and_errors() -> None:
    store, policy = RecordingStore(), CountingPolicy()
    controller = make_controller(
        policy, ScriptedPredictor(first_two, store), store, prefetch=AMPLE
    )
    controller.stop()
    run_pass(controller)
    assert store.actions == [] and policy.calls == controller.n_events == 0
    failing = make_controller(Bad(lambda: [failing.stop(), raises()]), None, store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_pass(failing)
    assert store.named("scores") == [1.0, 2.0]


def test_watchdog_periods_without_prefetching_still_predict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_trials(monkeypatch, **FOUR_PERIODS)
    store = RecordingStore()
    native = NativePolicy("next-use", takes_forecast=True)
    controller = make_controller(
        native, ScriptedPredictor(first_two, store), store, prefetch=replace(AMPLE, watchdog=True),
        clock_ns=lambda: store.clock_ns,
    )  # fmt: skip
    seen: dict[bool, set[str]] = {False: set(), True: set()}
    predicted: dict[bool, list[int]] = {False: [], True: []}
    for pass_ in range(18):
        store.actions.clear()
        run_pass(controller, pass_=pass_)
        store.clock_ns += 1000
        on = controller.prefetching
        if not controller.watchdog.resting:
            seen[on] |= {kind for kind, what in store.actions if what}
            predicted[on].append(len(store.named("predict")))
    assert seen[True] - seen[False] == {"prefetch", "forecast"}
    assert set(predicted[True]) == set(predicted[False])
    assert controller.watchdog.resting and store.named("predict") == []
    # The forecast was cleared when the period ended.
    assert store.named("forecast") == []
    assert controller.history.clock == 18 * 3


def native_prediction(
    store: RecordingStore, predictor: Predictor, **options: Any
) -> Controller:
    """Returns a controller with the policy LRU for a store that runs `predictor`
    itself."""
    acting = ActingOptions(clock_ns=lambda: store.clock_ns, **options)
    controller = build_controller(SHAPE, NativePolicy("lru"), predictor, store, acting)
    assert controller is not None and controller.native
    return controller


def test_native_predictor_is_removed_between_failed_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = RecordingStore()
    controller = native_prediction(
        store, previous_token(SHAPE), prefetch=replace(AMPLE, watchdog=True)
    )
    assert store.actions == [("policy", "lru"), ("predictor", "previous-token")]
    set_trials(monkeypatch, **FOUR_PERIODS)
    controller.watchdog = Watchdog()
    for pass_ in range(17):
        run_pass(controller, pass_=pass_)
        store.clock_ns += 1000
    assert store.actions[2:] == [
        *(("act", on) for on in (False, True, False, True)), ("predictor", None), ("act", False),
    ]  # fmt: skip
    for pass_ in range(17, 27):
        run_pass(controller, pass_=pass_)
        store.clock_ns += 1000
    # The next trial begins with a period without prefetching.
    assert store.actions[8:] == [("predictor", "previous-token")]


def test_failing_native_predictor_is_removed_from_the_store() -> None:
    class Broken(StorePredictor):
        def observe(self, event: RoutingEvent) -> None:
            raise ValueError("broken")

    store = RecordingStore()
    controller = native_prediction(
        store, Broken("previous-token", SHAPE, 2), prefetch=AMPLE
    )
    with pytest.warns(UserWarning, match="previous-token raised ValueError: broken"):
        run_pass(controller)
    assert store.actions[2:] == [("predictor", None), ("act", False)]


def test_native_eamc_predictor_gets_requests_collected_by_the_controller() -> None:
    store, predictor = RecordingStore(), EamcPredictor(SHAPE)
    policy = make_policy("sparsity", SHAPE, Artifacts(None))
    acting = ActingOptions(prefetch=replace(AMPLE, by_proximity=True))
    controller = build_controller(SHAPE, policy, predictor, store, acting)
    assert controller is not None and controller.native and controller.needs_events
    assert store.actions == [("policy", "sparsity"), ("predictor", "eamc")]
    for sequence in range(3):
        run_pass(controller, pass_=sequence, sequence=sequence)
    assert predictor.eamc.n_entries == 2
    assert store.actions[2:] == [("predictor", None), ("predictor", "eamc")] * 2, (
        "read nowhere while it changes"
    )
    learned = predictor.learned(controller.history)
    assert learned.n_entries == 3
    assert learned.state.sum(axis=(1, 2)).tolist() == [6, 6, 6]


def test_watchdog_ignores_the_time_of_prompts() -> None:
    store = RecordingStore()
    controller = make_controller(
        None,
        ScriptedPredictor(first_two),
        store,
        prefetch=replace(AMPLE, watchdog=True),
        clock_ns=lambda: store.clock_ns,
    )
    for request in range(60):
        run_pass(controller, Phase.PREFILL, pass_=9 * request, sequence=request)
        store.clock_ns += 10**9
        for n in range(8):
            run_pass(controller, pass_=9 * request + 1 + n, sequence=request)
            store.clock_ns += 700 if controller.prefetching else 1000
    assert controller.watchdog.last_gain == pytest.approx(0.3, abs=0.01)


def test_controller_counts_its_time_and_events_of_layers_with_experts() -> None:
    controller = make_controller(CountingPolicy())
    controller.observe(routed(0, 0, 1))
    assert controller.history.clock == controller.n_events == 0
    run_pass(controller)
    assert controller.n_events == 3 and 0 < controller.seconds < 1


def test_native_policy_gets_a_forecast_only_if_takes_forecast_is_set() -> None:
    for takes in (True, False):
        store = RecordingStore()
        native = NativePolicy("next-use", takes_forecast=takes)
        made = build_controller(
            SHAPE, native, ScriptedPredictor(first_two), store, ActingOptions()
        )
        run_pass(made, Phase.PREFILL)
        run_pass(made)
        forecasts = [known for what, known in store.actions if what == "forecast"]
        assert forecasts == ([[1, 2, 3], [2, 3], [3], []] if takes else [])
    store = RecordingStore()
    native = NativePolicy("next-use", takes_forecast=True)
    assert (
        build_controller(SHAPE, native, NoPrediction(SHAPE), store, ActingOptions())
        is None
    )
    assert store.actions == [("policy", "next-use")]


class Bad(CountingPolicy):
    """A policy whose third call returns `act()` instead of scores."""

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
    "flat": (
        lambda: np.zeros(16, np.float32),
        r"the shape \(4, 4\) \(layers, experts\), but have \(16,\)",
    ),
    "slow": (
        lambda: time.sleep(0.06),
        r"took 0\.\d s for one routing event, but may take at most 0\.05 s",
    ),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_bad_policy_is_dropped_with_one_warning_and_lru_takes_over(kind: str) -> None:
    act, why = BAD_ANSWERS[kind]
    store, policy = RecordingStore(), Bad(act)
    controller = make_controller(
        policy, ScriptedPredictor(first_two), store, prefetch=AMPLE, slowest_s=0.05
    )
    with pytest.warns(
        UserWarning, match=f"the policy bad .*{why}.*; continuing with LRU"
    ) as caught:
        run_passes(controller, range(3))
    assert len(caught) == 1
    assert policy.calls == 3
    assert store.named("scores") == [1.0, 2.0, None]
    assert controller.policy is None
    assert len(store.named("prefetch")) > 3  # the predictor stays


BAD_CALLS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "announce": ("announce", raises, "raised ZeroDivisionError: mine"),
    "observe": ("observe", raises, "raised ZeroDivisionError: mine"),
    "predict": ("predict", raises, "raised ZeroDivisionError: mine"),
    "nan": ("predict", lambda: np.array([0, np.nan, 0, 0], np.float32), ""),
    "slow": ("predict", lambda: time.sleep(0.06), ""),
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_bad_predictor_is_dropped_with_its_forecast_and_one_warning(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, act, why = BAD_CALLS[kind]
    store, policy, predictor = (
        RecordingStore(),
        CountingPolicy(),
        ScriptedPredictor(first_two),
    )
    controller = make_controller(
        policy, predictor, store, prefetch=AMPLE, slowest_s=0.05
    )
    run_pass(controller)
    n_fetched = len(store.named("prefetch"))
    monkeypatch.setattr(predictor, where, lambda *_: act())
    with pytest.warns(
        UserWarning, match=f"the predictor scripted .*{why}.*; continuing without it"
    ) as caught:
        run_passes(controller, range(1, 4))
    assert len(caught) == 1
    assert policy.calls == len(store.named("scores")) == 12, (
        "the policy is not to blame"
    )
    assert all(known == [] for _, known in policy.seen[3:])
    assert len(store.named("prefetch")) <= n_fetched + 1
    assert not controller.may_prefetch


def test_set_predictor_failure_after_a_pause_gives_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_trials(
        monkeypatch,
        off_tokens=2,
        on_tokens=2,
        periods=1,
        warm_tokens=0,
        gain=0.9,
        pause_tokens=4,
    )

    class Full(RecordingStore):
        def set_predictor(
            self, predictor: NativePredictor | None, forecast: NativeForecast
        ) -> None:
            super().set_predictor(predictor, forecast)
            if predictor is not None and len(self.named("predictor")) > 1:
                raise AllocationError("cannot start the predictor's thread")

    store = Full()
    options = ActingOptions(prefetch=PrefetchOptions())
    controller = build_controller(SHAPE, LRU, previous_token(SHAPE), store, options)
    assert controller.native

    def decode() -> None:
        for token in range(30):
            controller.count_token(Phase.DECODE, token)

    with pytest.warns(
        UserWarning,
        match="the predictor previous-token .*thread; continuing without it",
    ) as caught:
        decode()
    assert len(caught) == 1
    assert store.named("predictor") == ["previous-token", None, "previous-token", None]
    assert not controller.may_prefetch
