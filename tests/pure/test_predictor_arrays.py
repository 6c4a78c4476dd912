"""Tests the arrays of predictors, and the files that store them.

Arrays are compared with hand-computed counts. Arrays that do not fit the model are
refused. A saved file is read back unchanged, and a bad file is ignored with exactly one
warning.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles import hand_made
from safetensors.numpy import save_file
from traces import random_trace

from moegguf.controller import weights as weights_file
from moegguf.controller.predictors.counts import MAX_COUNT, affinity, token_table
from moegguf.controller.predictors.networks import (
    expert_mlp,
    expert_mlp_sizes,
    mlp,
    mlp_sizes,
    state_size,
    window_pairs,
)
from moegguf.controller.predictors.routing_path import routing_path
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.learning.counts import (
    COUNTED,
    count_affinity,
    count_popularity,
    count_tokens,
)
from moegguf.learning.expert_mlp import states
from moegguf.learning.routing_path import Options, array_sizes
from moegguf.native.predictor import QuantizedMatrix

THREE = MoeShape(
    n_layer=3, n_expert=3, n_expert_used=2, layers=(0, 2), n_embd=8, n_vocab=6
)
FOUR = MoeShape(
    n_layer=3, n_expert=4, n_expert_used=2, layers=(1, 2), n_embd=8, n_vocab=6
)

# Experts of three tokens. In layer 0 they chose {0, 1}, {0, 2} and {0, 1}. In layer 2
# the first two chose {0, 1} and {1, 2}, and the layer was not computed for the third.
PAIRS = hand_made(THREE, [[[[0, 1], [0, 1]], [[2, 0], [2, 1]], [[1, 0], [-1, -1]]]])
# Token id 5 occurs twice, with the experts {0, 1} and {0, 2} in layer 1. Token id 3
# occurs once, with {2, 3}. The last token has no known id.
TOKENS = replace(
    hand_made(
        FOUR,
        [[[[0, 1], [3, 2]], [[0, 2], [3, 2]], [[2, 3], [-1, -1]], [[1, 2], [0, 1]]]],
    ),
    tokens=np.array([5, 5, 3, -1], np.int32),
)


def test_popularity_and_affinity_equal_shares_counted_by_hand() -> None:
    popularity = count_popularity(PAIRS)
    assert popularity == pytest.approx(np.array([[3, 2, 1], [1, 2, 1]]) / [[6], [4]])
    # Tokens that chose expert 0 in layer 0 chose {0, 1} and {1, 2} in layer 2. After
    # expert 1 they chose {0, 1}; after expert 2, {1, 2}.
    expected = np.array([[1, 2, 1], [2, 2, 0], [0, 2, 2]]) / 4
    assert count_affinity(PAIRS, popularity)[0] == pytest.approx(expected)
    trace = replace(PAIRS, expert_ids=PAIRS.expert_ids.copy())
    trace.expert_ids[0][trace.expert_ids[0] == 2] = 1
    popularity = count_popularity(trace)
    assert count_affinity(trace, popularity)[0, 2] == pytest.approx(popularity[1])


def test_count_tokens_limits_the_table_and_saturates_its_counts() -> None:
    assert count_tokens(TOKENS).arrays["tokens"].tolist() == [3, 5]
    assert count_tokens(TOKENS, most_tokens=1).arrays["tokens"].tolist() == [3]
    ids = np.tile(np.array([0, 1], np.int16), (2, MAX_COUNT + 2, 1))
    many = replace(TOKENS, tokens=np.ones(MAX_COUNT + 2, np.int32), expert_ids=ids)
    assert count_tokens(many).arrays["counts"][0, 0].tolist() == [
        MAX_COUNT,
        MAX_COUNT,
        0,
        0,
    ]


@pytest.mark.parametrize("tokens", [[1, 1], [-1, 2], [0, 6]])
def test_token_table_and_affinity_reject_damaged_arrays_and_other_shapes(
    tokens: list[int],
) -> None:
    weights = count_tokens(TOKENS)
    with pytest.raises(ValueError, match="distinct token ids"):
        token_table(
            FOUR, Weights({**weights.arrays, "tokens": np.array(tokens, np.int32)})
        )
    with pytest.raises(ValueError, match="must have the shape"):
        affinity(THREE, COUNTED["affinity"](random_trace()))


SPARSE = MoeShape(
    n_layer=4, n_expert=4, n_expert_used=2, layers=(0, 1, 3), n_embd=2, n_vocab=6
)
POPULARITY = np.arange(12, dtype=np.float32).reshape(3, 4) / 12
AFFINITY = np.arange(32, dtype=np.float32).reshape(2, 4, 4) / 32


def test_states_contain_history_popularity_and_affinity_rows() -> None:
    ids = np.array([[[3, 0], [1, 2], [0, 0]]] * 2)
    both = states(POPULARITY, AFFINITY, ids, np.array([1, 2]))
    assert both.shape == (2, state_size(SPARSE))
    state = both[0]
    assert state[:4].tolist() == [1.0, 0.25, 0, 0]
    assert state[4:8] == pytest.approx(POPULARITY[1])
    assert state[8:] == pytest.approx(np.concatenate([AFFINITY[0, 3], AFFINITY[0, 0]]))
    state = both[1]
    assert state[:4].tolist() == [1.0, 0.25, 0.5, 0.75]
    assert state[8:] == pytest.approx(np.concatenate([AFFINITY[1, 1], AFFINITY[1, 2]]))


def test_expert_mlp_rejects_wrong_sizes() -> None:
    sizes = expert_mlp_sizes(SPARSE, [8] * 6)
    arrays = {name: np.ones(size, np.float32) for name, size in sizes.items()}
    expert_mlp(SPARSE, Weights(arrays, {"hidden": [8] * 6}))
    for hidden, why in (
        (
            [8, 8],
            "'hidden' must be a list of 6 whole numbers above 0, but is .*; make it again",
        ),
        (
            8,
            "'hidden' must be a list of 6 whole numbers above 0, but is 8; make it again",
        ),
        ([0, *[8] * 5], "whole numbers above 0, but is .*; make it again"),
        ([9, *[8] * 5], r"'layers\.0\.weight' must have the shape"),
    ):
        with pytest.raises(ValueError, match=why):
            expert_mlp(SPARSE, Weights(arrays, {"hidden": hidden}))


FIVE = MoeShape(
    n_layer=5, n_expert=3, n_expert_used=1, layers=(1, 2, 3, 4), n_embd=2, n_vocab=6
)


def windows_of(windows: list[int]) -> Weights:
    sizes = mlp_sizes(FIVE, windows, 2)
    arrays = {name: np.ones(size, np.float32) for name, size in sizes.items()}
    return Weights(arrays, {"windows": windows, "n_hidden": 2})


def test_window_pairs_fall_back_to_the_first_layer_and_mlp_rejects_bad_windows() -> (
    None
):
    assert window_pairs(FIVE, [1]) == [(1, 2), (2, 3), (3, 4)]
    assert window_pairs(FIVE, [2]) == [(1, 2), (1, 3), (2, 4)]
    assert window_pairs(FIVE, [1, 8]) == [(1, 2), (1, 3), (1, 4), (2, 3), (3, 4)]
    assert mlp(FIVE, windows_of([1, 2])).reach == 2
    shape = MoeShape(
        n_layer=2, n_expert=3, n_expert_used=1, layers=(1,), n_embd=2, n_vocab=6
    )
    assert mlp(shape, Weights({}, {"windows": [1], "n_hidden": 2})).native() is None
    assert mlp(FIVE, windows_of([1])).native() is not None
    good = windows_of([1])
    for windows, n_hidden in (([0], 2), ([], 2), ([1], "2"), ([1], 0), ([1], -2)):
        with pytest.raises(
            ValueError, match="whole numbers above zero; make the file again"
        ):
            mlp(FIVE, Weights(good.arrays, {"windows": windows, "n_hidden": n_hidden}))
    with pytest.raises(
        ValueError,
        match=r"'1\.3\.hidden\.weight' must have the shape \(2, 2\), but is missing",
    ):
        mlp(FIVE, Weights(good.arrays, {"windows": [2], "n_hidden": 2}))


def test_quantized_matrix_keeps_the_product_within_rounding() -> None:
    rng = np.random.default_rng(0)
    weights, x = (
        rng.standard_normal((60, 2048)).astype(np.float32),
        rng.standard_normal(2048).astype(np.float32),
    )
    matrix = QuantizedMatrix(weights)
    # Each weight is rounded by at most half a step, independently of the others. The
    # bound is 5 standard deviations of the sum.
    bound = 5 * np.abs(weights).max() / 127 / np.sqrt(12) * np.linalg.norm(x)
    assert (
        np.abs((matrix.bytes.astype(np.float32) @ x) * matrix.scale - weights @ x).max()
        < bound
    )
    assert not QuantizedMatrix(np.zeros((2, 3), np.float32)).bytes.any()


PATH_SHAPE = MoeShape(n_layer=4, n_expert=3, n_expert_used=1, layers=(1, 3), n_vocab=5)
SIZES = array_sizes(
    Options(n_embd=8, n_head=2, n_ff=10, n_decoder=1, window=6, chunk=4),
    PATH_SHAPE.n_vocab + 1,
    PATH_SHAPE.n_moe_layer,
    PATH_SHAPE.n_expert,
)


@pytest.mark.parametrize("name", sorted(SIZES))
def test_routing_path_rejects_missing_misshapen_and_infinite_arrays(name: str) -> None:
    arrays = {name: np.ones(size, np.float32) for name, size in SIZES.items()}
    routing_path(PATH_SHAPE, Weights(arrays))
    with pytest.raises(ValueError, match=r"must|holds"):
        routing_path(
            PATH_SHAPE, Weights({**arrays, name: np.full_like(arrays[name], np.nan)})
        )
    with pytest.raises(ValueError, match="must"):
        routing_path(
            PATH_SHAPE, Weights({**arrays, name: arrays[name][..., np.newaxis]})
        )
    with pytest.raises(ValueError, match="must"):
        routing_path(
            PATH_SHAPE,
            Weights({key: array for key, array in arrays.items() if key != name}),
        )


SAVED_SHAPE = MoeShape(
    n_layer=3, n_expert=4, n_expert_used=2, layers=(1, 2), n_embd=8, n_vocab=16
)
TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def build(weights: Weights) -> Weights:
    weights.array("table", *SAVED_SHAPE.table)
    return weights


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "popularity.safetensors"
    weights_file.save(
        path, "popularity", "abc", SAVED_SHAPE, Weights({"table": TABLE}, {"passes": 7})
    )
    return path


def load(path: Path) -> Weights | None:
    return weights_file.load(path, "popularity", "abc", SAVED_SHAPE, build)


def refused(path: Path, why: str) -> None:
    with pytest.warns(UserWarning, match=why) as caught:
        assert load(path) is None
    assert len(caught) == 1
    assert path.name in str(caught[0].message)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_saved_weights_are_loaded_as_float32_without_a_warning(
    path: Path, kind: type
) -> None:
    weights_file.save(
        path,
        "popularity",
        "abc",
        SAVED_SHAPE,
        Weights({"table": TABLE.astype(kind)}, {"passes": 7}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load(path)
    assert found.facts == {"passes": 7}
    assert (
        np.array_equal(found.array("table", 3, 4), TABLE)
        and found.array("table", 3, 4).dtype == np.float32
    )
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_load_rejects_flipped_bits_and_cut_files(path: Path) -> None:
    refused(path.with_name("none"), "No such file")
    good = path.read_bytes()
    for at in range(0, len(good), 3):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        refused(path, "is not used")
    for n in (*range(0, len(good) - 1, 9), len(good) - 1):
        path.write_bytes(good[:n])
        refused(path, "is not used")


def test_load_rejects_a_file_above_the_limit_of_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = path.stat().st_size
    monkeypatch.setattr(weights_file, "MAX_FILE_BYTES", n_bytes)
    assert weights_file.load(path, "popularity", "abc", SAVED_SHAPE, build) is not None
    monkeypatch.setattr(weights_file, "MAX_FILE_BYTES", n_bytes - 1)
    refused(
        path, f"must have at most {n_bytes - 1} bytes, but has {n_bytes}; make it again"
    )


def test_load_rejects_another_model_shape_predictor_or_version(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fingerprint, shape in (
        ("affinity", "abc", SAVED_SHAPE),
        ("popularity", "abd", SAVED_SHAPE),
        ("popularity", "abc", dataclasses.replace(SAVED_SHAPE, n_expert=5)),
    ):
        with pytest.warns(UserWarning, match="is not used") as caught:
            assert weights_file.load(path, name, fingerprint, shape, build) is None
        assert len(caught) == 1
    monkeypatch.setattr(weights_file, "FORMAT_VERSION", 2)
    refused(path, "its version must be 2, but is 1")


def test_load_rejects_arrays_of_another_shape(path: Path) -> None:
    weights_file.save(
        path, "popularity", "abc", SAVED_SHAPE, Weights({"table": TABLE[:2]})
    )
    refused(path, "must have the shape")


class Payload:
    """An object that creates the file `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.mark,)


def test_load_never_executes_pickles_or_foreign_files(path: Path) -> None:
    mark = path.with_name("executed")
    path.write_bytes(pickle.dumps(Payload(mark)))
    refused(path, "is not used")
    np.save(
        path.with_suffix(".npy"),
        np.array([Payload(mark)], dtype=object),
        allow_pickle=True,
    )
    refused(path.with_suffix(".npy"), "is not used")
    assert not mark.exists()
    save_file({"table": TABLE}, path)
    refused(path, "by an old version of moegguf or by another program")
    head = {
        "version": 1,
        "predictor": "popularity",
        "fingerprint": "abc",
        "shape": dataclasses.asdict(SAVED_SHAPE),
    }
    save_file({"table": TABLE}, path, {"moegguf": json.dumps(head)})
    refused(path, "checksum")


def test_failed_save_keeps_the_old_file_and_leaves_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        weights_file.save(
            path, "popularity", "abc", SAVED_SHAPE, Weights({"table": TABLE})
        )
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
