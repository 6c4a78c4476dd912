"""Predictors from router inputs: skip with real routers, ProMoE's networks by hand, files that do not fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from oracles import accuracy, routers_of
from reference_predictors import MlpPredictor, Skip, multiplied, probabilities
from traces import hidden_routers, random_trace, routed

from moegguf.controller.predictors.router_inputs import window_pairs
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.matvec import QuantizedMatrix
from predictors.study.controls import FreshGate

SHAPE = MoeShape(n_layer=4, n_expert=4, n_expert_used=1, layers=(1, 3), n_embd=4, n_vocab=8)
IDENTITY = np.eye(4, dtype=np.float32)


def test_the_input_goes_through_the_later_layers_router() -> None:
    skip = Skip(SHAPE, routers_of(SHAPE, np.stack([IDENTITY, IDENTITY[::-1]])))
    skip.observe(routed(1, 0, inputs=[[0, 0, 5, 0]]))
    found = skip.predict(3, 1)
    assert found is not None and found.argmax() == 1  # turned round by layer 3's matrix
    assert skip.predict(1, 0) is skip.predict(3, 2) is skip.predict(0, 1) is None
    fresh = FreshGate(SHAPE, routers_of(SHAPE, np.stack([IDENTITY] * 2)))  # at distance 0 only
    fresh.observe(routed(3, 0, inputs=[[0, 7, 0, 0]]))
    found = fresh.predict(3, 0)
    assert found is not None and found.argmax() == 1
    assert fresh.predict(3, 1) is None and fresh.reach == 0


@pytest.mark.parametrize(
    "invalid",
    [
        routed(1, 0),
        routed(1, [0], [0], inputs=[[1, 2, 3, 4], [1, 2, 3, 4]]),
        routed(1, 0, inputs=[[1, 2, 3]]),
        routed(1, 0, inputs=[[1, 2, 3, float("nan")]]),
        routed(0, 0, inputs=[[1, 2, 3, 4]]),
        routed(99, 0, inputs=[[1, 2, 3, 4]]),
    ],
)
def test_no_prediction_after_invalid_events(invalid: RoutingEvent) -> None:
    skip = Skip(SHAPE, routers_of(SHAPE, np.ones((2, 4, 4), np.float32)))
    skip.observe(routed(1, 0, inputs=[[1, 2, 3, 4]]))
    assert skip.predict(3, 1) is not None
    skip.observe(invalid)
    assert skip.predict(3, 1) is None


def test_a_new_pass_discards_the_last_input_and_events_may_reuse_their_arrays() -> None:
    skip = Skip(SHAPE, routers_of(SHAPE, np.stack([IDENTITY] * 2)))
    reused = routed(1, 0, inputs=[[9, 0, 0, 0]])
    skip.observe(reused)
    reused.inputs[:] = 0
    found = skip.predict(3, 1)
    assert found is not None and found.argmax() == 0
    skip.announce(Announcement(0, Phase.DECODE, np.zeros(1, np.int32)))
    assert skip.predict(3, 1) is None


def test_on_a_trace_the_fresh_gate_is_always_right_and_skip_gets_worse_with_distance() -> None:
    trace = random_trace(n_sequences=6, with_inputs=True, structure=1.0, seed=1)
    real = routers_of(trace.shape, hidden_routers(trace.shape, 1))
    assert accuracy(FreshGate(trace.shape, real), trace, 0) == 1.0
    found = [accuracy(Skip(trace.shape, real), trace, distance) for distance in (1, 2, 3, 4)]
    assert all(near > far for near, far in pairwise(found))
    assert found[-1] > 2 / 16  # still better than guessing


FIVE = MoeShape(n_layer=5, n_expert=3, n_expert_used=1, layers=(1, 2, 3, 4), n_embd=2, n_vocab=6)


def weights(windows: list[int]) -> Weights:
    """Each pair's MLP: expert 0 for x0 > 0, expert 1 for x0 < 0, expert 2 is the target's number."""
    arrays = {}
    for source, target in window_pairs(FIVE, windows):
        at = f"{source}.{target}"
        arrays[f"{at}.hidden.weight"] = np.array([[1, 0], [-1, 0]], np.float32)
        arrays[f"{at}.hidden.bias"] = np.zeros(2, np.float32)
        arrays[f"{at}.out.weight"] = np.array([[1, 0], [0, 1], [0, 0]], np.float32)
        arrays[f"{at}.out.bias"] = np.array([0, 0, 0.25 * target], np.float32)
    return Weights(arrays, {"windows": windows, "n_hidden": 2})


def mlp(*windows: int) -> MlpPredictor:
    return MlpPredictor.from_weights(FIVE, weights(list(windows)))


def test_windows_fall_back_to_the_first_layer_and_share_pairs() -> None:
    assert window_pairs(FIVE, [1]) == [(1, 2), (2, 3), (3, 4)]
    assert window_pairs(FIVE, [2]) == [(1, 2), (1, 3), (2, 4)]
    assert window_pairs(FIVE, [1, 8]) == [(1, 2), (1, 3), (1, 4), (2, 3), (3, 4)]


def softmax(*logits: float) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


def test_two_layers_with_relu_and_a_softmax_over_the_choices() -> None:
    predictor = mlp(1, 2)
    assert predictor.reach == 2
    predictor.observe(routed(1, 0, inputs=[[2.0, 9.0]]))
    first = predictor.predict(3, 2)
    assert first == pytest.approx(softmax(2, 0, 0.75), abs=0.01)
    kept = np.copy(first)  # type: ignore[arg-type]
    predictor.observe(routed(2, 0, inputs=[[-2.0, 9.0]]))
    assert predictor.predict(3, 1) == pytest.approx(softmax(0, 2, 0.75), abs=0.01)
    assert predictor.predict(4, 2) == pytest.approx(softmax(0, 2, 1.0), abs=0.01)
    assert np.array_equal(first, kept)  # type: ignore[arg-type]
    assert probabilities(np.zeros(4, np.float32), 2) == pytest.approx([0.5] * 4)
    assert probabilities(np.array([50, 1, 0, 0], np.float32), 2)[0] == 1.0


def test_no_prediction_without_training_or_input() -> None:
    predictor = mlp(2)
    assert predictor.predict(3, 2) is None
    predictor.observe(routed(2, 0, inputs=[[1.0, 1.0]]))
    assert predictor.predict(3, 1) is predictor.predict(2, 0) is predictor.predict(4, 1) is None
    assert predictor.predict(4, 2) is not None
    predictor.observe(routed(2, 0))
    assert predictor.predict(4, 2) is None


def test_a_model_of_one_moe_layer_has_nothing_for_the_store_to_predict() -> None:
    shape = MoeShape(n_layer=2, n_expert=3, n_expert_used=1, layers=(1,), n_embd=2, n_vocab=6)
    assert MlpPredictor.from_weights(shape, Weights({}, {"windows": [1], "n_hidden": 2})).native() is None
    assert mlp(1).native() is not None


def test_files_that_do_not_fit_are_refused() -> None:
    good = weights([1])
    for facts in ({"windows": [0], "n_hidden": 2}, {"windows": [], "n_hidden": 2}, {"windows": [1], "n_hidden": "2"}):
        with pytest.raises(ValueError, match="whole numbers above zero"):
            MlpPredictor.from_weights(FIVE, Weights(good.arrays, facts))
    with pytest.raises(ValueError, match=r"'1\.3\.hidden\.weight' must have the shape \(2, 2\), but is missing"):
        MlpPredictor.from_weights(FIVE, Weights(good.arrays, {"windows": [2], "n_hidden": 2}))


def test_signed_bytes_keep_the_product_within_their_rounding() -> None:
    rng = np.random.default_rng(0)
    matrix, x = rng.standard_normal((60, 2048)).astype(np.float32), rng.standard_normal(2048).astype(np.float32)
    bias = rng.standard_normal(60).astype(np.float32)
    # Each weight is off by at most half a step, independently: 5 standard deviations of the sum.
    bound = 5 * np.abs(matrix).max() / 127 / np.sqrt(12) * np.linalg.norm(x)
    assert np.abs(multiplied(QuantizedMatrix(matrix, bias), x) - (matrix @ x + bias)).max() < bound
    assert multiplied(QuantizedMatrix(np.zeros((2, 3), np.float32)), np.ones(3, np.float32)).tolist() == [0, 0]
