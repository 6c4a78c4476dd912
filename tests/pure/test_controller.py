"""The controller with a store that only takes notes: what it does, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_store import (
    AMPLE,
    SHAPE,
    Counting,
    Notes,
    Saying,
    announcement,
    controller,
    first_two,
    routed,
    run_pass,
)

from moegguf.controller.controller import ActingOptions, Controller, build_controller
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies.base import LRU
from moegguf.controller.policies.sparsity import SparsityAware
from moegguf.controller.predictors.base import NoPrediction
from moegguf.native.events import Float32s, NativePolicy, Phase


def test_on_a_gate_it_remembers_asks_scores_and_fetches_in_this_order() -> None:
    notes = Notes()
    steering = controller(Counting(notes), Saying(first_two, notes), notes, prefetch=AMPLE)
    steering.announce(announcement())
    assert notes.done == [
        ("announce", 0), ("predict", (1, 1)), ("predict", (2, 2)), ("prefetch", [(1, 0), (1, 1), (2, 0), (2, 1)]),
    ]  # fmt: skip
    notes.done.clear()
    steering.observe(routed(1))
    assert notes.done == [
        ("observe", 1), ("predict", (2, 1)), ("predict", (3, 2)), ("policy", 1), ("scores", 1.0),
        ("prefetch", [(3, 0), (3, 1)]),
    ]  # fmt: skip
    assert steering.history.last_use[1].tolist() == [1, 1, -1, -1]


def test_the_policy_sees_what_is_foretold() -> None:
    policy = Counting()
    run_pass(controller(policy, Saying(first_two)))
    assert policy.seen == [(1, [2, 3]), (2, [3]), (3, [])]


def test_without_prefetching_nothing_is_fetched_and_the_whole_pass_is_foretold() -> None:
    notes = Notes()
    run_pass(controller(Counting(), Saying(first_two, notes), notes))
    assert notes.named("prefetch") == []
    assert notes.named("predict")[:3] == [(1, 1), (2, 2), (3, 3)]


def test_scores_act_in_decode_only_and_a_prompt_clears_them_once() -> None:
    notes, policy = Notes(), Counting()
    steering = controller(policy, None, notes)
    run_pass(steering, Phase.PREFILL)
    assert notes.done == []
    run_pass(steering, Phase.DECODE, pass_=1)
    assert notes.named("scores") == [4.0, 5.0, 6.0]
    run_pass(steering, Phase.PREFILL, pass_=2, sequence=1)
    assert notes.named("scores")[3:] == [None]
    run_pass(steering, Phase.DECODE, pass_=3, sequence=1)
    assert policy.calls == 12  # it hears of prompts, too


def test_prompts_are_not_prefetched_for() -> None:
    notes = Notes()
    run_pass(controller(None, Saying(first_two), notes, prefetch=AMPLE), Phase.PREFILL)
    assert notes.named("prefetch") == []


def test_a_policy_that_learns_requests_hears_where_one_ends() -> None:
    policy = SparsityAware(SHAPE)
    steering = controller(policy)
    for sequence in range(3):
        for n, phase in enumerate((Phase.PREFILL, Phase.DECODE, Phase.DECODE)):
            run_pass(steering, phase, pass_=3 * sequence + n, sequence=sequence)
    assert (policy.eamcs.prefill.n_entries, policy.eamcs.decode.n_entries) == (2, 2)


class Quiet:
    """Never has scores."""

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        return None


def test_none_leaves_the_last_scores_in_force() -> None:
    notes = Notes()
    run_pass(controller(Quiet(), None, notes))
    assert notes.done == []


def test_layers_without_experts_are_none_of_its_business() -> None:
    steering = controller(Counting())
    steering.observe(routed(0))
    assert steering.history.clock == steering.n_events == 0


def watched(notes: Notes) -> Controller:
    prefetch = replace(AMPLE, watchdog=True)
    return controller(None, Saying(first_two), notes, prefetch=prefetch, clock_ns=lambda: notes.clock_ns)


def test_stopped_it_hears_nothing() -> None:
    notes, policy = Notes(), Counting()
    steering = controller(policy, Saying(first_two, notes), notes, prefetch=AMPLE)
    steering.stop()
    run_pass(steering)
    assert notes.done == []
    assert policy.calls == steering.n_events == 0


def test_the_watchdog_keeps_prefetching_only_while_it_saves_time() -> None:
    for saved_ns, stays in ((300, True), (-300, False)):
        notes = Notes()
        steering = watched(notes)
        assert steering.watchdog is not None
        assert not steering.prefetching
        n_trial = 2 * steering.watchdog.options.periods * steering.watchdog.options.period_tokens
        for pass_ in range(n_trial + 10):
            run_pass(steering, pass_=pass_)
            notes.clock_ns += 1000 - saved_ns * steering.prefetching
        assert steering.watchdog.trials == 1
        assert steering.prefetching == stays
        assert steering.may_prefetch


def test_the_watchdog_does_not_count_the_time_of_prompts() -> None:
    notes = Notes()
    steering = watched(notes)
    for request in range(60):
        run_pass(steering, Phase.PREFILL, pass_=9 * request, sequence=request)
        notes.clock_ns += 10**9
        for n in range(8):
            run_pass(steering, pass_=9 * request + 1 + n, sequence=request)
            notes.clock_ns += 700 if steering.prefetching else 1000
    assert steering.watchdog is not None
    assert steering.watchdog.last_gain == pytest.approx(0.3, abs=0.01)


def test_judging_acts_on_nothing() -> None:
    notes = Notes()
    steering = controller(LRU, Saying(first_two), notes, judge=True)
    for pass_ in range(3):
        run_pass(steering, pass_=pass_)
    assert notes.done == []
    assert steering.judge is not None
    assert steering.judge.table().means[1].accuracy == 1.0  # experts 0 and 1, at every gate


def test_its_time_is_counted_by_the_gate() -> None:
    steering = controller(Counting())
    run_pass(steering)
    assert steering.n_events == 3
    assert 0 < steering.seconds < 1


def test_a_native_policy_without_predictions_needs_no_controller() -> None:
    notes = Notes()
    native = NativePolicy("next-use", {"phase_weight": 2.0}, takes_forecast=True)
    assert build_controller(SHAPE, native, NoPrediction(SHAPE), notes, ActingOptions()) is None
    assert notes.done == [("policy", "next-use")]
    judged = build_controller(SHAPE, native, NoPrediction(SHAPE), notes, ActingOptions(judge=True))
    assert judged is not None and judged.judge is not None


def test_a_native_policy_gets_the_forecast_of_decoded_tokens_if_it_takes_one() -> None:
    for takes in (True, False):
        notes = Notes()
        native = NativePolicy("next-use", {}, takes_forecast=takes)
        made = build_controller(SHAPE, native, Saying(first_two), notes, ActingOptions())
        assert made is not None
        run_pass(made, Phase.PREFILL)
        run_pass(made)
        forecasts = [known for what, known in notes.done if what == "forecast"]
        assert forecasts == ([[1, 2, 3], [2, 3], [3], []] if takes else [])
