"""Names and the files behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegguf.errors import ModelNotFoundError
from moegguf.models.catalog import find_model, models_by_name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MOEGGUF_MODELS with a model, a split one, and one in a folder of its own."""
    names = [
        "Qwen-Q4_0.gguf",
        "Big-Q8_0-00001-of-00002.gguf",
        "Big-Q8_0-00002-of-00002.gguf",
        "mix/mix.gguf",
        "notes.txt",
    ]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"GGUF" if name.endswith("gguf") else b"")
    monkeypatch.setenv("MOEGGUF_MODELS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Qwen-Q4_0", "Qwen-Q4_0.gguf"),
        ("qwen-q4_0", "Qwen-Q4_0.gguf"),
        ("qwen-q4_0.gguf", "Qwen-Q4_0.gguf"),
        ("big-q8_0", "Big-Q8_0-00001-of-00002.gguf"),
        ("big-q8_0-00001-of-00002:latest", "Big-Q8_0-00001-of-00002.gguf"),
        ("mix", "mix/mix.gguf"),
    ],
)
def test_names_are_file_names_in_the_models_folder(folder: Path, name: str, file: str) -> None:
    assert find_model(name) == folder / file


def test_a_path_is_itself_and_a_folder_its_only_model(folder: Path) -> None:
    assert find_model(folder / "notes.txt") == folder / "notes.txt"
    assert find_model(folder / "mix") == folder / "mix/mix.gguf"
    with pytest.raises(ModelNotFoundError, match="has 2 models"):
        find_model(folder)


def test_later_shards_are_no_models_of_their_own(folder: Path) -> None:
    assert sorted(models_by_name()) == ["big-q8_0", "mix", "qwen-q4_0"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("qwen-q4_1", "did you mean 'qwen-q4_0'"), ("xyzzy", "MOEGGUF_MODELS has"), ("", "try 'demo'"), ("dem", "'demo'")],
)
def test_an_unknown_name_gets_the_nearest_ones(folder: Path, name: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        find_model(name)


def test_files_that_are_no_models_are_not_suggested(folder: Path) -> None:
    (folder / "junk.gguf").write_bytes(b"<html>")
    for wrong in ("junc", str(folder / "junc.gguf")):
        with pytest.raises(ModelNotFoundError) as caught:
            find_model(wrong)
        assert "junk" not in str(caught.value)


def test_a_misspelt_path_gets_the_nearest_file(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"Qwen-Q4_0\.gguf"):
        find_model(folder / "Qwen-Q4_O.gguf")
