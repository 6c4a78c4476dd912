"""Tests the sliding window of forecasts, and requests for prefetches.

Each event predicts certain layers, and invalid predictions raise errors. Prefetches
begin with the nearest layer, stay within the budget, and leave out experts that are
resident or have already been requested.
"""

from collections.abc import Callable

import numpy as np
import pytest
from fake_store import ScriptedPredictor
from hypothesis import given
from hypothesis import strategies as st

from moegguf.controller.forecast import Forecast
from moegguf.controller.prefetch import Prefetcher, PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

FIVE = MoeShape(n_layer=6, n_expert=4, n_expert_used=2, layers=(1, 2, 3, 4, 5))

Answer = Callable[[int, int], object]


class ByDistance(ScriptedPredictor):
    """Predicts `answer(il, distance)`. `calls` collects the arguments of each call."""

    def __init__(self, answer: Answer, reach: int = 9) -> None:
        super().__init__(lambda il: None, shape=FIVE, reach=reach)
        self.answer_at, self.calls = answer, list[tuple[int, int]]()

    def predict(self, il: int, distance: int) -> Float32s | None:
        self.calls.append((il, distance))
        return self.answer_at(il, distance)  # type: ignore[return-value]


def by_distance(il: int, distance: int) -> Float32s:
    return np.full(4, 1 / (1 + distance), np.float32)


def test_forecast_window_slides_and_nearer_predictions_replace_farther_ones() -> None:
    forecast, predictor = Forecast(FIVE, 2), ByDistance(by_distance)
    forecast.begin_pass(predictor)
    assert predictor.calls == [(1, 1), (2, 2)] and forecast.known() == [1, 2]
    np.testing.assert_array_equal(
        forecast.probabilities()[:, 0], np.array([0, 1 / 2, 1 / 3, 0, 0, 0], np.float32)
    )
    forecast.advance(predictor, 1)
    assert predictor.calls[2:] == [(2, 1), (3, 2)] and forecast.known() == [2, 3]
    np.testing.assert_array_equal(
        forecast.probabilities()[:, 0], np.array([0, 0, 1 / 2, 1 / 3, 0, 0], np.float32)
    )
    forecast.advance(predictor, 5)
    assert forecast.known() == []


def test_forecast_without_again_predicts_each_layer_once() -> None:
    # A predictor that reads router inputs predicts nothing before the first layer.
    # After the first layer, it predicts the whole window (ProMoE, footnote 1).
    predictor = ByDistance(
        lambda il, distance: by_distance(il, distance) if routed else None
    )
    forecast, routed = Forecast(FIVE, 3, again=False), list[int]()
    forecast.begin_pass(predictor)
    assert forecast.known() == []
    predictor.calls.clear()
    for il in FIVE.layers:
        routed.append(il)
        forecast.advance(predictor, il)
    assert predictor.calls == [(2, 1), (3, 2), (4, 3), (5, 3)]
    np.testing.assert_array_equal(forecast.probabilities()[1:], 0)  # routed by now
    forecast.begin_pass(ByDistance(by_distance))
    # A predictor that reads tokens predicts before the pass.
    assert forecast.known() == [1, 2, 3]


def test_forecast_makes_no_prediction_beyond_the_reach_or_the_last_layer() -> None:
    short = ByDistance(by_distance, reach=1)
    Forecast(FIVE, 4).advance(short, 1)
    assert short.calls == [(2, 1)]
    late = ByDistance(by_distance)
    Forecast(FIVE, 4).advance(late, 4)
    assert late.calls == [(5, 1)]


def test_prediction_stays_valid_until_its_layer_is_routed_or_a_pass_begins() -> None:
    forecast, no_prediction = Forecast(FIVE, 4), ByDistance(lambda il, distance: None)
    forecast.begin_pass(ByDistance(by_distance))
    forecast.advance(no_prediction, 1)
    assert forecast.known() == [2, 3, 4]
    assert forecast.probabilities()[3, 0] == np.float32(1 / 4)
    forecast.advance(no_prediction, 3)
    assert forecast.known() == [4]
    forecast.begin_pass(no_prediction)
    assert forecast.known() == [] and not forecast.probabilities().any()


@pytest.mark.parametrize(
    "invalid",
    [
        np.zeros(5),
        np.zeros((1, 4)),
        np.float32(1),
        [0, np.nan, 0, 0],
        "abcd",
        [None] * 4,
    ],
    ids=["long", "matrix", "number", "nan", "text", "objects"],
)
def test_forecast_rejects_invalid_predictions_and_clips_numbers_out_of_range(
    invalid: object,
) -> None:
    forecast = Forecast(FIVE, 1)
    with pytest.raises((ValueError, TypeError)):
        forecast.begin_pass(ByDistance(lambda il, distance: invalid))
    forecast.begin_pass(ByDistance(lambda il, distance: [-3, 0.5, 2, np.inf]))
    np.testing.assert_array_equal(
        forecast.probabilities()[1], np.array([0, 0.5, 1, 1], np.float32)
    )


FOUR = MoeShape(
    n_layer=5, n_expert=6, n_expert_used=2, layers=(1, 2, 3, 4), expert_bytes=100
)


def probabilities(**rows: list[float]) -> Float32s:
    table = np.zeros(FOUR.table, np.float32)
    for name, row in rows.items():
        table[int(name[1:])] = row
    return table


def forecast_of(table: Float32s, il: int | None = None) -> Forecast:
    forecast, predictor = (
        Forecast(FOUR, 4),
        ScriptedPredictor(lambda il: table[il], shape=FOUR, reach=9),
    )
    forecast.begin_pass(predictor)
    if il is not None:
        forecast.advance(predictor, il)
    return forecast


def requests_of(
    prefetcher: Prefetcher, forecast: Forecast, resident: Float32s | None = None
) -> list[tuple[int, int]]:
    residency = (
        np.zeros(FOUR.table, np.uint8)
        if resident is None
        else resident.astype(np.uint8)
    )
    return prefetcher.requests(forecast, lambda: residency)


SOME = probabilities(
    l1=[0, 0.9, 0.8, 0.7, 0, 0],
    l2=[0.3, 0, 0, 0, 0.6, 0],
    l3=[0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
)


def test_prefetcher_requests_half_of_a_tokens_experts_by_default() -> None:
    everything = np.ones(FOUR.table, np.float32)
    assert (
        len(requests_of(Prefetcher(FOUR, PrefetchOptions()), forecast_of(everything)))
        == 4
    )


@pytest.mark.parametrize("budget_bytes", [0, 99, -1])
def test_prefetcher_without_a_budget_does_not_read_the_residency(
    budget_bytes: int,
) -> None:
    prefetcher = Prefetcher(FOUR, PrefetchOptions(budget_bytes=budget_bytes))
    assert (
        prefetcher.requests(
            forecast_of(SOME), lambda: pytest.fail("requested for nothing")
        )
        == []
    )


@given(st.integers(0, 2**32 - 1), st.integers(0, 1500), st.floats(0, 1))
def test_prefetcher_keeps_order_budget_and_threshold_for_any_prediction(
    seed: int, budget_bytes: int, least: float
) -> None:
    rng = np.random.default_rng(seed)
    prefetcher = Prefetcher(
        FOUR, PrefetchOptions(budget_bytes=budget_bytes, least_probability=least)
    )
    for _ in range(2):
        prefetcher.begin_pass()
        requested: list[tuple[int, int]] = []
        for il in (None, 1, 2, 3):
            table, resident = (
                rng.random(FOUR.table, np.float32),
                rng.integers(0, 3, FOUR.table),
            )
            # Experts with a probability of 0 are never prefetched.
            table[rng.random(FOUR.table) < 0.5] = 0
            now = requests_of(prefetcher, forecast_of(table, il), resident)
            assert [layer for layer, _ in now] == sorted(layer for layer, _ in now)
            assert all(
                layer > (il or 0)
                and table[layer, e] >= max(least, 1e-9)
                and not resident[layer, e]
                for layer, e in now
            )
            requested += now
        assert (
            len(set(requested)) == len(requested) <= budget_bytes // FOUR.expert_bytes
        )
