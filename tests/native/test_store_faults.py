"""Tests operations of the store (TYPED) that fail once or permanently, and files that
change while a store is open.

In each case, a routing event finds the file's bytes in its slots, or raises a typed
error.
"""

import errno
import gc
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel, Open, make_model
from waiting import until

from moegguf.errors import AllocationError, ExpertIOError, MoeggufError
from moegguf.native import abi
from moegguf.native.store import Store, StoreOptions
from moegguf.testing.library import arm_fault, count_operations

TYPED = {
    "open": ExpertIOError, "read": ExpertIOError, "stat": ExpertIOError, "alloc": AllocationError,
    "thread": AllocationError, "short_read": ExpertIOError, "eintr": ExpertIOError,
}  # fmt: skip


def n_files() -> int:
    """Counts this process's open file descriptors after a garbage collection, which
    closes files of earlier tests."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def n_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def n_seen(kind: str) -> int:
    return count_operations(kind)


def story(
    fake: FakeModel, options: StoreOptions, kind: str
) -> tuple[MoeggufError | None, int]:
    """Opens a store of 5 slots, and routes up to six events until one fails. `kind` is
    the armed kind of fault.

    Returns the error (None: nothing failed), and the number of operations of `kind`. If
    the store has opened, disarms the fault and asserts that later events find the
    file's bytes in their slots.
    """
    try:
        store = Store(fake.layout, 5, options)
    except MoeggufError as error:
        return error, n_seen(kind)
    failed = None
    context = store.context
    try:
        try:
            for n in range(6):
                store.prefetch([(n + 1) % 4], [n])
                fake.acquire(store, context, n % 4, [n, (n + 1) % 8])
        except MoeggufError as error:
            failed = error
        store.drain(10)
        seen = n_seen(kind)
        arm_fault(kind, 0)
        taken = context.take_failure()
        assert (taken is None) == (failed is None)
        for first in range(0, 8, 2):
            fake.token(store, context, [first, first + 1])
    finally:
        store.close()
    return failed, seen


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("kind", TYPED)
def test_fault_at_any_operation_is_typed_and_leaks_no_file_or_thread(
    tmp_path: Path, kind: str, sticky: bool, direct: bool
) -> None:
    fake = make_model(tmp_path, n_shards=2, n_embd=256, n_ff=64)
    options = StoreOptions(repack=False, readers=2, direct=direct)
    files, threads, errors = n_files(), n_threads(), 0
    for nth in count(1):
        arm_fault(kind, nth, sticky=sticky)
        failed, seen = story(fake, options, kind)
        errors += failed is not None
        assert failed is None or isinstance(failed, TYPED[kind]), repr(failed)
        if seen < nth:
            break
    assert nth > 1, "the fault was never reached"
    assert n_files() <= files
    # A joined thread may still be listed for a moment.
    until(lambda: n_threads() <= threads)
    harmless = {"short_read"} | (set() if sticky else {"read", "eintr"})
    assert (errors == 0) == (kind in harmless)


def test_permanent_disk_error_is_raised_with_its_reason(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 4)
    arm_fault("read", 1, sticky=True, errno=errno.EIO)
    with pytest.raises(ExpertIOError, match="Input/output error"):
        context.acquire(2, [0, 1])
    failure = context.take_failure()
    assert failure.status == abi.IO
    assert store.counters()["read_errors"] > 0


def test_store_falls_back_to_buffered_reads_if_a_direct_read_is_refused(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 4)
    was_direct = store.info()["direct"]
    arm_fault("read", 1, errno=errno.EINVAL)
    fake.token(store, context, [0, 1])
    assert was_direct == 0 or store.info()["direct"] == 0


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
def test_fill_continues_after_an_expert_that_cannot_be_read(
    fake: FakeModel, open_store: Open, sticky: bool
) -> None:
    arm_fault("stat", 5, sticky=sticky)
    store, context = open_store(fake, 32)
    store.drain(5)
    arm_fault("stat", 0)
    n_there = int((store.residency() == 2).sum())
    assert n_there < 5 if sticky else n_there == 31
    for first in range(0, 8, 2):
        fake.token(store, context, [first, first + 1])


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def overwrite_and_hide(path: Path) -> None:
    """Overwrites a file with zeros and restores its access and modification times.

    Only the change time reveals the write.
    """
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def hidden_and(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns a function that overwrites a file, restores its times, and then calls
    `change`.

    `change` itself sets the file's change time, so the change time is no evidence of
    the write.
    """

    def overwrite_and_change(path: Path) -> None:
        overwrite_and_hide(path)
        change(path)

    return overwrite_and_change


HIDDEN: dict[str, Callable[[Path], object]] = {
    "hidden with another mode": lambda path: path.chmod(0o600),
    "hidden with a link more": lambda path: os.link(path, path.with_suffix(".link")),
    "hidden with another name": lambda path: path.rename(path.with_suffix(".moved")),
    "hidden with its name gone": lambda path: path.unlink(),
}
CHANGES: dict[str, Callable[[Path], object]] = {
    "shorter": cut_short, "overwritten": overwrite, "hidden": overwrite_and_hide,
    **{name: hidden_and(change) for name, change in HIDDEN.items()},
}  # fmt: skip


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modified_file_is_no_longer_read(
    fake: FakeModel, open_store: Open, direct: bool, change: Callable[[Path], object]
) -> None:
    store, context = open_store(fake, 4, direct=direct)
    fake.acquire(store, context, 3, [0, 1])
    fake.acquire(store, context, 0, [0, 1])
    change(fake.paths[0])
    # Needs no read, because both experts are in slots.
    fake.acquire(store, context, 3, [0, 1])
    for _ in range(2):
        with pytest.raises(
            ExpertIOError,
            match=f"{fake.paths[0].name}' was written to after the model was loaded",
        ):
            context.acquire(3, [6, 7])
        assert context.take_failure() is not None


def test_file_with_one_overwritten_matrix_and_another_mode_is_no_longer_read(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 4)
    fake.token(store, context, [0, 1])
    path, matrix = fake.paths[0], fake.layout.layers[2].matrices[1]
    before = path.stat()
    data = bytearray(path.read_bytes())
    end = matrix.offset + matrix.n_expert * matrix.expert_bytes
    data[matrix.offset : end] = bytes(255 - byte for byte in data[matrix.offset : end])
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(0o600)
    with pytest.raises(
        ExpertIOError, match="was written to after the model was loaded"
    ):
        context.acquire(3, [6, 7])


def test_chmod_does_not_hide_a_later_write(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 4)
    path = fake.paths[0]
    path.chmod(0o600)
    fake.token(store, context, [6, 7])
    before = path.stat()
    with path.open("r+b") as file:
        # The store compares only samples of the file. None of them covers this
        # position, so none shows the write.
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(
        ExpertIOError, match="was written to after the model was loaded"
    ):
        context.acquire(0, [0, 1])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_open_store_reads_the_original_of_a_deleted_or_replaced_file(
    fake: FakeModel, open_store: Open, direct: bool
) -> None:
    store, context = open_store(fake, 4, direct=direct)
    path = fake.paths[0]
    path.chmod(0o600)
    fake.token(store, context, [6, 7])
    path.rename(path.with_suffix(".moved"))
    fake.token(store, context, [4, 5])
    path.with_suffix(".moved").rename(path)
    other = path.with_suffix(".new")
    other.write_bytes(bytes(len(fake.contents[0])))
    other.rename(path)
    fake.token(store, context, [0, 1])
    path.unlink()
    fake.token(store, context, [2, 3])


@pytest.mark.parametrize("change", ["missing", "folder", "empty"])
def test_missing_file_folder_or_empty_file_raises_expert_io_error(
    fake: FakeModel, open_store: Open, change: str
) -> None:
    path = fake.paths[0]
    path.unlink()
    if change == "folder":
        path.mkdir()
    elif change == "empty":
        path.touch()

    def use() -> Any:
        return open_store(fake, 4)[1].acquire(0, [0, 1])

    with pytest.raises(ExpertIOError):
        use()
