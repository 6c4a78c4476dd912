"""Tests the lists of models: a damaged file, or a file that is not a model, does not
hide other models."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest
from fake_manager import FakeCatalog, FakeManager, server_of
from gguf_builder import moe

from moegguf.cli.options import complete_model
from moegguf.models.catalog import Catalog
from moegguf.terminal.facts import library_facts, list_facts
from moegguf.terminal.tables import print_model_list
from tools.mutants import mutate, read_header, write_file

# Seeds of mutations; 462 and 465 rename the token embeddings.
SEEDS = (*range(60), 462, 465)
FAR_S = 1 << 40  # seconds since 1970: a time in the year 36812
LONG = "x" * 300  # longer than a file name may be
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets MOEGGUF_MODELS to a folder with one good model, `good`, and returns the
    folder.

    Hides the user's other models.
    """
    for name, path in (
        ("MOEGGUF_HOME", "home"),
        ("HF_HOME", "hf"),
        ("OLLAMA_MODELS", "ollama"),
    ):
        monkeypatch.setenv(name, str(tmp_path / path))
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv("MOEGGUF_MODELS", str(folder))
    moe().write(folder / "good.gguf")
    return folder


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager(cast(FakeCatalog, Catalog(paths=False)))


@pytest.fixture
def http(manager: FakeManager) -> Iterator[httpx.Client]:
    with (
        server_of(manager) as url,
        httpx.Client(base_url=url, timeout=90, trust_env=False) as client,
    ):
        yield client


def lists(http: httpx.Client, manager: FakeManager) -> dict[str, set[str]]:
    """Returns the names of models in each list, keyed by the list's name."""
    entries = Catalog().entries()
    print_model_list(entries)
    assert [list_facts(entry)["name"] for entry in entries] == [
        entry.name for entry in entries
    ]
    # The fake manager now lists all models as loaded.
    manager.there = {entry.name: entry for entry in entries}
    found = {
        "list": {entry.name for entry in entries},
        "completion": {f"{name}:latest" for name in complete_model("")},
        "tags": {
            each["name"]
            for each in http.get("/api/tags").raise_for_status().json()["models"]
        },
        "ps": {
            each["name"]
            for each in http.get("/api/ps").raise_for_status().json()["models"]
        },
    }
    for name, headers in {"openai": {}, "anthropic": ANTHROPIC}.items():
        reply = (
            http.get("/v1/models", headers=headers, params={"limit": 1000})
            .raise_for_status()
            .json()
        )
        found[name] = {each["id"] for each in reply["data"]}
    return found


def test_models_with_damaged_headers_are_listed_with_the_others(
    folder: Path,
    http: httpx.Client,
    manager: FakeManager,
    caplog: pytest.LogCaptureFixture,
) -> None:
    header = read_header(folder / "good.gguf")
    for seed in SEEDS:
        write_file(mutate(header, seed)[0], folder / f"bad-{seed}.gguf")
    wanted = {"good:latest", *(f"bad-{seed}:latest" for seed in SEEDS)}
    for name, found in lists(http, manager).items():
        assert wanted <= found, name
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    n_refused = 0
    for seed in SEEDS[::10]:
        shown = http.post("/api/show", json={"model": f"bad-{seed}"})
        n_refused += shown.status_code != 200
        assert shown.status_code == 200 or f"bad-{seed}.gguf" in shown.json()["error"]
    assert n_refused
    assert http.post("/api/show", json={"model": "good"}).status_code == 200


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))


def without_embedding(path: Path, *shape: int) -> None:
    """Writes a model without token embeddings or, if `shape` is given, with token
    embeddings of this shape."""
    model = moe()
    model.tensors = model.tensors[1:]
    if shape:
        model.tensor("token_embd.weight", *shape)
    model.write(path)


STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda folder: os.mkfifo(folder / "bad.gguf"),
    "a socket": lambda folder: bind(folder / "bad.gguf"),
    "a folder": lambda folder: (folder / "bad.gguf").mkdir(),
    "a link to itself": lambda folder: (folder / "bad.gguf").symlink_to("bad.gguf"),
    "a link to nothing": lambda folder: (folder / "bad.gguf").symlink_to("nothing"),
    "a link to a name that no file can have": lambda folder: (
        folder / "bad.gguf"
    ).symlink_to(LONG),
    "a link to a device": lambda folder: (folder / "bad.gguf").symlink_to("/dev/zero"),
    "a name that is not UTF-8": lambda folder: moe().write(
        Path(os.fsdecode(bytes(folder / "bad") + b"\xff.gguf"))
    ),
    "a projector that is a link to nothing": lambda folder: (
        folder / "mmproj-good.gguf"
    ).symlink_to("nothing"),
    "a projector that is a pipe": lambda folder: os.mkfifo(folder / "mmproj-good.gguf"),
    "a shard of many": lambda folder: moe().write(folder / "bad-00001-of-00003.gguf"),
    "a shard numbered in other digits": lambda folder: moe().write(
        folder / "bad-0000١-of-0000٣.gguf"
    ),
    "a time in ten thousand years": lambda folder: os.utime(
        moe().write(folder / "bad.gguf"), (FAR_S, FAR_S)
    ),
    "a time before all": lambda folder: os.utime(
        moe().write(folder / "bad.gguf"), (-FAR_S, -FAR_S)
    ),
    "no embedding": lambda folder: without_embedding(folder / "bad.gguf"),
    "an embedding of one dimension": lambda folder: without_embedding(
        folder / "bad.gguf", 64
    ),
    "no bytes": lambda folder: (folder / "bad.gguf").touch(),
    "no model": lambda folder: (folder / "bad.gguf").write_bytes(b"PK" * 1000),
    "a header that ends": lambda folder: (folder / "bad.gguf").write_bytes(
        moe().build()[:100]
    ),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_a_file_that_is_no_model_hides_no_other_model(
    folder: Path,
    http: httpx.Client,
    manager: FakeManager,
    make: Callable[[Path], object],
) -> None:
    make(folder)
    for name, found in lists(http, manager).items():
        assert "good:latest" in found, name
    assert http.post("/api/show", json={"model": "good"}).status_code == 200
    assert library_facts("no model") == []
