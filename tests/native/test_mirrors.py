"""Tests mirrors: copies of a model's files, which are usually on other drives.

The tests check how reads are divided among the copies, and which copies the store
rejects or stops using.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from fake_model import FakeModel, Open, make_model

from moegguf.errors import ExpertIOError, OptionError
from moegguf.native.store import Store, StoreContext
from moegguf.quantities import Link
from moegguf.testing.library import (
    arm_fault,
    count_operations,
    limit_faults,
    slow_drive,
)

N_EXPERT = 8
N_SLOTS = 5


Slow = Callable[[Path, float], None]
BYTES_PER_S = 1e9


@pytest.fixture(autouse=True)
def no_limits() -> Iterator[None]:
    """Lets injected faults affect all files again after each test."""
    yield
    limit_faults(None)


@pytest.fixture
def slow() -> Iterator[Slow]:
    """Yields `slow(path, seconds)`. From this call to the end of the test, a read of
    the file takes this latency plus 1 ns per byte."""
    slowed = set[Path]()

    def slow_one(path: Path, latency_s: float) -> None:
        slowed.add(path)
        slow_drive(path, Link(BYTES_PER_S, latency_s))

    yield slow_one
    for path in slowed:
        slow_drive(path, None)


@pytest.fixture
def mirror(fake: FakeModel) -> list[Path]:
    return copies(fake, "mirror")


def copies(fake: FakeModel, folder: str) -> list[Path]:
    """Copies the model's files into a new folder beside the first file. Returns the
    paths of the copies."""
    to = fake.paths[0].parent / folder
    to.mkdir()
    return [Path(shutil.copy(path, to / path.name)) for path in fake.paths]


def read_all(
    fake: FakeModel, store: Store, context: StoreContext, rounds: int = 2
) -> None:
    """Routes to two experts at a time, until every expert of every layer has been used
    `rounds` times.

    Checks the experts' bytes.
    """
    for _ in range(rounds):
        for first in range(0, N_EXPERT, 2):
            fake.token(store, context, [first, first + 1])


def bytes_of(store: Store) -> list[int]:
    return [drive["bytes"] for drive in store.drives()]


def test_store_without_mirrors_reads_every_byte_from_one_drive(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, N_SLOTS)
    read_all(fake, store, context)
    store.drain(10)
    counters, (drive,) = store.counters(), store.drives()
    assert drive["bytes"] == counters["bytes_missed"] + counters["bytes_prefetched"] > 0
    assert drive["bytes_per_s"] > 0
    assert not drive["dropped"]


def test_simulated_store_lists_no_drives(fake: FakeModel, open_store: Open) -> None:
    store, _ = open_store(fake, N_SLOTS, simulate=True)
    assert store.drives() == []


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("n_mirrors", [1, 2])
def test_store_reads_from_every_copy_and_gets_the_files_bytes(
    tmp_path: Path, open_store: Open, slow: Slow, n_mirrors: int, direct: bool
) -> None:
    fake = make_model(tmp_path, n_shards=2, n_embd=256, n_ff=64)
    mirrors = [copies(fake, f"mirror-{n}") for n in range(n_mirrors)]
    for path in [*fake.paths, *(path for mirror in mirrors for path in mirror)]:
        slow(path, 1e-3)
    store, context = open_store(fake, N_SLOTS, mirrors=mirrors, direct=direct)
    read_all(fake, store, context)
    store.drain(10)
    counters, read = store.counters(), bytes_of(store)
    assert sum(read) == counters["bytes_missed"] + counters["bytes_prefetched"]
    assert min(read) > sum(read) / 20


def test_slower_drive_gets_fewer_reads(
    fake: FakeModel, mirror: list[Path], open_store: Open, slow: Slow
) -> None:
    slow(fake.paths[0], 1e-3)
    slow(mirror[0], 6e-3)
    store, context = open_store(fake, N_SLOTS, mirrors=[mirror])
    read_all(fake, store, context, rounds=4)
    own, other = bytes_of(store)
    assert 0 < other < own


def test_drive_that_becomes_fast_gets_reads_again(
    fake: FakeModel, mirror: list[Path], open_store: Open, slow: Slow
) -> None:
    slow(mirror[0], 5e-3)
    store, context = open_store(fake, N_SLOTS, readers=1, mirrors=[mirror])
    for first in range(0, N_EXPERT, 2):
        fake.token(store, context, [first, first + 1])
    before = store.drives()[1]["reads"]
    slow(mirror[0], 0)
    for n in range(200):
        for il in range(4):
            context.acquire(il, [n % 4 * 2, n % 4 * 2 + 1])
    assert store.drives()[1]["reads"] > before + 100


@pytest.mark.parametrize(
    "reason", [errno.EIO, errno.ENOENT, errno.ESTALE], ids=errno.errorcode.get
)
@pytest.mark.parametrize("index", [0, 1], ids=["its own file", "the mirror"])
def test_failing_drive_is_dropped_and_the_other_copy_is_read(
    fake: FakeModel,
    mirror: list[Path],
    open_store: Open,
    slow: Slow,
    index: int,
    reason: int,
) -> None:
    for path in (fake.paths[0], mirror[0]):
        slow(path, 1e-3)
    store, context = open_store(fake, N_SLOTS, mirrors=[mirror])
    fake.token(store, context, [0, 1])
    failing = [fake.paths[0], mirror[0]][index]
    limit_faults(failing)
    arm_fault("read", 1, sticky=True, errno=reason)
    read_all(fake, store, context)
    store.drain(10)
    drives = store.drives()
    assert [drive["dropped"] for drive in drives] == [index == 0, index == 1]
    assert (
        str(failing) in drives[index]["note"]
        and os.strerror(reason) in drives[index]["note"]
    )
    assert store.counters()["read_errors"] == 0
    read = bytes_of(store)
    read_all(fake, store, context)
    assert bytes_of(store)[index] == read[index]
    assert bytes_of(store)[1 - index] > read[1 - index]


def test_single_read_error_is_retried_and_drops_no_drive(
    fake: FakeModel, mirror: list[Path], open_store: Open
) -> None:
    store, context = open_store(fake, N_SLOTS, mirrors=[mirror])
    arm_fault("read", 3)
    read_all(fake, store, context)
    assert store.counters()["read_retries"] == 1
    assert not any(drive["dropped"] for drive in store.drives())


def test_failure_of_the_last_copy_fails_the_event_and_later_events_read_again(
    fake: FakeModel, mirror: list[Path], open_store: Open
) -> None:
    store, context = open_store(fake, N_SLOTS, mirrors=[mirror])
    arm_fault("read", 1, sticky=True)
    with pytest.raises(ExpertIOError, match="Input/output error"):
        context.acquire(2, [0, 1])
    assert context.take_failure() is not None
    store.drain(10)
    assert sum(drive["dropped"] for drive in store.drives()) == 1
    arm_fault("read", 0)
    read_all(fake, store, context)


@pytest.mark.parametrize("kind", ["read", "stat", "short_read", "eintr"])
def test_fault_at_any_operation_on_a_mirror_loses_no_bytes(
    fake: FakeModel, open_store: Open, kind: str
) -> None:
    paths = copies(fake, "mirror")
    dropped = 0
    for nth in count(1):
        limit_faults(paths[0])
        arm_fault(kind, nth, sticky=kind != "eintr")
        store, context = open_store(fake, N_SLOTS, mirrors=[paths], readers=2)
        read_all(fake, store, context, rounds=1)
        store.drain(10)
        assert store.counters()["read_errors"] == 0
        dropped += store.drives()[1]["dropped"]
        is_met = count_operations(kind) >= nth
        arm_fault(kind, 0)
        store.close()
        if not is_met or nth > 24:
            break
    assert nth > 1
    assert (dropped > 0) == (kind in ("read", "stat"))


def test_drive_failing_under_concurrent_reads_loses_no_bytes(
    fake: FakeModel, mirror: list[Path], open_store: Open
) -> None:
    store, context = open_store(fake, 2 * N_EXPERT, mirrors=[mirror], readers=8)
    limit_faults(mirror[0])
    arm_fault("read", 10, sticky=True)
    for n in range(60):
        store.prefetch([(n + 1) % 4] * 3, [n % 8, (n + 3) % 8, (n + 5) % 8])
        fake.acquire(store, context, n % 4, [n % 8, (n + 1) % 8])
    store.drain(10)
    assert store.drives()[1]["dropped"]
    assert store.counters()["read_errors"] == 0


CHANGES: dict[str, Callable[[Path], object]] = {
    "shorter": lambda path: os.truncate(path, path.stat().st_size // 2),
    "overwritten": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("index", [0, 1], ids=["its own file", "the mirror"])
def test_copy_that_is_written_to_is_dropped(
    fake: FakeModel,
    mirror: list[Path],
    open_store: Open,
    slow: Slow,
    index: int,
    change: Callable[[Path], object],
) -> None:
    for path in (fake.paths[0], mirror[0]):
        slow(path, 1e-3)
    store, context = open_store(fake, N_SLOTS, mirrors=[mirror])
    fake.token(store, context, [0, 1])
    change([fake.paths[0], mirror[0]][index])
    read_all(fake, store, context)
    assert "was written to after the model was loaded" in store.drives()[index]["note"]
    assert store.counters()["read_errors"] == 0


def test_store_rejects_a_mirror_of_another_size(
    fake: FakeModel, mirror: list[Path], open_store: Open
) -> None:
    with mirror[0].open("ab") as file:
        file.write(b"x")
    n_bytes = len(fake.contents[0])
    with pytest.raises(
        OptionError,
        match=rf"'{mirror[0]}' has {n_bytes + 1} bytes instead of {n_bytes}: copy",
    ):
        open_store(fake, N_SLOTS, mirrors=[mirror])


def test_store_rejects_a_mirror_with_other_weights(
    fake: FakeModel, mirror: list[Path], open_store: Open
) -> None:
    matrix = fake.layout.layers[2].matrices[1]
    data = bytearray(mirror[0].read_bytes())
    end = matrix.offset + matrix.n_expert * matrix.expert_bytes
    data[matrix.offset : end] = bytes(255 - byte for byte in data[matrix.offset : end])
    mirror[0].write_bytes(data)
    with pytest.raises(
        OptionError,
        match=r"has other bytes at \d+: copy .* there again, or leave the mirror out",
    ):
        open_store(fake, N_SLOTS, mirrors=[mirror])


@pytest.mark.parametrize(
    "link", [os.symlink, os.link], ids=["symbolic link", "hard link"]
)
def test_store_rejects_a_mirror_that_links_to_the_models_file(
    fake: FakeModel,
    tmp_path: Path,
    open_store: Open,
    link: Callable[[Path, Path], None],
) -> None:
    other = tmp_path / "other.bin"
    link(fake.paths[0], other)
    with pytest.raises(OptionError, match=r"other\.bin' is that file"):
        open_store(fake, N_SLOTS, mirrors=[[other]])


def test_missing_mirror_is_dropped_when_the_store_opens(
    fake: FakeModel, open_store: Open
) -> None:
    missing = fake.paths[0].with_name("unplugged.bin")
    store, context = open_store(fake, N_SLOTS, mirrors=[[missing]])
    drive = store.drives()[1]
    assert drive["dropped"] and "unplugged.bin': No such file" in drive["note"]
    read_all(fake, store, context)
    assert bytes_of(store)[1] == 0


def test_unreadable_mirror_is_dropped_when_the_store_opens(
    fake: FakeModel, mirror: list[Path], open_store: Open
) -> None:
    limit_faults(mirror[0])
    arm_fault("read", 1, sticky=True)
    store, context = open_store(fake, N_SLOTS, mirrors=[mirror])
    assert "Input/output error" in store.drives()[1]["note"]
    read_all(fake, store, context)
