"""A saved collection is read back exactly, or ignored with one warning; never in part, never executed."""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from moegguf.controller import weights as weights_file
from moegguf.controller.collection import Eamc, EamcPair
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights

N_LAYER, N_EXPERT, MODEL = 3, 4, "c0ffee"
SHAPE = MoeShape(N_LAYER, N_EXPERT, 2, tuple(range(N_LAYER)))


def pair(scale: float = 1) -> EamcPair:
    rng = np.random.default_rng(1)
    entries = (rng.integers(1, 9, (5, N_LAYER, N_EXPERT)) * scale).astype(np.float32)
    return EamcPair(Eamc.from_state(entries[:2]), Eamc.from_state(entries))


def save(path: Path, eamcs: EamcPair) -> None:
    weights_file.save(path, "eamc", MODEL, SHAPE, eamcs.weights())


def load(path: Path, fingerprint: str = MODEL, shape: MoeShape = SHAPE, capacity: int = 1000) -> EamcPair | None:
    def build(weights: Weights) -> EamcPair:
        return EamcPair.from_weights(shape, weights, capacity)

    return weights_file.load(path, "eamc", fingerprint, shape, build)


def refused(path: Path, **about: str | MoeShape) -> str:
    """The text of the one warning that refuses this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load(path, **about) is None  # type: ignore[arg-type]
    assert [w.category for w in caught] == [UserWarning]
    assert "going on without it" in str(caught[0].message)
    return str(caught[0].message)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "eamc.safetensors"
    save(path, pair())
    return path


def forge(path: Path, change: dict[str, npt.NDArray[np.generic]]) -> None:
    """Rewrites the file with other arrays, and a checksum that fits."""
    weights_file.save(path, "eamc", MODEL, SHAPE, Weights({**load_file(path), **change}))


@pytest.mark.parametrize(("scale", "kind"), [(1, np.uint8), (40, np.uint16), (20000, np.float32), (0.5, np.float32)])
def test_what_was_saved_comes_back_exactly_and_small(tmp_path: Path, scale: float, kind: type) -> None:
    path = tmp_path / "eamc.safetensors"
    before = pair(scale)
    save(path, before)
    after = load(path)
    assert after is not None
    np.testing.assert_array_equal(after.prefill.state, before.prefill.state)
    np.testing.assert_array_equal(after.decode.state, before.decode.state)
    assert load_file(path)["decode"].dtype == kind
    assert os.listdir(tmp_path) == [path.name]


def test_an_empty_collection_comes_back_empty(tmp_path: Path) -> None:
    save(tmp_path / "eamc", EamcPair.empty(N_LAYER, N_EXPERT))
    found = load(tmp_path / "eamc")
    assert found is not None and found.n_entries == 0


def test_capacity_keeps_the_last_entries(saved: Path) -> None:
    found = load(saved, capacity=3)
    assert found is not None
    np.testing.assert_array_equal(found.decode.state, pair().decode.state[-3:])


def test_truncated_anywhere(saved: Path) -> None:
    data = saved.read_bytes()
    for size in range(len(data)):
        saved.write_bytes(data[:size])
        refused(saved)


def test_one_bit_flipped_anywhere(saved: Path) -> None:
    data = saved.read_bytes()
    for at in range(len(data)):
        for bit in (at % 8, (at + 3) % 8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            saved.write_bytes(flipped)
            refused(saved)


def test_foreign_models_other_shapes_and_versions_are_named_in_the_warning(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "its fingerprint must be 'beef'" in refused(saved, fingerprint="beef")
    assert "another shape" in refused(saved, shape=replace(SHAPE, n_layer=4))
    monkeypatch.setattr(weights_file, "FORMAT_VERSION", 2)
    assert "version" in refused(saved)


@pytest.mark.parametrize(
    "array",
    [
        np.full((2, N_LAYER, N_EXPERT), np.nan, np.float32),
        np.full((2, N_LAYER, N_EXPERT), np.inf, np.float32),
        np.full((2, N_LAYER, N_EXPERT), -1, np.float32),
        np.ones((2, N_LAYER, N_EXPERT + 1), np.uint8),
        np.ones((N_LAYER, N_EXPERT), np.uint8),
        np.ones((2, N_LAYER, N_EXPERT), np.int64),
    ],
    ids=["nan", "inf", "negative", "experts", "dimensions", "kind"],
)
def test_counts_that_are_none_under_a_valid_checksum(saved: Path, array: npt.NDArray[np.generic]) -> None:
    forge(saved, {"decode": array})
    refused(saved)


def test_arrays_too_many_or_without_a_checksum(saved: Path) -> None:
    arrays = load_file(saved)
    save_file(arrays, saved, {"format": "moegguf-eamc", "version": "1"})
    assert "old version" in refused(saved)
    save_file(arrays, saved)
    assert "not written by moegguf" in refused(saved)
    head = {"version": 1, "predictor": "eamc", "fingerprint": MODEL, "shape": asdict(SHAPE), "facts": {}}
    save_file(arrays, saved, {"moegguf": json.dumps(head)})
    assert "checksum" in refused(saved)
    save(saved, pair())
    forge(saved, {"more": np.zeros(1, np.uint8)})
    assert "more" in refused(saved)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


def test_pickles_and_zips_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "eamc.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(Bomb()))
    refused(path)
    assert not (tmp_path / "executed").exists()
    path.unlink()
    path.mkdir()
    assert "directory" in refused(path)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(saved, pair(2))
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
