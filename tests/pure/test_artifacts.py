"""Tests the folders where a model's artifacts are found and saved, atomic writes, and
leftovers of killed writers."""

import errno
import fcntl
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest

import moegguf
from moegguf.atomic_write import locked_temporary, remove_abandoned, write_atomically
from moegguf.controller import weights
from moegguf.controller.artifacts import MEASURED, Artifacts
from moegguf.controller.collection import Eamc
from moegguf.controller.hit_rates import Measured, write_measured
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout

pytestmark = pytest.mark.usefixtures("user")

SHAPE = MoeShape(n_layer=2, n_expert=4, n_expert_used=2, layers=(0, 1))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.models import PRESETS, write_model

    return write_model(
        tmp_path_factory.mktemp("artifacts") / "tiny.gguf",
        PRESETS["tiny-qwen2moe"],
        "q4_0",
    )[0]


@pytest.fixture
def artifacts(file: Path, tmp_path: Path) -> Artifacts:
    """The artifacts of a small model in the folder `models` of this test."""
    (tmp_path / "models").mkdir()
    os.link(file, tmp_path / "models" / "tiny.gguf")
    return Artifacts(read_layout(tmp_path / "models" / "tiny.gguf"))


def put(folder: Path, name: str, data: bytes = b"") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


def measured(folder: Path, fingerprint: str, about: str = "") -> Path:
    write_measured(
        put(folder, MEASURED), Measured(fingerprint, {}, about={"trace": about})
    )
    return folder / MEASURED


def collection(n_entries: int) -> Eamc:
    eamc = Eamc(*SHAPE.table)
    for n in range(n_entries):
        counts = np.zeros(SHAPE.table, np.float32)
        counts[:, n % SHAPE.n_expert] = 1 + n
        eamc.add(counts)
    return eamc


def test_find_searches_the_given_folder_the_models_folder_and_the_users_folder(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    assert artifacts.model_folder == tmp_path / "models" / "tiny.gguf.moegguf"
    assert (
        artifacts.user_folder
        == tmp_path / "data" / "moegguf" / "models" / artifacts.fingerprint
    )
    assert len(artifacts.fingerprint) == 32
    with_folder = Artifacts(artifacts.layout, folder=tmp_path / "with_folder")
    last = put(artifacts.user_folder, "x")
    assert list(with_folder.find("x")) == [last]
    first, second = put(tmp_path / "with_folder", "x"), put(artifacts.model_folder, "x")
    assert list(with_folder.find("x")) == [first, second, last]
    assert list(artifacts.find("x")) == [second, last]
    # A folder with this name is not treated as a file.
    (artifacts.user_folder / "y").mkdir()
    assert list(artifacts.find("y")) == []


def test_find_skips_an_unreadable_folder_with_one_warning(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(artifacts.model_folder, "x")
    readable, is_file = put(artifacts.user_folder, "x"), Path.is_file

    def refused(path: Path) -> bool:
        if path.parent == artifacts.model_folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.warns(
        UserWarning, match=r"tiny\.gguf\.moegguf is not searched \(Permission denied\)"
    ) as caught:
        assert list(artifacts.find("x")) == [readable]
    assert len(caught) == 1


def test_find_and_writable_folder_work_for_a_name_too_long_for_a_folder(
    file: Path, tmp_path: Path
) -> None:
    path = tmp_path / ("n" * 245 + ".gguf")
    os.link(file, path)
    artifacts = Artifacts(read_layout(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(artifacts.find("x")) == []
        assert artifacts.writable_folder() == artifacts.user_folder


def test_find_selects_shipped_artifacts_by_the_fingerprint_in_their_measurement(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package" / "moegguf"
    monkeypatch.setattr(moegguf, "__path__", [str(package)])
    measured(package / "predictors" / "other", "cd" * 16)
    put(package / "predictors" / "other", "x")
    put(package / "predictors" / "broken", MEASURED, b"{")
    put(package / "predictors" / "broken", "x")
    assert list(artifacts.find("x")) == []
    measured(package / "predictors" / "ours", artifacts.fingerprint)
    shipped = put(package / "predictors" / "ours", "x")
    measured(package.parent / "predictors" / "ours", artifacts.fingerprint)
    in_checkout = put(package.parent / "predictors" / "ours", "x")
    assert list(artifacts.find("x")) == [shipped, in_checkout]


def test_writable_folder_falls_back_to_the_users_folder(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    models = tmp_path / "models"
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: not Path(path).is_relative_to(models) and access(path, mode),
    )
    assert artifacts.writable_folder() == artifacts.user_folder
    assert artifacts.user_folder.is_dir()
    assert [path.name for path in models.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: Path(path) != artifacts.model_folder and access(path, mode),
    )
    assert artifacts.writable_folder() == artifacts.model_folder
    # The model's artifact folder now exists, but is not writable.
    assert artifacts.writable_folder() == artifacts.user_folder
    monkeypatch.setattr(os, "access", access)
    # The models folder is now treated as part of the package, where moegguf writes
    # nothing.
    monkeypatch.setattr(moegguf, "__path__", [str(models)])
    assert artifacts.writable_folder() == artifacts.user_folder


def test_artifacts_of_a_trace_have_only_a_user_folder() -> None:
    artifacts = Artifacts(None, "ef" * 16)
    assert artifacts.model_folder is None
    assert artifacts.writable_folder() == artifacts.user_folder
    assert artifacts.user_folder.name == "ef" * 16
    with pytest.raises(OptionError, match="--model"):
        artifacts.routers()


def test_measured_skips_another_models_file_and_warns_about_a_damaged_one(
    artifacts: Artifacts,
) -> None:
    measured(artifacts.model_folder, "cd" * 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artifacts.measured() is None
        measured(artifacts.user_folder, artifacts.fingerprint, "mine")
        assert artifacts.measured() == Measured(
            artifacts.fingerprint, {}, about={"trace": "mine"}
        )
    put(artifacts.model_folder, MEASURED, json.dumps({"version": 99}).encode())
    with pytest.warns(
        UserWarning, match="measured.json is not a measurement"
    ) as caught:
        assert artifacts.measured().about == {"trace": "mine"}
    assert len(caught) == 1


def test_collection_skips_a_damaged_or_foreign_file_with_one_warning(
    artifacts: Artifacts,
) -> None:
    artifacts.user_folder.mkdir(parents=True)
    weights.save(
        artifacts.user_folder / "eamc.safetensors",
        "eamc",
        artifacts.fingerprint,
        SHAPE,
        collection(2).weights(),
    )
    foreign = put(artifacts.model_folder, "eamc.safetensors", b"\x80\x04N.")
    for why in ("is not used", "its fingerprint must be"):
        with pytest.warns(UserWarning, match=why) as caught:
            assert artifacts.collection(SHAPE).n_entries == 2
        assert len(caught) == 1
        weights.save(foreign, "eamc", "cd" * 16, SHAPE, collection(3).weights())


def test_save_collection_warns_if_the_folder_cannot_be_written(
    artifacts: Artifacts,
) -> None:
    artifacts.model_folder.write_bytes(b"in the way")
    with pytest.warns(UserWarning, match="was not saved"):
        artifacts.save_collection(SHAPE, collection(1).weights())
    assert artifacts.model_folder.read_bytes() == b"in the way"


def test_write_atomically_keeps_temporary_files_of_live_writers(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json"
    handle, name = locked_temporary(tmp_path, f".{path.name}.", "")
    write_atomically(path, b"new")
    assert sorted(tmp_path.iterdir()) == sorted([path, Path(name)])
    os.close(handle)
    (tmp_path / ".other.json.abc").write_bytes(b"")
    write_atomically(path, b"new")
    assert sorted(tmp_path.iterdir()) == [tmp_path / ".other.json.abc", path], (
        "the unfinished copy of another file stays"
    )


def test_remove_abandoned_does_not_follow_links(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    link = tmp_path / ".link.x"
    link.symlink_to(target)
    remove_abandoned([link, tmp_path / "nothing"])
    assert target.read_bytes() == b"kept" and link.is_symlink()


def test_write_atomically_works_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for data in (b"old", b"new"):
        write_atomically(tmp_path / "a.json", data)
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [data]
