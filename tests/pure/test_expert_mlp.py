"""DuoServe-MoE's ExpertMLP: the state as specified, a hand-made network, and when it has no prediction."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from reference_predictors import ExpertMlp
from traces import routed

from moegguf.controller.predictors.expert_mlp import state_size
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from predictors.train.states import states

SHAPE = MoeShape(n_layer=4, n_expert=4, n_expert_used=2, layers=(0, 1, 3), n_embd=2, n_vocab=6)
POPULARITY = np.arange(12, dtype=np.float32).reshape(3, 4) / 12
AFFINITY = np.arange(32, dtype=np.float32).reshape(2, 4, 4) / 32


def weights(hidden: tuple[int, ...]) -> Weights:
    """A network that copies the first n_expert numbers of its state through all layers."""
    sizes = [state_size(SHAPE), *hidden, SHAPE.n_expert]
    arrays = {"popularity": POPULARITY, "affinity": AFFINITY}
    for i, (n_in, n_out) in enumerate(pairwise(sizes)):
        arrays[f"layers.{i}.weight"] = np.eye(n_out, n_in, dtype=np.float32)
        arrays[f"layers.{i}.bias"] = np.zeros(n_out, np.float32)
    return Weights(arrays, {"hidden": list(hidden)})


def test_the_state_is_history_popularity_and_the_rows_of_the_experts_chosen() -> None:
    ids = np.array([[[3, 0]], [[1, 2]], [[0, 0]]])
    out = np.full((1, state_size(SHAPE)), np.nan, np.float32)
    state = states(POPULARITY, AFFINITY, ids, 1, out)[0]
    assert state[:4].tolist() == [1.0, 0.25, 0, 0]
    assert state[4:8] == pytest.approx(POPULARITY[1])
    assert state[8:] == pytest.approx(np.concatenate([AFFINITY[0, 3], AFFINITY[0, 0]]))
    state = states(POPULARITY, AFFINITY, ids, 2, out)[0]
    assert state[:4].tolist() == [1.0, 0.25, 0.5, 0.75]
    assert state[8:] == pytest.approx(np.concatenate([AFFINITY[1, 1], AFFINITY[1, 2]]))


def test_a_copying_network_returns_the_history_in_order() -> None:
    mlp = ExpertMlp.from_weights(SHAPE, weights((8, 8, 8, 8, 8, 8)))
    mlp.observe(routed(0, 3, 0, pass_=7))
    probabilities = mlp.predict(1, 1)
    expected = 1 / (1 + np.exp(-np.array([1, 0.25, 0, 0])))
    assert probabilities == pytest.approx(expected, abs=0.01)
    mlp.observe(routed(1, 1, 2, pass_=7))
    later = mlp.predict(3, 1)
    assert later is not None and later.argsort().tolist() == [1, 2, 3, 0]


def test_it_needs_every_layer_of_the_pass_and_looks_one_ahead() -> None:
    mlp = ExpertMlp.from_weights(SHAPE, weights((8, 8, 8, 8, 8, 8)))
    assert mlp.predict(0, 1) is None and mlp.predict(1, 1) is None
    mlp.observe(routed(0, 1, 2, pass_=0))
    assert mlp.predict(1, 1) is not None
    assert mlp.predict(3, 1) is None and mlp.predict(3, 2) is None and mlp.predict(2, 1) is None
    mlp.observe(routed(3, 1, 2, pass_=0))  # layer 1 was missed
    assert mlp.predict(3, 1) is None
    for pass_, (il, *ids) in enumerate(((0, 1, 9), (0, 1), (0, 1, -1), (2, 1, 2)), start=1):
        invalid = routed(il, *ids, pass_=pass_)
        mlp.observe(invalid)
        assert mlp.predict(1, 1) is None
    mlp.observe(routed(0, 1, 2, pass_=5)._replace(expert_ids=np.zeros((3, 2), np.int32)))
    assert mlp.predict(1, 1) is None
    mlp.observe(routed(0, 1, 2, pass_=6))
    assert mlp.predict(1, 1) is not None


def test_files_that_do_not_fit_are_refused() -> None:
    good = weights((8, 8, 8, 8, 8, 8))
    with pytest.raises(ValueError, match="hidden must be 6 sizes"):
        ExpertMlp.from_weights(SHAPE, Weights(good.arrays, {"hidden": [8, 8]}))
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' must have the shape"):
        ExpertMlp.from_weights(SHAPE, Weights(good.arrays, {"hidden": [9, 8, 8, 8, 8, 8]}))
