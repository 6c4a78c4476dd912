"""Tests the folder of kept contexts. A written block is read back unchanged or treated
as missing.

Several stores that use one folder share its limit.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from moegguf.engine import kv_block_store
from moegguf.engine.kv_block_store import About, KvBlockStore, stored_blocks
from moegguf.quantities import GIB, MIB

ABOUT = About("demo", 128, 64)
NAMES = [f"{i:02x}" * 16 for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "contexts"


@pytest.fixture
def store(folder: Path) -> KvBlockStore:
    return KvBlockStore(folder, GIB)


def path_of(folder: Path, name: str) -> Path:
    return folder / name[:2] / name


def test_block_is_read_back_unchanged_by_two_stores(
    store: KvBlockStore, folder: Path
) -> None:
    data = os.urandom(100_000)
    assert store.write(NAMES[0], ABOUT, [data[:10], data[10:]])
    for each in (store, KvBlockStore(folder, GIB)):
        assert each.holds(NAMES[0])
        assert bytes(each.read(NAMES[0]) or b"") == data
        assert [(block.path.name, block.about) for block in stored_blocks(folder)] == [
            (NAMES[0], ABOUT)
        ]
    # The head may be long: it lists all cells of an image, which are compared before
    # the context is restored.
    file = store.open(NAMES[0], 50_000)
    assert (
        file is not None
        and file.n_bytes - file.begin == len(data)
        and file.head[:50_000] == data[:50_000]
    )
    assert store.read(NAMES[1]) is None
    store.delete(NAMES[0])
    assert not store.holds(NAMES[0])


def test_block_is_written_only_if_its_header_can_be_read_back(
    store: KvBlockStore,
) -> None:
    lengths = range(
        kv_block_store.MOST_HEADER_BYTES - 60, kv_block_store.MOST_HEADER_BYTES
    )
    written = [
        n for n in lengths if store.write(NAMES[0], About("m" * n, 128, 64), [b"one"])
    ]
    assert written and written[-1] < lengths[-1]
    for n in (written[0], written[-1]):
        store.write(NAMES[0], About("m" * n, 128, 64), [b"one"])
        assert store.read(NAMES[0]) == b"one"


def test_block_files_are_readable_only_by_their_owner(
    store: KvBlockStore, folder: Path
) -> None:
    store.write(NAMES[0], ABOUT, [b"secret"])
    folder.chmod(0o755)
    KvBlockStore(folder, GIB)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))
    }
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "a flipped bit of what is said about it": lambda data: (
        data[:50] + bytes([data[50] ^ 1]) + data[51:]
    ),
    "truncated": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "zeros at the end": lambda data: data[:4096] + bytes(len(data) - 4096),
    "another version": lambda data: b"moegguf\x02" + data[8:],
    "a header that is longer than the file": lambda data: (
        data[:24] + b"\xff\xff\xff\xff" + data[28:]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_block_is_missing_and_deleted(
    store: KvBlockStore, folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    store.write(NAMES[0], ABOUT, [os.urandom(10_000)])
    path = path_of(folder, NAMES[0])
    path.write_bytes(damage(path.read_bytes()))
    list(stored_blocks(folder))
    assert store.read(NAMES[0]) is None
    assert not path.exists()


STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a block": lambda path: path.symlink_to(path.with_suffix(".moved")),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_block_that_is_not_a_regular_file_is_missing_and_replaced(
    store: KvBlockStore, folder: Path, make: Callable[[Path], object]
) -> None:
    store.write(NAMES[0], ABOUT, [b"one"])
    path = path_of(folder, NAMES[0])
    path.rename(path.with_suffix(".moved"))
    make(path)
    assert store.open(NAMES[0]) is None
    assert [block.path for block in stored_blocks(folder)] == [
        path.with_suffix(".moved")
    ]
    assert store.read(NAMES[0]) is None and not path.is_symlink()
    make(path)
    (folder / ".block.x").unlink(missing_ok=True)
    os.mkfifo(folder / ".block.x")
    again = KvBlockStore(folder, None)
    assert again.write(NAMES[0], ABOUT, [b"two"]) and again.read(NAMES[0]) == b"two"


def test_block_of_another_user_is_missing(
    store: KvBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(NAMES[0], ABOUT, [b"one"])
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert store.open(NAMES[0]) is None and store.read(NAMES[0]) is None


def test_block_renamed_to_another_name_is_missing(
    store: KvBlockStore, folder: Path
) -> None:
    store.write(NAMES[1], ABOUT, [b"two"])
    path_of(folder, NAMES[2]).parent.mkdir()
    path_of(folder, NAMES[1]).rename(path_of(folder, NAMES[2]))
    assert store.read(NAMES[2]) is None


def test_store_deletes_least_recently_used_blocks_first(folder: Path) -> None:
    store, part = KvBlockStore(folder, 10 * MIB), os.urandom(MIB)
    for name in NAMES[:9]:
        store.write(name, ABOUT, [part])
        os.utime(path_of(folder, name), (0, 0))
    store.touch([NAMES[1], NAMES[0], NAMES[30]])
    for name in NAMES[9:14]:
        store.write(name, ABOUT, [part])
        assert sum(block.n_bytes for block in stored_blocks(folder)) <= 10 * MIB
    left = {block.path.name for block in stored_blocks(folder)}
    assert {NAMES[0], NAMES[1], *NAMES[9:14]} <= left
    assert not set(NAMES[2:6]) & left
    used_s = {block.path.name: block.used_s for block in stored_blocks(folder)}
    # `touch` treats NAMES[1] as the prefix of NAMES[0], so NAMES[1] is kept longer.
    assert used_s[NAMES[1]] > used_s[NAMES[0]]
    # Refused, because the block is larger than the limit of the whole store.
    assert not store.write(NAMES[20], ABOUT, [bytes(11 * MIB)])
    assert {block.path.name for block in stored_blocks(folder)} == left


def test_two_stores_together_stay_below_the_limit(folder: Path) -> None:
    stores, part = [KvBlockStore(folder, 20 * MIB) for _ in range(2)], os.urandom(MIB)
    for i, name in enumerate(NAMES):
        stores[i % 2].write(name, ABOUT, [part])
    left = list(stored_blocks(folder))
    # A store counts another store's blocks only from time to time.
    assert sum(block.n_bytes for block in left) <= 22 * MIB
    # The second store does not find a block that the first one has deleted.
    for block in left:
        stores[0].delete(block.path.name)
        assert stores[1].read(block.path.name) is None
    assert not stores[1].is_off


def test_auto_limit_is_a_tenth_of_the_free_disk_up_to_16_gib(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs_result((4096, 4096, 10**9, 10**6, 10**6, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    KvBlockStore(folder, GIB).write(NAMES[0], ABOUT, [bytes(10 * MIB)])
    assert (
        KvBlockStore(folder, None).limit_bytes // MIB
        == (4096 * 10**6 + 10 * MIB) // 10 // MIB
    )
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: os.statvfs_result((4096, 4096, 0, 10**9, 10**9, 0, 0, 0, 0, 255)),
    )
    assert KvBlockStore(folder, None).limit_bytes == 16 * GIB


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT]
)
def test_disk_error_turns_the_store_off_with_one_warning(
    store: KvBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store.write(NAMES[0], ABOUT, [b"one"])
    monkeypatch.setattr(
        kv_block_store.os, "replace", Mock(side_effect=OSError(code, os.strerror(code)))
    )
    with pytest.warns(
        UserWarning, match=f"not kept on disk: .*{os.strerror(code)}"
    ) as warned:
        assert not any(store.write(name, ABOUT, [b"two"]) for name in NAMES[1:3])
    assert len(warned) == 1
    assert store.is_off
    assert store.read(NAMES[0]) is None
    assert path_of(folder, NAMES[0]).exists(), "the block is intact"
    assert not list(folder.glob(".block.*"))


def test_unusable_or_foreign_folder_turns_the_store_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept on disk"):
        assert KvBlockStore(tmp_path / "file" / "contexts", GIB).is_off
    KvBlockStore(folder, GIB)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert KvBlockStore(folder, GIB).is_off


def test_store_removes_leftovers_of_a_killed_writer(folder: Path) -> None:
    folder.mkdir()
    (folder / ".block.x").write_bytes(b"half of one")
    KvBlockStore(folder, GIB)
    assert not list(folder.glob(".block.*"))
