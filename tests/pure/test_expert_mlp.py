"""DuoServe-MoE's ExpertMLP: the state as specified, and files that do not fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from moegguf.controller.predictors.expert_mlp import ExpertMlp, state_size
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


def test_files_that_do_not_fit_are_refused() -> None:
    good = weights((8, 8, 8, 8, 8, 8))
    with pytest.raises(ValueError, match="hidden must be 6 sizes"):
        ExpertMlp.from_weights(SHAPE, Weights(good.arrays, {"hidden": [8, 8]}))
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' must have the shape"):
        ExpertMlp.from_weights(SHAPE, Weights(good.arrays, {"hidden": [9, 8, 8, 8, 8, 8]}))
