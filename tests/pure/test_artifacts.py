"""Where knowledge of a model is looked for and put, with folders of the test's own."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest

import moegguf
from moegguf.controller import collection_file
from moegguf.controller.artifacts import COLLECTION, MEASURED, Artifacts
from moegguf.controller.collection import EamcPair
from moegguf.controller.measured import Measured, write_measured
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout

SHAPE = MoeShape(n_layer=2, n_expert=4, n_expert_used=2, layers=(0, 1))


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.models import PRESETS, write_model

    return write_model(tmp_path_factory.mktemp("knowledge") / "tiny.gguf", PRESETS["tiny-qwen2moe"], "q4_0")[0]


@pytest.fixture
def knowledge(file: Path, tmp_path: Path) -> Artifacts:
    """Of a model in a folder of its own."""
    (tmp_path / "models").mkdir()
    os.link(file, tmp_path / "models" / "tiny.gguf")
    return Artifacts(read_layout(tmp_path / "models" / "tiny.gguf"))


def put(folder: Path, name: str, data: bytes = b"") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


def measured(folder: Path, fingerprint: str, prefetch: str = "none") -> Path:
    write_measured(put(folder, MEASURED), Measured(fingerprint, {}, prefetch=prefetch))
    return folder / MEASURED


def pair(n_entries: int) -> EamcPair:
    eamcs = EamcPair.empty(*SHAPE.table)
    for n in range(n_entries):
        counts = np.zeros(SHAPE.table, np.float32)
        counts[:, n % SHAPE.n_expert] = 1 + n
        eamcs.add(counts, counts)
    return eamcs


def test_beside_the_model_and_in_the_users_folder_by_fingerprint(knowledge: Artifacts, tmp_path: Path) -> None:
    assert knowledge.beside == tmp_path / "models" / "tiny.gguf.moegguf"
    assert knowledge.of_user == tmp_path / "data" / "moegguf" / "models" / knowledge.fingerprint
    assert len(knowledge.fingerprint) == 32


def test_the_nearest_comes_first(knowledge: Artifacts, tmp_path: Path) -> None:
    assert knowledge.beside is not None
    told = Artifacts(knowledge.layout, folder=tmp_path / "told")
    last = put(knowledge.of_user, "x")
    assert list(told.find("x")) == [last]
    first, second = put(tmp_path / "told", "x"), put(knowledge.beside, "x")
    assert list(told.find("x")) == [first, second, last]
    assert list(knowledge.find("x")) == [second, last]
    assert list(knowledge.find("y")) == []


def test_a_folder_of_that_name_is_no_file(knowledge: Artifacts) -> None:
    (knowledge.of_user / "x").mkdir(parents=True)
    assert list(knowledge.find("x")) == []


def test_what_ships_is_found_by_the_fingerprint_in_its_measurement(
    knowledge: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package" / "moegguf"
    monkeypatch.setattr(moegguf, "__path__", [str(package)])
    measured(package / "predictors" / "other", "cd" * 16)
    put(package / "predictors" / "other", "x")
    put(package / "predictors" / "broken", MEASURED, b"{")
    put(package / "predictors" / "broken", "x")
    assert list(knowledge.find("x")) == []
    measured(package / "predictors" / "ours", knowledge.fingerprint)
    shipped = put(package / "predictors" / "ours", "x")
    measured(package.parent / "predictors" / "ours", knowledge.fingerprint)
    in_checkout = put(package.parent / "predictors" / "ours", "x")
    assert list(knowledge.find("x")) == [shipped, in_checkout]


def test_it_writes_beside_the_model(knowledge: Artifacts) -> None:
    assert knowledge.folder_to_write() == knowledge.beside
    assert knowledge.beside is not None
    assert knowledge.beside.is_dir()


def test_it_writes_to_the_users_folder_where_the_models_cannot_be_written(
    knowledge: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    models = tmp_path / "models"
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(models) and access(path, mode))
    assert knowledge.folder_to_write() == knowledge.of_user
    assert knowledge.of_user.is_dir()
    assert [path.name for path in models.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != knowledge.beside and access(path, mode))
    assert knowledge.folder_to_write() == knowledge.beside
    assert knowledge.folder_to_write() == knowledge.of_user  # it is there now, and somebody else's


def test_it_never_writes_into_the_package(
    knowledge: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moegguf, "__path__", [str(tmp_path / "models")])
    assert knowledge.folder_to_write() == knowledge.of_user


def test_of_a_trace_alone_the_fingerprint_is_all_that_is_known() -> None:
    knowledge = Artifacts(None, "ef" * 16)
    assert knowledge.beside is None
    assert knowledge.folder_to_write() == knowledge.of_user
    assert knowledge.of_user.name == "ef" * 16
    with pytest.raises(OptionError, match="--model"):
        knowledge.routers()


def test_a_measurement_of_another_model_is_passed_over_in_silence(knowledge: Artifacts) -> None:
    assert knowledge.beside is not None
    measured(knowledge.beside, "cd" * 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert knowledge.measured() is None
        measured(knowledge.of_user, knowledge.fingerprint, "skip")
        assert knowledge.measured() == Measured(knowledge.fingerprint, {}, prefetch="skip")


def test_a_damaged_measurement_is_one_warning(knowledge: Artifacts) -> None:
    assert knowledge.beside is not None
    put(knowledge.beside, MEASURED, json.dumps({"version": 99}).encode())
    measured(knowledge.of_user, knowledge.fingerprint, "skip")
    with pytest.warns(UserWarning, match="measured.json is not a measurement") as caught:
        found = knowledge.measured()
    assert len(caught) == 1
    assert found is not None
    assert found.prefetch == "skip"


def test_a_collection_is_kept_and_found_again(knowledge: Artifacts) -> None:
    assert knowledge.collection(SHAPE) is None
    knowledge.keep(pair(3))
    found = knowledge.collection(SHAPE)
    assert found is not None
    assert (found.prefill.n_entries, found.decode.n_entries) == (3, 3)
    knowledge.keep(pair(4))
    again = knowledge.collection(SHAPE)
    assert again is not None
    assert again.decode.n_entries == 4
    assert knowledge.beside is not None
    assert [path.name for path in knowledge.beside.iterdir()] == [COLLECTION]


def test_a_damaged_or_foreign_collection_is_one_warning_and_the_next_one_is_taken(knowledge: Artifacts) -> None:
    assert knowledge.beside is not None
    knowledge.of_user.mkdir(parents=True)
    collection_file.save(knowledge.of_user / COLLECTION, pair(2), knowledge.fingerprint)
    put(knowledge.beside, COLLECTION, b"\x80\x04N.")
    with pytest.warns(UserWarning, match="ignored the collection") as caught:
        found = knowledge.collection(SHAPE)
    assert len(caught) == 1
    assert found is not None
    assert found.decode.n_entries == 2
    collection_file.save(knowledge.beside / COLLECTION, pair(3), "cd" * 16)
    with pytest.warns(UserWarning, match="another model"):
        found = knowledge.collection(SHAPE)
    assert found is not None
    assert found.decode.n_entries == 2


def test_a_collection_that_cannot_be_kept_is_a_warning(knowledge: Artifacts) -> None:
    assert knowledge.beside is not None
    knowledge.beside.write_bytes(b"in the way")
    with pytest.warns(UserWarning, match="was not saved"):
        knowledge.keep(pair(1))
    assert knowledge.beside.read_bytes() == b"in the way"


def test_a_model_without_a_name_for_its_folder_is_told_apart_by_its_routers(tmp_path: Path, file: Path) -> None:
    from tools.models import PRESETS, write_model

    other = write_model(tmp_path / "tiny.gguf", PRESETS["tiny-qwen2moe"], "q4_0", seed=1)[0]
    assert Artifacts(read_layout(other)).fingerprint != Artifacts(read_layout(file)).fingerprint
    os.link(file, tmp_path / "renamed.gguf")
    renamed = Artifacts(read_layout(tmp_path / "renamed.gguf"))
    assert renamed.fingerprint == Artifacts(read_layout(file)).fingerprint
