"""A saved collection is read back exactly, or ignored with one warning; never in part, never executed."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moegguf.controller import collection_file
from moegguf.controller.collection import Eamc, EamcPair

N_LAYER, N_EXPERT, MODEL = 3, 4, "c0ffee"


def pair(scale: float = 1) -> EamcPair:
    rng = np.random.default_rng(1)
    entries = (rng.integers(1, 9, (5, N_LAYER, N_EXPERT)) * scale).astype(np.float32)
    return EamcPair(Eamc.from_state(entries[:2]), Eamc.from_state(entries))


def load(path: Path, fingerprint: str = MODEL, n_layer: int = N_LAYER, capacity: int = 1000) -> EamcPair | None:
    return collection_file.load(path, n_layer=n_layer, n_expert=N_EXPERT, fingerprint=fingerprint, capacity=capacity)


def refused(path: Path, **about: str | int) -> str:
    """The text of the one warning that refuses this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load(path, **about) is None  # type: ignore[arg-type]
    assert [w.category for w in caught] == [UserWarning]
    assert "starting with an empty one" in str(caught[0].message)
    return str(caught[0].message)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "eamc.safetensors"
    collection_file.save(path, pair(), MODEL)
    return path


def forge(path: Path, change: dict[str, npt.NDArray[np.generic]] | None = None, **facts: str) -> None:
    """Rewrites the file with other arrays or facts, and a checksum that fits."""
    with safe_open(path, framework="numpy") as file:
        about = {**file.metadata(), **facts}
    arrays = {**load_file(path), **(change or {})}
    about.pop("sha256")
    save_file(arrays, path, {**about, "sha256": collection_file._digest(arrays, about)})


@pytest.mark.parametrize(("scale", "kind"), [(1, np.uint8), (40, np.uint16), (20000, np.float32), (0.5, np.float32)])
def test_what_was_saved_comes_back_exactly_and_small(tmp_path: Path, scale: float, kind: type) -> None:
    path = tmp_path / "eamc.safetensors"
    before = pair(scale)
    collection_file.save(path, before, MODEL)
    after = load(path)
    assert after is not None
    np.testing.assert_array_equal(after.prefill.state, before.prefill.state)
    np.testing.assert_array_equal(after.decode.state, before.decode.state)
    assert load_file(path)["decode"].dtype == kind
    assert os.listdir(tmp_path) == [path.name]


def test_an_empty_collection_comes_back_empty(tmp_path: Path) -> None:
    collection_file.save(tmp_path / "eamc", EamcPair.empty(N_LAYER, N_EXPERT), MODEL)
    found = load(tmp_path / "eamc")
    assert found is not None and found.n_entries == 0


def test_capacity_keeps_the_last_entries(saved: Path) -> None:
    found = load(saved, capacity=3)
    assert found is not None
    np.testing.assert_array_equal(found.decode.state, pair().decode.state[-3:])


def test_no_file_is_a_cold_start_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path / "none") is None


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


def test_foreign_models_other_shapes_and_versions_are_named_in_the_warning(saved: Path) -> None:
    assert "another model" in refused(saved, fingerprint="beef")
    assert "3 layers" in refused(saved, n_layer=4)
    forge(saved, version="0")
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
    save_file(arrays, saved, {"format": "moegguf-eamc"})
    assert "checksum" in refused(saved)
    save_file(arrays, saved)
    assert "checksum" in refused(saved)
    collection_file.save(saved, pair(), MODEL)
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
    assert "regular" in refused(path)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        collection_file.save(saved, pair(2), MODEL)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
