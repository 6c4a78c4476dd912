"""The arrays of a routing-path network are checked; what it predicts is in tests/native/test_predictors.py."""

from __future__ import annotations

import numpy as np
import pytest

from moegguf.controller.predictors.routing_path import PathNetwork
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights

SHAPE = MoeShape(n_layer=4, n_expert=3, n_expert_used=1, layers=(1, 3), n_vocab=5)
N_EMBD, N_HEAD, N_FF = 8, 2, 10
ATTENTION = {
    "norm": (N_EMBD,), "out": (N_HEAD, N_EMBD // N_HEAD, N_EMBD),
    **dict.fromkeys("qkv", (N_EMBD, N_HEAD, N_EMBD // N_HEAD)),
}  # fmt: skip
BLOCK = {"self": ATTENTION, "feed": {"norm": (N_EMBD,), "up": (N_EMBD, N_FF), "down": (N_FF, N_EMBD)}}
BLOCKS = {"encoder.0": BLOCK, "decoder.0": {**BLOCK, "cross": ATTENTION}}
SIZES: dict[str, tuple[int, ...]] = {
    "embedding": (SHAPE.n_vocab + 1, N_EMBD), "window": (6, N_EMBD), "chunk": (4, N_EMBD), "memory_norm": (N_EMBD,),
    "output_norm": (N_EMBD,), "heads.weight": (N_EMBD, 2, SHAPE.n_expert), "heads.bias": (2, SHAPE.n_expert),
    **{
        f"{block}.{part}.{name}": size
        for block, parts in BLOCKS.items() for part, arrays in parts.items() for name, size in arrays.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SIZES))
def test_an_array_that_is_missing_misshapen_or_not_finite_is_refused(name: str) -> None:
    arrays = {name: np.ones(size, np.float32) for name, size in SIZES.items()}
    PathNetwork(SHAPE, Weights(arrays))
    with pytest.raises(ValueError, match=r"must|holds"):
        PathNetwork(SHAPE, Weights({**arrays, name: np.full_like(arrays[name], np.nan)}))
    with pytest.raises(ValueError, match="must"):
        PathNetwork(SHAPE, Weights({**arrays, name: arrays[name][..., np.newaxis]}))
    with pytest.raises(ValueError, match="must"):
        PathNetwork(SHAPE, Weights({key: array for key, array in arrays.items() if key != name}))
