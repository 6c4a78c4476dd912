"""Everything that can go wrong while a model is fetched, from a hub on loopback."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, Fault, cut_after, endless, other_bytes, redirect_loop, status, without_ranges
from pull_helpers import DATA, NAME, fetch, nothing_has_a_name, stored

from moegguf.errors import ModelNotFoundError, PullError
from moegguf.models import blobs, hub_api, hub_fetch
from moegguf.models.hub import hub_cache

pytestmark = pytest.mark.usefixtures("any_file_is_a_model")


@pytest.mark.parametrize(
    "faults",
    [
        [cut_after(2 << 20)],
        [cut_after(100)] * 3,
        [cut_after(1 << 20), cut_after(0), status(503), cut_after(5)],
        [status(429, Retry_After="0")],
        [status(500), status(502)],
        [cut_after(1 << 20), without_ranges],
        [cut_after(1 << 20), status(416)],
    ],
    ids=["cut", "cut often", "cut and busy", "too many", "server errors", "no ranges", "range refused"],
)
def test_a_fault_that_passes_is_no_fault(repo: FakeHub, faults: list[Fault]) -> None:
    repo.faults["x-Q4_K_M.gguf"] = list(faults)
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA
    assert repo.faults["x-Q4_K_M.gguf"] == []


def test_a_cut_download_goes_on_where_it_was_cut(repo: FakeHub) -> None:
    repo.faults["x-Q4_K_M.gguf"] = [cut_after(1 << 20), *[status(503)] * hub_api.TRIES]
    with pytest.raises(PullError, match=r"503.*continues where it stopped"):
        fetch()
    assert nothing_has_a_name()
    assert [name for name in stored() if name.endswith(".incomplete")] != []
    repo.requests.clear()
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA
    assert repo.gets("x-Q4_K_M.gguf") == [f"bytes={1 << 20}-"]
    assert not [name for name in stored() if name.endswith(".incomplete")]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (other_bytes(DATA[:-1] + b"?"), "another digest"),
        (other_bytes(DATA[:-1]), f"should have {len(DATA)} bytes, but the server sends {len(DATA) - 1}"),
        (endless, "sends more"),
        (redirect_loop, "redirects .* in a loop"),
        (status(403), "licence"),
        (status(410), "410"),
        (status(429), "rate limit is reached"),
        (status(416), "416"),
        (cut_after(10), "failed"),
    ],
    ids=["sha", "size", "endless", "redirect loop", "403", "410", "429", "416", "cut"],
)
def test_a_fault_that_stays_names_itself_and_leaves_nothing_behind_it(repo: FakeHub, fault: Fault, words: str) -> None:
    repo.faults["x-Q4_K_M.gguf"] = [fault] * 20
    with pytest.raises(PullError, match=words):
        fetch()
    assert nothing_has_a_name()
    repo.faults.clear()
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA


def test_a_server_s_wish_to_wait_is_followed_within_limits(repo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class NoWait(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    monkeypatch.setattr(hub_api, "MAX_WAIT_S", 30.0)
    repo.listing_faults = [(429, {"Retry-After": "7"}), (429, {"Retry-After": "3600"})]
    hub_api.read_repository("user/repo-gguf", NoWait())
    assert waits == [7.0, 30.0]


def test_a_partial_file_that_was_damaged_gets_one_fresh_start(repo: FakeHub) -> None:
    folder = hub_cache() / "models--User--Repo-GGUF" / "blobs"
    folder.mkdir(parents=True)
    (folder / (repo.repos["user/repo-gguf"].sha256("x-Q4_K_M.gguf") + ".incomplete")).write_bytes(b"?" * 1000)
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA
    assert repo.gets("x-Q4_K_M.gguf") == ["bytes=1000-", ""]


def test_a_listing_that_fails_for_a_while(repo: FakeHub) -> None:
    repo.listing_faults = [(503, {}), (429, {"Retry-After": "0"})]
    assert fetch()[0].name == NAME
    repo.listing_faults = [(500, {})] * 20
    with pytest.raises(PullError, match="500"):
        fetch()


def test_private_and_gated_repositories_are_explained(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("u/private", {"x-Q4_0.gguf": b"1"}, private=True)
    hub.add("u/gated", {"x-Q4_0.gguf": b"1"}, gated=True)
    with pytest.raises(ModelNotFoundError, match=r"no repository 'u/none'.*HF_TOKEN"):
        fetch("u/none")
    with pytest.raises(ModelNotFoundError, match=r"private: .*HF_TOKEN \(no token is set"):
        fetch("u/private")
    with pytest.raises(
        PullError, match=r"gated: accept its licence at http://127\.0\.0\.1:\d+/u/gated and set HF_TOKEN"
    ):
        fetch("u/gated")
    monkeypatch.setenv("HF_TOKEN", f" {hub.TOKEN}\n")
    assert fetch("u/private")[0].path.read_bytes() == b"1"
    with pytest.raises(PullError, match=r"gated.*the token in HF_TOKEN") as refused:
        fetch("u/gated")
    assert hub.TOKEN not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(PullError, match="401"):
        fetch("u/private")


def test_a_stored_token_is_used_and_no_other_one(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("u/private", {"x-Q4_0.gguf": b"1"}, private=True)
    (tmp_path / "hf").mkdir(exist_ok=True)
    (tmp_path / "hf" / "token").write_text(f"{hub.TOKEN}\n")
    assert fetch("u/private")[0].size_bytes == 1
    assert set(hub.tokens) == {hub.TOKEN}


def test_a_file_that_is_gone_is_told_apart_from_a_repository_that_is(repo: FakeHub) -> None:
    repo.repos["user/repo-gguf"].hidden.add("x-Q4_K_M.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no file 'x-Q4_K_M\.gguf' in 'User/Repo-GGUF'"):
        fetch()


def test_too_small_a_disk_is_told_before_the_first_byte(repo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "free_bytes", lambda folder: (64 << 20) + (1 << 20))
    with pytest.raises(PullError, match=r"needs 3\.00MiB .* has 65\.0MiB free; delete files"):
        fetch()
    assert not repo.gets("x-Q4_K_M.gguf") and stored() == []
    monkeypatch.setattr(blobs, "free_bytes", lambda folder: (64 << 20) + len(DATA) + 99)
    assert fetch()[0].name == NAME
    monkeypatch.setattr(blobs, "free_bytes", lambda folder: 0)
    assert fetch()[1][-1].status == "success"  # nothing is missing


def test_what_is_there_of_a_file_needs_no_space_again(repo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.faults["x-Q4_K_M.gguf"] = [cut_after(2 << 20), *[status(503)] * hub_api.TRIES]
    with pytest.raises(PullError):
        fetch()
    monkeypatch.setattr(blobs, "free_bytes", lambda folder: (64 << 20) + (1 << 20) + 99)
    assert fetch()[0].path.read_bytes() == DATA


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fills_up_on_the_way(repo: FakeHub, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    write = hub_fetch._Body.write

    def full(body: Any, chunk: bytes) -> None:
        if body.n_bytes > 1 << 20:
            raise OSError(code, os.strerror(code))
        write(body, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(hub_fetch._Body, "write", full)
        words = "needs .* more, .* are free" if code != errno.EIO else "cannot be written"
        with pytest.raises(PullError, match=words):
            fetch()
    assert nothing_has_a_name()
    assert fetch()[0].path.read_bytes() == DATA
