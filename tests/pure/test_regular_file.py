"""Tests files that moegguf opens without being given their paths.

A pipe, folder or device in place of such a file causes an error or is treated as
missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from batch_files import Endpoint
from catalog_helpers import cache, names
from gguf_builder import moe

from moegguf.atomic_write import remove_abandoned
from moegguf.engine.known_facts import KnownFact
from moegguf.gguf.experts import read_layout
from moegguf.models.catalog import Catalog
from moegguf.models.sources import hub_cache
from moegguf.regular_file import open_regular, read_regular
from moegguf.serving.batch.batches import Batches
from moegguf.settings import data_folder

OTHERS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_open_regular_rejects_pipes_folders_devices_and_broken_links(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(OSError):  # noqa: PT011  # of many kinds
        open_regular(path)


def test_open_regular_with_own_rejects_links_and_files_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"text")
    link.symlink_to(path)
    assert (
        read_regular(path)
        == read_regular(path, own=True)
        == read_regular(link)
        == b"text"
    )
    with pytest.raises(OSError, match="Too many levels"):
        open_regular(link, own=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="not a regular file of this user"):
        open_regular(path, own=True)
    assert read_regular(path) == b"text"


def test_catalog_lists_other_models_if_the_index_or_a_commit_is_a_pipe(
    catalog: Catalog,
) -> None:
    folder = cache("user/repo", {"model-Q4_K_M.gguf": moe().build()})
    (folder / "refs" / "main").unlink()
    os.mkfifo(folder / "refs" / "main")
    data_folder().mkdir(parents=True)
    os.mkfifo(data_folder() / "models.json")
    assert hub_cache() in folder.parents
    with pytest.warns(UserWarning, match="index of models was damaged"):
        assert names() == ["hf.co/user/repo:Q4_K_M", "demo:latest"]
    catalog.copy("demo", "mine")
    assert "mine:latest" in names()


def test_known_fact_replaces_a_pipe_and_remove_abandoned_skips_pipes(
    tmp_path: Path, user: Path
) -> None:
    fact = KnownFact("tests", read_layout(moe().write(tmp_path / "model.gguf")), {})
    fact.write("known")
    fact._path.unlink()
    os.mkfifo(fact._path)
    assert fact.read(str) is None
    fact.write("again")
    assert fact.read(str) == "again"
    os.mkfifo(tmp_path / ".abandoned")
    remove_abandoned([tmp_path / ".abandoned"])


async def test_batches_ignore_pipes_in_place_of_a_batch_or_a_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "files").mkdir()
    os.mkfifo(tmp_path / "batch_1.json")
    os.mkfifo(tmp_path / "files" / "file-1.json")
    async with Batches(
        tmp_path, Endpoint(), max_bytes=1 << 30, n_parallel=1, window_s=60.0
    ) as found:
        assert (found.all(), found.files.all()) == ([], [])
