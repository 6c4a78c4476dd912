"""Files of learned predictors: what was saved comes back; anything else is ignored with exactly one warning."""

import dataclasses
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegguf.controller import weights as weights_file
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights

SHAPE = MoeShape(n_layer=3, n_expert=4, n_expert_used=2, layers=(1, 2), n_embd=8, n_vocab=16)
TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def build(weights: Weights) -> Weights:
    weights.array("table", *SHAPE.table)
    return weights


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "popularity.safetensors"
    weights_file.save(path, "popularity", "abc", SHAPE, Weights({"table": TABLE}, {"passes": 7}))
    return path


def load(path: Path) -> Weights | None:
    return weights_file.load(path, "popularity", "abc", SHAPE, build)


def refused(path: Path, why: str) -> None:
    with pytest.warns(UserWarning, match=why) as caught:
        assert load(path) is None
    assert len(caught) == 1
    assert path.name in str(caught[0].message)


def test_what_was_saved_comes_back_without_a_warning(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load(path)
    assert found.facts == {"passes": 7}
    assert np.array_equal(found.array("table", 3, 4), TABLE)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_half_precision_comes_back_as_float32(tmp_path: Path) -> None:
    path = tmp_path / "half"
    weights_file.save(path, "popularity", "abc", SHAPE, Weights({"table": TABLE.astype(np.float16)}))
    found = load(path)
    assert found.array("table", 3, 4).dtype == np.float32


def test_a_missing_file_is_one_warning(tmp_path: Path) -> None:
    refused(tmp_path / "none", "No such file")


def test_every_flipped_bit_and_every_cut_is_noticed(path: Path) -> None:
    good = path.read_bytes()
    for at in range(0, len(good), 3):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        refused(path, "is not used")
    for n in (*range(0, len(good) - 1, 9), len(good) - 1):
        path.write_bytes(good[:n])
        refused(path, "is not used")


def test_another_model_shape_predictor_or_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fingerprint, shape in (
        ("affinity", "abc", SHAPE),
        ("popularity", "abd", SHAPE),
        ("popularity", "abc", dataclasses.replace(SHAPE, n_expert=5)),
    ):
        with pytest.warns(UserWarning, match="is not used") as caught:
            assert weights_file.load(path, name, fingerprint, shape, build) is None
        assert len(caught) == 1
    monkeypatch.setattr(weights_file, "FORMAT_VERSION", 2)
    refused(path, "its version must be 2, but is 1")


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"table": np.full((3, 4), np.nan, np.float32)}, "not finite"),
        ({"table": TABLE[:2]}, "must have the shape"),
        ({"other": TABLE}, "is missing"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(path: Path, arrays: dict[str, np.ndarray], why: str) -> None:
    weights_file.save(path, "popularity", "abc", SHAPE, Weights(arrays))
    refused(path, why)


class Payload:
    """Would write a file if anything unpickled it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.mark,)


def test_pickles_and_foreign_files_are_never_executed(path: Path) -> None:
    mark = path.with_name("executed")
    path.write_bytes(pickle.dumps(Payload(mark)))
    refused(path, "is not used")
    np.save(path.with_suffix(".npy"), np.array([Payload(mark)], dtype=object), allow_pickle=True)
    refused(path.with_suffix(".npy"), "is not used")
    assert not mark.exists()
    save_file({"table": TABLE}, path)
    refused(path, "not written by moegguf")
    head = {"version": 1, "predictor": "popularity", "fingerprint": "abc", "shape": dataclasses.asdict(SHAPE)}
    save_file({"table": TABLE}, path, {"moegguf": json.dumps(head)})
    refused(path, "checksum")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        weights_file.save(path, "popularity", "abc", SHAPE, Weights({"table": TABLE}))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
