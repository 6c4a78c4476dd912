"""Formula 7 of ExpertFlow, as read here: intersection over union of a batch's experts, predicted and true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from predictors.study.scoring import batch_accuracy

MATRICES = arrays(np.bool_, (3, 4))


def matrix(*rows: str) -> np.ndarray:
    return np.array([[c == "x" for c in row] for row in rows])


def test_hits_missed_and_mispredicted_experts_count() -> None:
    true = matrix("xx..", "..xx")
    predicted = matrix("x.x.", "..xx")
    assert batch_accuracy(true, predicted) == pytest.approx(3 / 5)  # three right, one missed, one idle


def test_predicting_nothing_or_everything_is_not_rewarded() -> None:
    true = matrix("x...", ".x..")
    assert batch_accuracy(true, np.zeros_like(true)) == 0
    assert batch_accuracy(true, np.ones_like(true)) == pytest.approx(2 / 8)


def test_a_batch_that_uses_nothing_is_right_when_nothing_is_predicted() -> None:
    empty = matrix("....")
    assert batch_accuracy(empty, empty) == 1
    assert batch_accuracy(empty, matrix("x...")) == 0


def test_several_batches_are_averaged() -> None:
    true = np.stack([matrix("xx.."), matrix("..xx")])
    predicted = np.stack([matrix("xx.."), matrix("xx..")])
    assert batch_accuracy(true, predicted) == pytest.approx(0.5)


@given(MATRICES, MATRICES)
def test_it_is_symmetric_bounded_and_one_only_for_equals(one: np.ndarray, other: np.ndarray) -> None:
    accuracy = batch_accuracy(one, other)
    assert 0 <= accuracy <= 1
    assert accuracy == batch_accuracy(other, one)
    assert (accuracy == 1) == np.array_equal(one, other)
