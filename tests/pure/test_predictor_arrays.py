"""What predictors are made of: counted by hand, and refused where it does not fit the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from oracles import counted, hand_made
from traces import random_trace

from moegguf.controller.predictors.counts import MAX_COUNT, affinity, token_table
from moegguf.controller.predictors.networks import expert_mlp, mlp, state_size, window_pairs
from moegguf.controller.predictors.routing_path import routing_path
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Announcement, Phase
from moegguf.native.predictor import QuantizedMatrix
from predictors.train.fit import COUNTED, count_affinity, count_popularity, count_tokens
from predictors.train.states import states

THREE = MoeShape(n_layer=3, n_expert=3, n_expert_used=2, layers=(0, 2), n_embd=8, n_vocab=6)
FOUR = MoeShape(n_layer=3, n_expert=4, n_expert_used=2, layers=(1, 2), n_embd=8, n_vocab=6)

# Layer 0 chose {0, 1}, {0, 2}, {0, 1}; layer 2 {0, 1}, {1, 2} and was not computed for the last token.
PAIRS = hand_made(THREE, [[[[0, 1], [0, 1]], [[2, 0], [2, 1]], [[1, 0], [-1, -1]]]])
# Token 5 twice with experts {0, 1} then {0, 2} in layer 1; token 3 once with {2, 3}; one token unknown.
TOKENS = replace(
    hand_made(FOUR, [[[[0, 1], [3, 2]], [[0, 2], [3, 2]], [[2, 3], [-1, -1]], [[1, 2], [0, 1]]]]),
    tokens=np.array([5, 5, 3, -1], np.int32),
)


def test_popularity_and_affinity_are_shares_of_choices_and_of_pairs() -> None:
    popularity = count_popularity(PAIRS)
    assert popularity == pytest.approx(np.array([[3, 2, 1], [1, 2, 1]]) / [[6], [4]])
    # 0 was followed by {0, 1} and {1, 2}; 1 by {0, 1}; 2 by {1, 2}.
    expected = np.array([[1, 2, 1], [2, 2, 0], [0, 2, 2]]) / 4
    assert count_affinity(PAIRS, popularity)[0] == pytest.approx(expected)


def test_popularity_predicts_any_layer_with_experts_at_any_time() -> None:
    popularity = counted("popularity", PAIRS)
    assert popularity.predict(0, 1) == pytest.approx([1, 2 / 3, 1 / 3])
    assert popularity.predict(2, 2) == pytest.approx([0.5, 1, 0.5])
    assert popularity.predict(1, 1) is popularity.predict(7, 1) is None
    two = np.array([3, 4], np.int32), np.full(2, Phase.DECODE, np.int32)
    popularity.announce(Announcement(3, Phase.DECODE, np.array([1, 2], np.int32), *two))
    assert popularity.predict(2, 2) == pytest.approx([0.75, 1, 0.75])


def test_an_expert_never_seen_is_followed_by_what_is_popular() -> None:
    trace = replace(PAIRS, expert_ids=PAIRS.expert_ids.copy())
    trace.expert_ids[0][trace.expert_ids[0] == 2] = 1
    popularity = count_popularity(trace)
    assert count_affinity(trace, popularity)[0, 2] == pytest.approx(popularity[1])


def test_statistics_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="must have the shape"):
        affinity(THREE, COUNTED["affinity"](random_trace()))


def test_a_table_is_bounded_and_its_counts_never_overflow() -> None:
    assert count_tokens(TOKENS).arrays["tokens"].tolist() == [3, 5]
    assert count_tokens(TOKENS, most_tokens=1).arrays["tokens"].tolist() == [3]
    ids = np.tile(np.array([0, 1], np.int16), (2, MAX_COUNT + 2, 1))
    many = replace(TOKENS, tokens=np.ones(MAX_COUNT + 2, np.int32), expert_ids=ids)
    assert count_tokens(many).arrays["counts"][0, 0].tolist() == [MAX_COUNT, MAX_COUNT, 0, 0]


@pytest.mark.parametrize("tokens", [[1, 1], [-1, 2], [0, 6]])
def test_a_damaged_table_is_refused(tokens: list[int]) -> None:
    weights = count_tokens(TOKENS)
    with pytest.raises(ValueError, match="different token ids"):
        token_table(FOUR, Weights({**weights.arrays, "tokens": np.array(tokens, np.int32)}))


SPARSE = MoeShape(n_layer=4, n_expert=4, n_expert_used=2, layers=(0, 1, 3), n_embd=2, n_vocab=6)
POPULARITY = np.arange(12, dtype=np.float32).reshape(3, 4) / 12
AFFINITY = np.arange(32, dtype=np.float32).reshape(2, 4, 4) / 32


def expert_mlp_of(hidden: tuple[int, ...]) -> Weights:
    """A network that copies the first n_expert numbers of its state through all layers."""
    sizes = [state_size(SPARSE), *hidden, SPARSE.n_expert]
    arrays = {"popularity": POPULARITY, "affinity": AFFINITY}
    for i, (n_in, n_out) in enumerate(pairwise(sizes)):
        arrays[f"layers.{i}.weight"] = np.eye(n_out, n_in, dtype=np.float32)
        arrays[f"layers.{i}.bias"] = np.zeros(n_out, np.float32)
    return Weights(arrays, {"hidden": list(hidden)})


def test_the_state_is_history_popularity_and_the_rows_of_the_experts_chosen() -> None:
    ids = np.array([[[3, 0]], [[1, 2]], [[0, 0]]])
    out = np.full((1, state_size(SPARSE)), np.nan, np.float32)
    state = states(POPULARITY, AFFINITY, ids, 1, out)[0]
    assert state[:4].tolist() == [1.0, 0.25, 0, 0]
    assert state[4:8] == pytest.approx(POPULARITY[1])
    assert state[8:] == pytest.approx(np.concatenate([AFFINITY[0, 3], AFFINITY[0, 0]]))
    state = states(POPULARITY, AFFINITY, ids, 2, out)[0]
    assert state[:4].tolist() == [1.0, 0.25, 0.5, 0.75]
    assert state[8:] == pytest.approx(np.concatenate([AFFINITY[1, 1], AFFINITY[1, 2]]))


def test_an_expert_mlp_that_does_not_fit_is_refused() -> None:
    good = expert_mlp_of((8, 8, 8, 8, 8, 8))
    with pytest.raises(ValueError, match="hidden must be 6 sizes"):
        expert_mlp(SPARSE, Weights(good.arrays, {"hidden": [8, 8]}))
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' must have the shape"):
        expert_mlp(SPARSE, Weights(good.arrays, {"hidden": [9, 8, 8, 8, 8, 8]}))


FIVE = MoeShape(n_layer=5, n_expert=3, n_expert_used=1, layers=(1, 2, 3, 4), n_embd=2, n_vocab=6)


def windows_of(windows: list[int]) -> Weights:
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
    assert mlp(FIVE, windows_of([1, 2])).reach == 2


def test_a_model_of_one_moe_layer_has_nothing_for_the_store_to_predict() -> None:
    shape = MoeShape(n_layer=2, n_expert=3, n_expert_used=1, layers=(1,), n_embd=2, n_vocab=6)
    assert mlp(shape, Weights({}, {"windows": [1], "n_hidden": 2})).native() is None
    assert mlp(FIVE, windows_of([1])).native() is not None


def test_networks_of_windows_that_do_not_fit_are_refused() -> None:
    good = windows_of([1])
    for facts in ({"windows": [0], "n_hidden": 2}, {"windows": [], "n_hidden": 2}, {"windows": [1], "n_hidden": "2"}):
        with pytest.raises(ValueError, match="whole numbers above zero"):
            mlp(FIVE, Weights(good.arrays, facts))
    with pytest.raises(ValueError, match=r"'1\.3\.hidden\.weight' must have the shape \(2, 2\), but is missing"):
        mlp(FIVE, Weights(good.arrays, {"windows": [2], "n_hidden": 2}))


def test_signed_bytes_keep_the_product_within_their_rounding() -> None:
    rng = np.random.default_rng(0)
    weights, x = rng.standard_normal((60, 2048)).astype(np.float32), rng.standard_normal(2048).astype(np.float32)
    matrix = QuantizedMatrix(weights)
    # Each weight is off by at most half a step, independently: 5 standard deviations of the sum.
    bound = 5 * np.abs(weights).max() / 127 / np.sqrt(12) * np.linalg.norm(x)
    assert np.abs((matrix.bytes.astype(np.float32) @ x) * matrix.scale - weights @ x).max() < bound
    assert not QuantizedMatrix(np.zeros((2, 3), np.float32)).bytes.any()


PATH_SHAPE = MoeShape(n_layer=4, n_expert=3, n_expert_used=1, layers=(1, 3), n_vocab=5)
N_EMBD, N_HEAD, N_FF = 8, 2, 10
ATTENTION = {
    "norm": (N_EMBD,), "out": (N_HEAD, N_EMBD // N_HEAD, N_EMBD),
    **dict.fromkeys("qkv", (N_EMBD, N_HEAD, N_EMBD // N_HEAD)),
}  # fmt: skip
BLOCK = {"self": ATTENTION, "feed": {"norm": (N_EMBD,), "up": (N_EMBD, N_FF), "down": (N_FF, N_EMBD)}}
BLOCKS = {"encoder.0": BLOCK, "decoder.0": {**BLOCK, "cross": ATTENTION}}
SIZES: dict[str, tuple[int, ...]] = {
    "embedding": (PATH_SHAPE.n_vocab + 1, N_EMBD), "window": (6, N_EMBD), "chunk": (4, N_EMBD),
    "memory_norm": (N_EMBD,), "output_norm": (N_EMBD,), "heads.weight": (N_EMBD, 2, PATH_SHAPE.n_expert),
    "heads.bias": (2, PATH_SHAPE.n_expert),
    **{
        f"{block}.{part}.{name}": size
        for block, parts in BLOCKS.items() for part, arrays in parts.items() for name, size in arrays.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SIZES))
def test_an_array_that_is_missing_misshapen_or_not_finite_is_refused(name: str) -> None:
    arrays = {name: np.ones(size, np.float32) for name, size in SIZES.items()}
    routing_path(PATH_SHAPE, Weights(arrays))
    with pytest.raises(ValueError, match=r"must|holds"):
        routing_path(PATH_SHAPE, Weights({**arrays, name: np.full_like(arrays[name], np.nan)}))
    with pytest.raises(ValueError, match="must"):
        routing_path(PATH_SHAPE, Weights({**arrays, name: arrays[name][..., np.newaxis]}))
    with pytest.raises(ValueError, match="must"):
        routing_path(PATH_SHAPE, Weights({key: array for key, array in arrays.items() if key != name}))
