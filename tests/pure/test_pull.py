"""Tests fetching models from a hub on loopback: names, shards, progress, shared
downloads, cancelling and kills."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crashing
import pytest
from fake_hub import (
    FakeHub,
    Fault,
    Gate,
    cut_after,
    endless,
    other_bytes,
    redirect_loop,
    status,
    without_ranges,
)
from pull_helpers import DATA, FILES, NAME, fetch, nothing_has_a_name, stored
from waiting import until

from moegguf.errors import ModelNotFoundError, MoeggufError, PullError
from moegguf.models import hub as downloads
from moegguf.models import own_store
from moegguf.models.catalog import Catalog
from moegguf.models.entry import PullStatus
from moegguf.models.hub import HubFile
from moegguf.models.pull import pull
from moegguf.models.sources import hub_cache

pytestmark = pytest.mark.usefixtures("any_file_is_a_model")


def test_pull_fetches_model_and_projector_and_reports_ollamas_statuses(
    repo: FakeHub,
) -> None:
    entry, told = fetch()
    assert (entry.name, entry.source) == (NAME, "hub")
    assert entry.path.read_bytes() == DATA
    assert entry.mmproj and entry.mmproj.read_bytes() == FILES["mmproj-F16.gguf"]
    assert entry.size_bytes == len(DATA) + 99
    sha = repo.repos["user/repo-gguf"].sha256("x-Q4_K_M.gguf")
    assert entry.digest == sha
    assert [status.status for status in told if not status.file] == [
        "pulling manifest", "verifying sha256 digest", "writing manifest", "success",
    ]  # fmt: skip
    mine = [status for status in told if status.file == "x-Q4_K_M.gguf"]
    assert {(s.status, s.digest, s.total_bytes) for s in mine} == {
        (f"pulling {sha[:12]}", f"sha256:{sha}", len(DATA))
    }
    assert mine[0].completed_bytes is None and mine[-1].completed_bytes == len(DATA)
    counts = [s.completed_bytes or 0 for s in mine]
    assert counts == sorted(counts)
    assert told[0].status == "pulling manifest" and told[-1].status == "success"
    assert Catalog().find("hf.co/user/repo-gguf").name == NAME
    assert (
        hub_cache() / "models--User--Repo-GGUF/refs/main"
    ).read_text() == repo.repos["user/repo-gguf"].commit


def test_pull_of_an_unchanged_model_makes_one_request(repo: FakeHub) -> None:
    fetch()
    repo.requests.clear()
    entry, told = fetch("hf.co/user/repo-gguf:q4_k_m")
    assert [method for method, _, _ in repo.requests] == ["GET"]
    assert entry.name == NAME and told[-1].status == "success"
    assert {s.completed_bytes for s in told if s.file == "x-Q4_K_M.gguf"} == {
        None,
        len(DATA),
    }


def test_pull_checks_small_files_by_their_git_hash(hub: FakeHub) -> None:
    hub.add("u/r", {"y-Q8_0.gguf": b"tiny"}, large=False)
    entry, _ = fetch("u/r")
    assert entry.path.read_bytes() == b"tiny" and len(entry.digest) == 64
    hub.add("u/s", {"y-Q8_0.gguf": b"tiny"}, large=False)
    hub.faults["y-Q8_0.gguf"] = [other_bytes(b"tinY")]
    with pytest.raises(PullError, match="different digest"):
        fetch("u/s")


def test_pull_offline_returns_cached_models_and_explains_others(
    repo: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch()
    repo.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    entry, told = fetch()
    assert entry.name == NAME and told[-1].status == "success"
    with pytest.raises(
        PullError, match="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset"
    ):
        fetch("u/other")
    assert Catalog().find("user/repo-gguf").path.read_bytes() == DATA
    assert repo.requests == []


def test_cancelled_pull_stops_within_a_second_and_the_next_pull_resumes(
    repo: FakeHub,
) -> None:
    gate, cancelled = Gate(1 << 20), threading.Event()
    repo.faults["x-Q4_K_M.gguf"] = [gate]
    told: list[PullStatus] = []
    errors: list[BaseException] = []

    def stop() -> None:
        try:
            pull("user/repo-gguf", Catalog(), told.append, cancelled)
        except PullError as error:
            errors.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    assert gate.reached.wait(20)
    until(lambda: any((s.completed_bytes or 0) >= 1 << 19 for s in told))
    start = time.monotonic()
    cancelled.set()
    thread.join(20)
    assert time.monotonic() - start < 1.0  # the server still keeps the connection open
    assert "was stopped; received bytes are kept" in str(errors[0])
    gate.open.set()
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA
    assert len([span for span in repo.gets("x-Q4_K_M.gguf") if not span]) == 1


def test_concurrent_pulls_share_one_download_although_the_first_leaves(
    repo: FakeHub,
) -> None:
    gate, left = Gate(1 << 19), threading.Event()
    repo.faults["x-Q4_K_M.gguf"] = [gate]
    results: list[Any] = []

    def ask(name: str, cancelled: threading.Event | None = None) -> None:
        try:
            results.append(fetch(name, cancelled))
        except MoeggufError as error:
            results.append(error)

    first = threading.Thread(target=ask, args=("user/repo-gguf", left))
    others = [
        threading.Thread(target=ask, args=(name,))
        for name in ("User/Repo-GGUF", "hf:user/repo-gguf", NAME)
    ]
    first.start()
    assert gate.reached.wait(20)
    for thread in others:
        thread.start()
    left.set()  # the first pull is cancelled, and the others continue
    first.join(20)
    assert isinstance(results[0], PullError)
    # Each pull lists the repository. A second listing shows that another pull has
    # begun.
    until(
        lambda: sum(path.startswith("/api/models") for _, path, _ in repo.requests) >= 2
    )
    gate.open.set()
    for thread in others:
        thread.join(30)
    assert [entry.name for entry, _ in results[1:]] == [NAME] * 3
    assert all(told[-1].status == "success" for _, told in results[1:])
    first_span, *spans = repo.gets("x-Q4_K_M.gguf")
    assert not first_span and len(spans) <= 1 and all(spans), (
        "the second one for the rest"
    )


def test_link_commit_is_safe_in_several_threads(hub: FakeHub) -> None:
    hub.add("u/r", {f"x-Q4_0-0000{n}-of-00003.gguf": b"%d" % n for n in (1, 2, 3)})
    entry, _ = fetch("u/r")
    files = list(downloads.read_repository("u/r").values())
    with ThreadPoolExecutor(6) as pool:
        for _ in range(20):
            shutil.rmtree(entry.path.parent)
            assert set(pool.map(downloads.link_commit, [files] * 6)) == {
                entry.path.parent
            }
    assert all(path.is_file() for path in entry.files)


def test_pull_ignores_paths_outside_the_repository(hub: FakeHub) -> None:
    hub.add(
        "u/r",
        {
            "../../../evil-Q4_K_M.gguf": b"evil",
            "/tmp/evil-Q4_K_M.gguf": b"evil",
            "a/../x-Q4_K_M.gguf": b"x",
        },
    )
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        fetch("u/r")
    assert stored() == []


PULL = """
import sys
from moegguf.models.catalog import Catalog
from moegguf.models.pull import pull
pull(sys.argv[1], Catalog(), lambda status: print(status.status, status.completed_bytes, flush=True))
"""


def start_pull(hub: FakeHub, home: Path, **extra: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        **hub.environment(home),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **extra,
    }
    command = [sys.executable, "-c", PULL, "user/repo-gguf"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True
    )


@pytest.fixture
def gated_pull(
    repo: FakeHub, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], Gate]]:
    """Starts a pull in another process, and waits until that process reports 1 MiB.
    Yields the process and a gate.

    The hub sends 2 MiB and then waits until the gate opens.
    """
    gate = Gate(2 << 20)
    repo.faults["x-Q4_K_M.gguf"] = [gate]
    with start_pull(repo, tmp_path) as process:
        for line in process.stdout:
            if line.split()[-1].isdigit() and int(line.split()[-1]) >= 1 << 20:
                break
        yield process, gate
        gate.open.set()
        process.kill()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_killed_pull_keeps_received_bytes_and_adds_no_name(
    repo: FakeHub,
    gated_pull: tuple[subprocess.Popen[str], Gate],
    signum: signal.Signals,
) -> None:
    process, gate = gated_pull
    process.send_signal(signum)
    process.wait(20)
    gate.open.set()
    assert nothing_has_a_name()
    repo.requests.clear()
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA
    assert int(repo.gets("x-Q4_K_M.gguf")[0][6:-1]) >= 1 << 20


def test_two_processes_download_a_file_once(
    repo: FakeHub, gated_pull: tuple[subprocess.Popen[str], Gate]
) -> None:
    process, gate = gated_pull
    told: list[PullStatus] = []
    waiting = threading.Thread(
        target=pull, args=("user/repo-gguf", Catalog(), told.append)
    )
    waiting.start()
    # Includes the other process's bytes.
    until(lambda: any((s.completed_bytes or 0) >= 1 << 20 for s in told))
    gate.open.set()
    waiting.join(20)
    assert told[-1].status == "success" and process.wait(20) == 0
    assert repo.gets("x-Q4_K_M.gguf") == [""]


def test_pull_uses_the_proxy_of_the_environment(repo: FakeHub, tmp_path: Path) -> None:
    process = start_pull(
        repo,
        tmp_path,
        HF_ENDPOINT="http://hub.example",
        HTTP_PROXY=repo.url,
        NO_PROXY="",
    )
    assert process.communicate(timeout=60)[0].endswith("success None\n")


def test_pull_refreshes_an_expired_login_token(repo: FakeHub, tmp_path: Path) -> None:
    repo.repos["user/repo-gguf"].private = True
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_expired")
    (tmp_path / "hf" / "stored_tokens").write_text(
        "[me]\nhf_token = hf_expired\nrefresh_token = r\nexpires_at = 1\n"
    )
    output, errors = start_pull(repo, tmp_path).communicate(timeout=60)
    assert output.endswith("success None\n"), errors
    assert set(repo.tokens) <= {"", repo.TOKEN}


def test_pull_killed_at_any_write_leaves_the_old_or_the_new_version(
    hub: FakeHub, tmp_path: Path
) -> None:
    for age in (b"GGUF old", b"GGUF new"):
        files = {f"x-Q4_K_M-0000{n}-of-00002.gguf": age * (400 + n) for n in (1, 2)}
        hub.add("User/Repo-GGUF", files)
        if age == b"GGUF old":
            fetch()
    assert int(crashing.run("pull", tmp_path / "hf")) > 25
    assert fetch()[0].path.read_bytes()[:8] == b"GGUF new"


@pytest.mark.parametrize(
    "faults",
    [
        [cut_after(2 << 20)],
        [cut_after(1 << 20), cut_after(0), status(503), cut_after(5)],
        [status(429, Retry_After="0")],
        [status(500), status(502)],
        [cut_after(1 << 20), without_ranges],
        [cut_after(1 << 20), status(416)],
    ],
    ids=[
        "cut",
        "cut and busy",
        "too many",
        "server errors",
        "no ranges",
        "range refused",
    ],
)
def test_pull_survives_transient_faults(repo: FakeHub, faults: list[Fault]) -> None:
    repo.faults["x-Q4_K_M.gguf"] = list(faults)
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA
    assert repo.faults["x-Q4_K_M.gguf"] == []


@pytest.mark.parametrize("stated", [{"Content-Range": "bytes 7-1006/9999"}, {}])
def test_pull_rejects_a_range_that_was_not_requested(
    repo: FakeHub, stated: dict[str, str]
) -> None:
    repo.faults["x-Q4_K_M.gguf"] = [
        cut_after(1 << 20),
        lambda handler, data: handler.say(206, stated, data[7:1007]),
    ]
    with pytest.raises(
        PullError, match=rf"asked for bytes from {1 << 20} on, but sent"
    ):
        fetch()


def test_pull_resumes_a_cut_download(
    repo: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.faults["x-Q4_K_M.gguf"] = [
        cut_after(1 << 20),
        *[status(503)] * downloads.TRIES,
    ]
    with pytest.raises(PullError, match=r"503.*continues where it stopped"):
        fetch()
    assert nothing_has_a_name()
    assert [name for name in stored() if name.endswith(".incomplete")] != []
    repo.requests.clear()
    # The disk has room only for the missing bytes and the 64 MiB that must stay free.
    monkeypatch.setattr(
        own_store, "free_bytes", lambda folder: (64 << 20) + (2 << 20) + 99
    )
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA
    assert repo.gets("x-Q4_K_M.gguf") == [f"bytes={1 << 20}-"]
    assert not [name for name in stored() if name.endswith(".incomplete")]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (other_bytes(DATA[:-1] + b"?"), "different digest"),
        (
            other_bytes(DATA[:-1]),
            f"should have {len(DATA)} bytes, but the server sends {len(DATA) - 1}",
        ),
        (endless, "sends more"),
        (redirect_loop, "redirects"),
        (status(403), "licence"),
        (status(429), "rate limit is reached"),
        (cut_after(10), "failed"),
    ],
    ids=["sha", "size", "endless", "redirect loop", "403", "429", "cut"],
)
def test_permanent_fault_fails_the_pull_with_its_reason_and_adds_no_name(
    repo: FakeHub, fault: Fault, words: str
) -> None:
    repo.faults["x-Q4_K_M.gguf"] = [fault] * 20
    with pytest.raises(PullError, match=words):
        fetch()
    assert nothing_has_a_name()
    repo.faults.clear()
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA


def test_pull_restarts_once_after_a_damaged_partial_file(repo: FakeHub) -> None:
    folder = hub_cache() / "models--User--Repo-GGUF" / "blobs"
    folder.mkdir(parents=True)
    (
        folder / (repo.repos["user/repo-gguf"].sha256("x-Q4_K_M.gguf") + ".incomplete")
    ).write_bytes(b"?" * 1000)
    entry, _ = fetch()
    assert entry.path.read_bytes() == DATA
    assert repo.gets("x-Q4_K_M.gguf") == ["bytes=1000-", ""]


def test_pull_retries_the_listing_and_waits_as_long_as_retry_after(
    repo: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.listing_faults = [(503, {}), (429, {"Retry-After": "0"})]
    assert fetch()[0].name == NAME
    repo.listing_faults = [(500, {})] * 20
    with pytest.raises(PullError, match="500"):
        fetch()
    waits: list[float] = []

    monkeypatch.setattr(downloads.time, "sleep", waits.append)
    monkeypatch.setattr(downloads, "MAX_WAIT_S", 30.0)
    repo.listing_faults = [(429, {"Retry-After": "7"}), (429, {"Retry-After": "3600"})]
    downloads.read_repository("user/repo-gguf")
    assert waits == [7.0, 30.0]


def test_pull_explains_private_gated_and_unknown_repositories(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("u/private", {"x-Q4_0.gguf": b"1"}, private=True)
    hub.add("u/gated", {"x-Q4_0.gguf": b"1"}, gated=True)
    with pytest.raises(ModelNotFoundError, match=r"no repository 'u/none'.*HF_TOKEN"):
        fetch("u/none")
    with pytest.raises(
        ModelNotFoundError, match=r"private: .*HF_TOKEN \(no token is set"
    ):
        fetch("u/private")
    with pytest.raises(
        PullError,
        match=r"gated: accept its licence at http://127\.0\.0\.1:\d+/u/gated, .* set HF_TOKEN",
    ):
        fetch("u/gated")
    monkeypatch.setenv("HF_TOKEN", f" {hub.TOKEN}\n")
    assert fetch("u/private")[0].path.read_bytes() == b"1"
    with pytest.raises(
        PullError, match=r"gated.*HF_TOKEN.*a token is set, but does not allow this"
    ) as refused:
        fetch("u/gated")
    assert hub.TOKEN not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(PullError, match="401"):
        fetch("u/private")
    monkeypatch.delenv("HF_TOKEN")  # only the stored token is used from here on
    hub.tokens.clear()
    (tmp_path / "hf" / "token").write_text(f"{hub.TOKEN}\n")
    assert fetch("u/private")[0].size_bytes == 1
    assert set(hub.tokens) == {hub.TOKEN}
    hub.add("u/hidden", {"x-Q4_0.gguf": b"1"})
    hub.repos["u/hidden"].hidden.add("x-Q4_0.gguf")
    with pytest.raises(
        ModelNotFoundError, match=r"no file 'x-Q4_0\.gguf' in 'u/hidden'"
    ):
        fetch("u/hidden")


def test_pull_checks_free_disk_space_before_the_first_byte(
    repo: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_store, "free_bytes", lambda folder: (64 << 20) + (1 << 20))
    with pytest.raises(
        PullError, match=r"needs 3\.00MiB .* has 65\.0MiB free; delete files"
    ):
        fetch()
    assert not repo.gets("x-Q4_K_M.gguf") and stored() == []
    monkeypatch.setattr(
        own_store, "free_bytes", lambda folder: (64 << 20) + len(DATA) + 99
    )
    assert fetch()[0].name == NAME
    monkeypatch.setattr(own_store, "free_bytes", lambda folder: 0)
    assert fetch()[1][-1].status == "success"  # nothing is missing


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_pull_reports_a_disk_error_during_the_download_and_can_be_repeated(
    repo: FakeHub, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(_file: HubFile, begin: int, _chunk: bytes) -> None:
        if begin > 1 << 20:
            raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(downloads, "_check_chunk", full)
        words = rf"\(.* are missing\) cannot be written to .* \({os.strerror(code)}\); make room on the disk, or make"
        with pytest.raises(PullError, match=words):
            fetch()
    assert nothing_has_a_name()
    assert fetch()[0].path.read_bytes() == DATA
