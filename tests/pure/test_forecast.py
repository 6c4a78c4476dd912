"""The sliding window: what is predicted anew at each gate, what is kept, and what counts as nonsense."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from moegguf.controller.forecast import Forecast
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

FIVE = MoeShape(n_layer=6, n_expert=4, n_expert_used=2, layers=(1, 2, 3, 4, 5))

Answer = Callable[[int, int], object]


class Says(Predictor):
    """Answers with `answer(il, distance)`; remembers what it was asked."""

    name: ClassVar[str] = "says"

    def __init__(self, answer: Answer, reach: int = 9) -> None:
        super().__init__(FIVE, reach)
        self.answer, self.asked = answer, list[tuple[int, int]]()

    def predict(self, il: int, distance: int) -> Float32s | None:
        self.asked.append((il, distance))
        return self.answer(il, distance)  # type: ignore[return-value]


def by_distance(il: int, distance: int) -> Float32s:
    return np.full(4, 1 / (1 + distance), np.float32)


def test_before_the_first_gate_the_first_layer_is_one_away() -> None:
    ahead, predictor = Forecast(FIVE, 2), Says(by_distance)
    ahead.begin_pass(predictor)
    assert predictor.asked == [(1, 1), (2, 2)]
    assert ahead.known() == [1, 2]
    assert ahead.il == -1
    np.testing.assert_array_equal(ahead.probabilities()[:, 0], np.array([0, 1 / 2, 1 / 3, 0, 0, 0], np.float32))


def test_the_window_slides_and_the_nearer_prediction_replaces_the_farther_one() -> None:
    ahead, predictor = Forecast(FIVE, 2), Says(by_distance)
    ahead.begin_pass(predictor)
    ahead.advance(predictor, 1)
    assert predictor.asked[2:] == [(2, 1), (3, 2)]
    assert ahead.known() == [2, 3]
    np.testing.assert_array_equal(ahead.probabilities()[:, 0], np.array([0, 0, 1 / 2, 1 / 3, 0, 0], np.float32))
    ahead.advance(predictor, 5)
    assert ahead.known() == []
    assert ahead.il == 5


def test_a_predictor_is_not_asked_beyond_its_reach_or_the_last_layer() -> None:
    short = Says(by_distance, reach=1)
    Forecast(FIVE, 4).advance(short, 1)
    assert short.asked == [(2, 1)]
    late = Says(by_distance)
    Forecast(FIVE, 4).advance(late, 4)
    assert late.asked == [(5, 1)]
    nobody = Forecast(FIVE, 4)
    nobody.begin_pass(NoPrediction(FIVE))
    assert nobody.known() == []


def test_what_is_not_said_again_stands_until_its_layer_comes() -> None:
    ahead = Forecast(FIVE, 4)
    ahead.begin_pass(Says(by_distance))
    silent = Says(lambda il, distance: None)
    ahead.advance(silent, 1)
    assert ahead.known() == [2, 3, 4]
    assert ahead.probabilities()[3, 0] == np.float32(1 / 4)
    ahead.advance(silent, 3)
    assert ahead.known() == [4]


def test_a_new_pass_begins_with_nothing() -> None:
    ahead = Forecast(FIVE, 4)
    ahead.begin_pass(Says(by_distance))
    ahead.begin_pass(Says(lambda il, distance: None))
    assert ahead.known() == []
    assert not ahead.probabilities().any()


def test_numbers_out_of_range_are_cut_off() -> None:
    ahead = Forecast(FIVE, 1)
    ahead.begin_pass(Says(lambda il, distance: [-3, 0.5, 2, np.inf]))
    np.testing.assert_array_equal(ahead.probabilities()[1], np.array([0, 0.5, 1, 1], np.float32))


@pytest.mark.parametrize(
    "nonsense",
    [np.zeros(5), np.zeros((1, 4)), np.float32(1), [0, np.nan, 0, 0], "abcd", [None] * 4],
    ids=["long", "matrix", "number", "nan", "text", "objects"],
)
def test_nonsense_is_refused(nonsense: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Forecast(FIVE, 1).begin_pass(Says(lambda il, distance: nonsense))
