"""Tests files that are named like models but have other contents.

They are not listed, and their downloads stop early.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gguf_builder import moe
from pull_helpers import fetch

from moegguf.errors import ModelFormatError, ModelNotFoundError
from moegguf.gguf.experts import read_layout
from moegguf.gguf.reader import is_other_kind
from moegguf.models.catalog import Catalog

if TYPE_CHECKING:
    from fake_hub import FakeHub


def test_files_that_are_not_gguf_are_neither_listed_nor_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_MODELS", str(tmp_path))
    moe().write(tmp_path / "good.gguf")
    (tmp_path / "page.gguf").write_bytes(b"<html>not found</html>")
    (tmp_path / "empty.gguf").touch()
    assert [
        entry.name for entry in Catalog().entries() if entry.source == "folder"
    ] == ["good:latest"]
    with pytest.raises(
        ModelFormatError, match="starts with 'GGUF', but this one with '<htm'"
    ):
        read_layout(Catalog().find("page").path)
    for wrong in ("pagg", str(tmp_path / "pagg.gguf")):
        with pytest.raises(ModelNotFoundError) as caught:
            Catalog().find(wrong)
        assert "page" not in str(caught.value)
    assert not is_other_kind(tmp_path / "none.gguf"), (
        "what cannot be read is not judged"
    )


def test_catalog_opens_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_MODELS", str(tmp_path))
    moe().write(tmp_path / "good.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    signal.alarm(20)  # a read of the pipe would never end
    try:
        assert [
            entry.name for entry in Catalog().entries() if entry.source == "folder"
        ] == ["good:latest"]
        with pytest.raises(ModelNotFoundError):
            Catalog().find("pipe")
        with pytest.raises(ModelNotFoundError):
            Catalog().find(str(tmp_path / "pipe.gguf"))
    finally:
        signal.alarm(0)


def test_fetch_stops_a_download_whose_first_bytes_are_not_gguf(hub: FakeHub) -> None:
    page = b"<!DOCTYPE html>" + bytes(8 << 20)
    hub.add("u/r", {"x-Q4_0.gguf": page})
    with pytest.raises(
        ModelFormatError,
        match=r"x-Q4_0\.gguf is not a GGUF file: it begins with '<!DO'",
    ):
        fetch("u/r")
    folder = Path(os.environ["HF_HOME"]) / "hub"
    assert not [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size > 1 << 20
    ]
