"""Predictors from router inputs: which pairs of layers ProMoE's networks are for, and files that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from moegguf.controller.predictors.router_inputs import MlpPredictor, window_pairs
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.matvec import QuantizedMatrix

FIVE = MoeShape(n_layer=5, n_expert=3, n_expert_used=1, layers=(1, 2, 3, 4), n_embd=2, n_vocab=6)


def weights(windows: list[int]) -> Weights:
    arrays = {}
    for source, target in window_pairs(FIVE, windows):
        for part, size in (("hidden", (2, 2)), ("out", (3, 2))):
            arrays[f"{source}.{target}.{part}.weight"] = np.ones(size, np.float32)
            arrays[f"{source}.{target}.{part}.bias"] = np.zeros(size[0], np.float32)
    return Weights(arrays, {"windows": windows, "n_hidden": 2})


def test_windows_fall_back_to_the_first_layer_and_share_pairs() -> None:
    assert window_pairs(FIVE, [1]) == [(1, 2), (2, 3), (3, 4)]
    assert window_pairs(FIVE, [2]) == [(1, 2), (1, 3), (2, 4)]
    assert window_pairs(FIVE, [1, 8]) == [(1, 2), (1, 3), (1, 4), (2, 3), (3, 4)]
    assert MlpPredictor.from_weights(FIVE, weights([1, 2])).reach == 2


def test_a_model_of_one_moe_layer_has_nothing_for_the_store_to_predict() -> None:
    shape = MoeShape(n_layer=2, n_expert=3, n_expert_used=1, layers=(1,), n_embd=2, n_vocab=6)
    assert MlpPredictor.from_weights(shape, Weights({}, {"windows": [1], "n_hidden": 2})).native() is None
    assert MlpPredictor.from_weights(FIVE, weights([1])).native() is not None


def test_files_that_do_not_fit_are_refused() -> None:
    good = weights([1])
    for facts in ({"windows": [0], "n_hidden": 2}, {"windows": [], "n_hidden": 2}, {"windows": [1], "n_hidden": "2"}):
        with pytest.raises(ValueError, match="whole numbers above zero"):
            MlpPredictor.from_weights(FIVE, Weights(good.arrays, facts))
    with pytest.raises(ValueError, match=r"'1\.3\.hidden\.weight' must have the shape \(2, 2\), but is missing"):
        MlpPredictor.from_weights(FIVE, Weights(good.arrays, {"windows": [2], "n_hidden": 2}))


def test_signed_bytes_keep_the_product_within_their_rounding() -> None:
    rng = np.random.default_rng(0)
    weights, x = rng.standard_normal((60, 2048)).astype(np.float32), rng.standard_normal(2048).astype(np.float32)
    matrix = QuantizedMatrix(weights)
    # Each weight is off by at most half a step, independently: 5 standard deviations of the sum.
    bound = 5 * np.abs(weights).max() / 127 / np.sqrt(12) * np.linalg.norm(x)
    assert np.abs((matrix.bytes.astype(np.float32) @ x) * matrix.scale - weights @ x).max() < bound
    assert not QuantizedMatrix(np.zeros((2, 3), np.float32)).bytes.any()
