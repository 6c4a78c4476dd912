"""ProMoE's MLP: which pairs a window needs, hand-made networks with known answers, files that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from moegguf.controller.predictors.router_inputs import MlpPredictor, probabilities, window_pairs
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Phase, RoutingEvent
from moegguf.native.matvec import QuantizedMatrix

SHAPE = MoeShape(n_layer=5, n_expert=3, n_expert_used=1, layers=(1, 2, 3, 4), n_embd=2, n_vocab=6)


def routed(il: int, *vector: float) -> RoutingEvent:
    inputs = np.array([vector], np.float32)
    return RoutingEvent(0, 0, 0, 0, Phase.DECODE, 0, il, np.zeros((1, 1), np.int32), None, inputs)


def weights(windows: list[int]) -> Weights:
    """Each pair's MLP: expert 0 for x0 > 0, expert 1 for x0 < 0, expert 2 is the target's number."""
    arrays = {}
    for source, target in window_pairs(SHAPE, windows):
        at = f"{source}.{target}"
        arrays[f"{at}.hidden.weight"] = np.array([[1, 0], [-1, 0]], np.float32)
        arrays[f"{at}.hidden.bias"] = np.zeros(2, np.float32)
        arrays[f"{at}.out.weight"] = np.array([[1, 0], [0, 1], [0, 0]], np.float32)
        arrays[f"{at}.out.bias"] = np.array([0, 0, 0.25 * target], np.float32)
    return Weights(arrays, {"windows": windows, "n_hidden": 2})


def test_windows_fall_back_to_the_first_layer_and_share_pairs() -> None:
    assert window_pairs(SHAPE, [1]) == [(1, 2), (2, 3), (3, 4)]
    assert window_pairs(SHAPE, [2]) == [(1, 2), (1, 3), (2, 4)]
    assert window_pairs(SHAPE, [8]) == [(1, 2), (1, 3), (1, 4)]
    assert window_pairs(SHAPE, [1, 8]) == [(1, 2), (1, 3), (1, 4), (2, 3), (3, 4)]


def softmax(*logits: float) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


def test_two_layers_with_relu_and_a_softmax_over_the_choices() -> None:
    mlp = MlpPredictor.from_weights(SHAPE, weights([1, 2]))
    assert mlp.reach == 2
    mlp.observe(routed(1, 2.0, 9.0))
    assert mlp.predict(3, 2) == pytest.approx(softmax(2, 0, 0.75), abs=0.01)
    mlp.observe(routed(2, -2.0, 9.0))
    assert mlp.predict(3, 1) == pytest.approx(softmax(0, 2, 0.75), abs=0.01)
    assert mlp.predict(4, 2) == pytest.approx(softmax(0, 2, 1.0), abs=0.01)


def test_a_token_uses_several_experts_and_none_of_them_twice() -> None:
    assert probabilities(np.zeros(4, np.float32), 2) == pytest.approx([0.5] * 4)
    assert probabilities(np.array([50, 1, 0, 0], np.float32), 2)[0] == 1.0


def test_no_prediction_without_training_or_input() -> None:
    mlp = MlpPredictor.from_weights(SHAPE, weights([2]))
    assert mlp.predict(3, 2) is None
    mlp.observe(routed(2, 1.0, 1.0))
    assert mlp.predict(3, 1) is None
    assert mlp.predict(2, 0) is None
    assert mlp.predict(4, 1) is None
    assert mlp.predict(4, 2) is not None
    mlp.observe(routed(2, 1.0, 1.0)._replace(inputs=None))
    assert mlp.predict(4, 2) is None


def test_a_model_of_one_moe_layer_has_nothing_for_the_store_to_predict() -> None:
    shape = MoeShape(n_layer=2, n_expert=3, n_expert_used=1, layers=(1,), n_embd=2, n_vocab=6)
    assert MlpPredictor.from_weights(shape, Weights({}, {"windows": [1], "n_hidden": 2})).native() is None
    assert MlpPredictor.from_weights(SHAPE, weights([1])).native() is not None


def test_predictions_stay_valid_while_the_next_is_computed() -> None:
    mlp = MlpPredictor.from_weights(SHAPE, weights([1, 2]))
    mlp.observe(routed(1, 2.0, 0.0))
    first = mlp.predict(2, 1)
    assert first is not None
    kept = first.copy()
    mlp.predict(3, 2)
    assert np.array_equal(first, kept)


def test_files_that_do_not_fit_are_refused() -> None:
    good = weights([1])
    for facts in ({"windows": [0], "n_hidden": 2}, {"windows": [], "n_hidden": 2}, {"windows": [1], "n_hidden": "2"}):
        with pytest.raises(ValueError, match="whole numbers above zero"):
            MlpPredictor.from_weights(SHAPE, Weights(good.arrays, facts))
    with pytest.raises(ValueError, match=r"'1\.3\.hidden\.weight' must have the shape \(2, 2\), but is missing"):
        MlpPredictor.from_weights(SHAPE, Weights(good.arrays, {"windows": [2], "n_hidden": 2}))


def test_signed_bytes_keep_the_product_within_their_rounding() -> None:
    rng = np.random.default_rng(0)
    weights, x = rng.standard_normal((60, 2048)).astype(np.float32), rng.standard_normal(2048).astype(np.float32)
    bias = rng.standard_normal(60).astype(np.float32)
    exact = weights @ x + bias
    # Each weight is off by at most half a step, independently: 5 standard deviations of the sum.
    bound = 5 * np.abs(weights).max() / 127 / np.sqrt(12) * np.linalg.norm(x)
    for relu, expected in ((False, exact), (True, np.maximum(exact, 0))):
        out = QuantizedMatrix(weights, bias, relu=relu).apply(x, np.empty(60, np.float32))
        assert np.abs(out - expected).max() < bound
    nothing = QuantizedMatrix(np.zeros((2, 3), np.float32)).apply(np.ones(3, np.float32), np.empty(2, np.float32))
    assert nothing.tolist() == [0, 0]
