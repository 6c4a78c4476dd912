"""The sliding window: what each event predicts, what is kept, and what is an error."""

from collections.abc import Callable

import numpy as np
import pytest
from fake_store import ScriptedPredictor

from moegguf.controller.forecast import Forecast
from moegguf.controller.predictors.base import NoPrediction
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

FIVE = MoeShape(n_layer=6, n_expert=4, n_expert_used=2, layers=(1, 2, 3, 4, 5))

Answer = Callable[[int, int], object]


class ByDistance(ScriptedPredictor):
    """Predicts `answer(il, distance)`; `calls` are those it was asked for."""

    def __init__(self, answer: Answer, reach: int = 9) -> None:
        super().__init__(lambda il: None, shape=FIVE, reach=reach)
        self.answer_at, self.calls = answer, list[tuple[int, int]]()

    def predict(self, il: int, distance: int) -> Float32s | None:
        self.calls.append((il, distance))
        return self.answer_at(il, distance)  # type: ignore[return-value]


def by_distance(il: int, distance: int) -> Float32s:
    return np.full(4, 1 / (1 + distance), np.float32)


def test_before_the_first_event_the_first_layer_is_at_distance_1() -> None:
    forecast, predictor = Forecast(FIVE, 2), ByDistance(by_distance)
    forecast.begin_pass(predictor)
    assert predictor.calls == [(1, 1), (2, 2)]
    assert forecast.known() == [1, 2]
    assert forecast.il == -1
    np.testing.assert_array_equal(forecast.probabilities()[:, 0], np.array([0, 1 / 2, 1 / 3, 0, 0, 0], np.float32))


def test_the_window_slides_and_the_nearer_prediction_replaces_the_farther_one() -> None:
    forecast, predictor = Forecast(FIVE, 2), ByDistance(by_distance)
    forecast.begin_pass(predictor)
    forecast.advance(predictor, 1)
    assert predictor.calls[2:] == [(2, 1), (3, 2)]
    assert forecast.known() == [2, 3]
    np.testing.assert_array_equal(forecast.probabilities()[:, 0], np.array([0, 0, 1 / 2, 1 / 3, 0, 0], np.float32))
    forecast.advance(predictor, 5)
    assert forecast.known() == []
    assert forecast.il == 5


def test_once_each_layer_is_predicted_when_it_comes_into_the_window() -> None:
    # From inputs, nothing is predicted before the first layer, which then does so for the whole window (footnote 1).
    predictor = ByDistance(lambda il, distance: by_distance(il, distance) if forecast.il > 0 else None)
    forecast = Forecast(FIVE, 3, again=False)
    forecast.begin_pass(predictor)
    assert forecast.known() == []
    predictor.calls.clear()
    for il in FIVE.layers:
        forecast.advance(predictor, il)
    assert predictor.calls == [(2, 1), (3, 2), (4, 3), (5, 3)]
    np.testing.assert_array_equal(forecast.probabilities()[1:], 0)  # routed by now
    forecast.begin_pass(ByDistance(by_distance))
    assert forecast.known() == [1, 2, 3]  # from tokens: before the pass


def test_no_prediction_beyond_the_reach_or_the_last_layer() -> None:
    short = ByDistance(by_distance, reach=1)
    Forecast(FIVE, 4).advance(short, 1)
    assert short.calls == [(2, 1)]
    late = ByDistance(by_distance)
    Forecast(FIVE, 4).advance(late, 4)
    assert late.calls == [(5, 1)]
    without = Forecast(FIVE, 4)
    without.begin_pass(NoPrediction(FIVE))
    assert without.known() == []


def test_a_prediction_stays_valid_until_its_layer_is_routed() -> None:
    forecast = Forecast(FIVE, 4)
    forecast.begin_pass(ByDistance(by_distance))
    no_prediction = ByDistance(lambda il, distance: None)
    forecast.advance(no_prediction, 1)
    assert forecast.known() == [2, 3, 4]
    assert forecast.probabilities()[3, 0] == np.float32(1 / 4)
    forecast.advance(no_prediction, 3)
    assert forecast.known() == [4]


def test_a_new_pass_discards_the_forecast() -> None:
    forecast = Forecast(FIVE, 4)
    forecast.begin_pass(ByDistance(by_distance))
    forecast.begin_pass(ByDistance(lambda il, distance: None))
    assert forecast.known() == []
    assert not forecast.probabilities().any()


def test_numbers_out_of_range_are_clipped() -> None:
    forecast = Forecast(FIVE, 1)
    forecast.begin_pass(ByDistance(lambda il, distance: [-3, 0.5, 2, np.inf]))
    np.testing.assert_array_equal(forecast.probabilities()[1], np.array([0, 0.5, 1, 1], np.float32))


@pytest.mark.parametrize(
    "invalid",
    [np.zeros(5), np.zeros((1, 4)), np.float32(1), [0, np.nan, 0, 0], "abcd", [None] * 4],
    ids=["long", "matrix", "number", "nan", "text", "objects"],
)
def test_invalid_output_is_an_error(invalid: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Forecast(FIVE, 1).begin_pass(ByDistance(lambda il, distance: invalid))
