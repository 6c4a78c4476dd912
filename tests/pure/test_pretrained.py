"""Tests `fetch`, which `Llama.from_pretrained` uses to download: the files that a
pattern selects, and their folders."""

import os
from pathlib import Path

import pytest
from fake_hub import FakeHub
from pull_helpers import DATA

from moegguf.errors import ModelNotFoundError, PullError
from moegguf.models import hub as downloads
from moegguf.models.pull import fetch
from moegguf.models.sources import hub_cache

ONE = "m-Q4_K_M.gguf"
SHARDS = [f"Q8_0/m-Q8_0-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]


@pytest.fixture
def hub(hub: FakeHub) -> FakeHub:
    shards = {name: f"GGUF {name}".encode() for name in SHARDS}
    hub.add(
        "U/R",
        {ONE: DATA, "README.md": b"read", "mmproj-F16.gguf": b"GGUF mmproj", **shards},
    )
    return hub


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        (None, [ONE]),
        ("*Q4_K_M.gguf", [ONE]),
        *((each, SHARDS) for each in ("*Q8_0*", SHARDS[0], "Q8_0/*")),
    ],
)
@pytest.mark.parametrize("place", ["the hub's cache", "cache_dir", "local_dir"])
def test_fetch_by_pattern_gets_all_shards_of_one_model(
    hub: FakeHub, tmp_path: Path, filename: str | None, expected: list[str], place: str
) -> None:
    options = {"cache_dir": "cache", "local_dir": "local_dir"}
    where = {options[place]: tmp_path / "x"} if place in options else {}
    for _ in range(2):
        first = fetch("u/r", filename, ["READ*"], **where)
        folder = Path(str(first).removesuffix(expected[0]))
        assert first == folder / expected[0]
        for path in (*expected, "README.md"):
            assert (folder / path).read_bytes() == hub.repos["u/r"].files[path]
            assert (folder / path).is_symlink() == (place != "local_dir")
        assert folder.is_relative_to(hub_cache() if not where else tmp_path / "x")
        assert all(len(hub.gets(path)) == 1 for path in expected), (
            "the second call fetches nothing"
        )


@pytest.mark.parametrize(
    ("filename", "others", "words"),
    [
        ("*.gguf", [], rf"2 models match '\*\.gguf'.*{ONE}"),
        ("*Q2_K*", [], f"no file for .*{ONE}"),
        ("README.md", [], f"no file for .*{ONE}"),
        (
            ONE,
            ["*.txt"],
            r"no file matches '\*\.txt'; the files are .*; give the name of one of them\.",
        ),
    ],
)
def test_fetch_by_an_ambiguous_pattern_names_the_models(
    hub: FakeHub, filename: str, others: list[str], words: str
) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        fetch("u/r", filename, others)


def test_fetch_copies_equal_files_with_different_names(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.add("u/twins", {"a-Q4_0.gguf": DATA, "b-Q8_0.gguf": DATA})
    assert fetch("u/twins", "a*", ["b*"], local_dir=tmp_path).read_bytes() == DATA
    assert (tmp_path / "b-Q8_0.gguf").read_bytes() == DATA
    hub.add("u/twins", {"c-Q4_0.gguf": DATA})
    assert fetch("u/twins", local_dir=tmp_path) == tmp_path / "c-Q4_0.gguf"
    assert (
        (tmp_path / "c-Q4_0.gguf").read_bytes()
        == (tmp_path / "a-Q4_0.gguf").read_bytes()
        == DATA
    )


@pytest.mark.parametrize(
    "limit_bytes",
    [downloads.PLAIN_LIMIT_BYTES, 1 << 20],
    ids=["plain", "the hub's own storage"],
)
def test_fetch_replaces_an_old_version_and_restores_a_deleted_file(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    monkeypatch.setattr(downloads, "PLAIN_LIMIT_BYTES", limit_bytes)
    for n, data in enumerate((DATA, DATA, b"GGUF" + DATA[:3:-1], DATA)):
        hub.repos["u/r"].files[ONE] = data
        path = fetch("u/r", local_dir=tmp_path)
        assert path.read_bytes() == data and not path.is_symlink()
        assert n != 1 or len(hub.gets(ONE)) == 1
    assert any(method == "HEAD" for method, _, _ in hub.requests) == (
        limit_bytes < len(DATA)
    )
    (tmp_path / ONE).unlink()
    assert fetch("u/r", local_dir=tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("place", ["cache", "local_dir"])
def test_fetch_offline_returns_fetched_files_and_rejects_others(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    fetched = fetch("u/r", "*Q4*", **{place: tmp_path / "x"})
    for name, value, words in (
        ("HF_ENDPOINT", "http://127.0.0.1:9", "refused"),
        ("HF_HUB_OFFLINE", "1", "is set"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert fetch("u/r", "*Q4*", **{place: tmp_path / "x"}) == fetched
            with pytest.raises(PullError, match=words):
                fetch("u/r", "*Q4*", cache=tmp_path / "empty")


@pytest.mark.parametrize(
    "content", [DATA, DATA[:-1] + b"?", DATA[:-1]], ids=["same", "another", "cut"]
)
def test_fetch_keeps_an_existing_file_only_if_equal(
    hub: FakeHub, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / ONE).write_bytes(content)
    assert fetch("u/r", local_dir=tmp_path).read_bytes() == DATA
    assert hub.gets(ONE) == [""] * (content != DATA)


def test_fetch_without_symlinks_downloads_once(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    for _ in range(2):
        assert fetch("u/r", cache=tmp_path).read_bytes() == DATA
    assert hub.gets(ONE) == [""]
