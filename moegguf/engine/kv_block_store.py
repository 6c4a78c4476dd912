"""A folder of blocks, which are parts of computed contexts. Each block is a file. The
caller names it by a hash of everything that its bytes depend on.

A block is written under a temporary name and then renamed. It contains a checksum of
its name and bytes. A block that is found to be damaged, truncated, misnamed or not a
regular file is treated as missing; `read` deletes it. Therefore blocks need not be
flushed to disk. Several processes may share a folder; a file that another process has
deleted is also treated as missing. An error while the folder is opened or a block is
written turns the store off, with one warning. States of sequences are read from their
files into a KV cache (`native/kv_blocks.cpp`). This module knows nothing about models,
or about the contents of blocks.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import stat
import struct
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import xxhash

from moegguf.atomic_write import locked_temporary, remove_abandoned
from moegguf.native import abi, library
from moegguf.quantities import GIB
from moegguf.regular_file import open_regular, read_regular
from moegguf.settings import cache_folder

MAGIC = b"moegguf\x03"
DIGEST_BYTES = 16
# The automatic limit: a tenth of the disk space that is free or used by blocks, at most
# 16 GiB.
MOST_AUTO_BYTES, AUTO_SHARE = 16 * GIB, 10
# If room is needed, blocks are deleted until they use at most 9/10 of the limit.
KEPT_PARTS = (9, 10)
# Other processes write too, so blocks are counted again before more than 1/20 of the
# limit has been written since the last count.
UNCOUNTED_PARTS = 20
MOST_HEADER_BYTES = 4096  # magic, checksum, length and JSON together
# Magic, checksum, length of the JSON in bytes.
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}sI")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class About:
    """The header of a block: the model's name for display, and two token counts."""

    model: str
    # Number of tokens from the beginning of the context to the end of the block.
    n_tokens: int
    # number of tokens that this block adds to the total shown to users. 0: the block
    # has no tokens, or other blocks add them (it holds cells of a sliding window, or a
    # state in addition to blocks of cells).
    n_own_tokens: int


@dataclass(frozen=True)
class StoredBlock:
    """The file of a block whose header has been read. The block is not verified: the
    digest was not compared with the bytes."""

    path: Path
    about: About
    n_bytes: int  # size of the whole file in bytes
    used_s: float  # time of the last use, in seconds since 1970
    begin: int  # offset of the state in the file
    head: bytes  # first bytes of the state
    # bytes that the digest covers before the state: the file's name and the JSON
    # header.
    prefix: bytes
    digest: bytes  # digest in the header, of `prefix` and the whole state


def default_folder() -> Path:
    """Returns the folder in which computed contexts are kept by default."""
    return cache_folder() / "contexts"


def stored_blocks(folder: Path) -> Iterator[StoredBlock]:
    """Returns an iterator over the blocks in a folder that have valid headers, without
    verifying their bytes. There are none if the folder does not exist."""
    return filter(None, (_opened(path) for path, _ in _files(folder)))


def _opened(path: Path, n_head: int = 0) -> StoredBlock | None:
    with (
        suppress(OSError, ValueError, TypeError, struct.error),
        open_regular(path, own=True) as file,
    ):
        first = file.read(MOST_HEADER_BYTES + n_head)
        info = os.fstat(file.fileno())
        magic, digest, n_about = _HEADER.unpack_from(first)
        begin = _HEADER.size + n_about
        if magic == MAGIC and begin <= min(info.st_size, MOST_HEADER_BYTES):
            about = About(*json.loads(first[_HEADER.size : begin]))
            prefix = path.name.encode() + first[_HEADER.size : begin]
            return StoredBlock(
                path,
                about,
                info.st_size,
                info.st_mtime,
                begin,
                first[begin:],
                prefix,
                digest,
            )
    return None


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for part in folder.glob("[0-9a-f][0-9a-f]"):
        for path in part.iterdir() if part.is_dir() else ():
            with suppress(OSError):
                info = path.lstat()
                if stat.S_ISREG(info.st_mode):
                    yield path, info


def _digest(prefix: bytes, parts: Sequence[Buffer]) -> bytes:
    digest = xxhash.xxh3_128(prefix)
    for part in parts:
        digest.update(part)
    return digest.digest()


class KVBlocks:
    """A list of blocks. Blocks are added one by one, and then the states of all blocks
    are read together."""

    def __init__(self) -> None:
        self._library = library.load()
        self._handle = self._library.moegguf_kv_blocks_open()

    def __enter__(self) -> KVBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.moegguf_kv_blocks_close(self._handle)

    def add(self, block: StoredBlock) -> int:
        """Adds a block. Returns an address that represents the block's state. The same
        thread must then pass this address to MemoryParts.set_state."""
        digest = (c.c_uint8 * DIGEST_BYTES).from_buffer_copy(block.digest)
        state = c.c_void_p()
        n_bytes = block.n_bytes - block.begin
        prefix = c.cast(c.c_char_p(block.prefix), c.c_void_p)
        given = abi.KvBlock(
            os.fsencode(block.path),
            block.begin,
            n_bytes,
            prefix,
            len(block.prefix),
            digest,
        )
        self._library.moegguf_kv_blocks_add(
            self._handle, c.byref(given), c.byref(state)
        )
        return state.value or 0

    def fill(self) -> int:
        """Reads the states of the added blocks from their files. Returns the number of
        blocks before the first one with a wrong digest."""
        n_right = c.c_int32()
        self._library.moegguf_kv_blocks_fill(self._handle, c.byref(n_right))
        return n_right.value


class KvBlockStore:
    """Stores blocks in `folder`. Old blocks are deleted so that all blocks together
    occupy at most about `limit_bytes` bytes. If `limit_bytes` is None, the limit is a
    tenth of the disk space that is free or used by this store, but at most
    MOST_AUTO_BYTES. Any thread may use the object."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.folder = folder
        self.is_off = False
        self.limit_bytes = limit_bytes or 0
        # Bytes that may be written before blocks are counted again.
        self._room_bytes = 0
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            # Blocks are made from users' texts, so only the owner may read the folder.
            info = os.stat(folder)
            if info.st_uid != os.geteuid():
                raise PermissionError(f"{folder} belongs to another user")
            if stat.S_IMODE(info.st_mode) & 0o077:
                os.chmod(folder, 0o700)
            remove_abandoned(folder.glob(".block.*"))
            if limit_bytes is None:
                disk = os.statvfs(folder)
                used_bytes = sum(info.st_size for _, info in _files(folder))
                free_bytes = disk.f_bavail * disk.f_frsize + used_bytes
                self.limit_bytes = min(free_bytes // AUTO_SHARE, MOST_AUTO_BYTES)
        except OSError as error:
            self._turn_off(error)

    def holds(self, name: str) -> bool:
        """Returns True if there is a file with this name and the store is on."""
        return not self.is_off and os.path.exists(self._path(name))

    def open(self, name: str, n_head: int = 0) -> StoredBlock | None:
        """Returns a block without verifying its bytes; None if the block is missing,
        the file has a wrong header, or the store is off.

        The block's `head` holds at least `n_head` bytes of the state, or all bytes of a
        shorter state.
        """
        return None if self.is_off else _opened(self._path(name), n_head)

    def read(self, name: str) -> bytes | None:
        """Returns a block's state. If the block cannot be read or its digest differs,
        deletes it and returns None. If the store is off, returns None and keeps the
        block."""
        if self.is_off:
            return None
        with suppress(OSError):
            if (block := self.open(name)) is not None:
                data = read_regular(block.path, own=True)[block.begin :]
                if _digest(block.prefix, [data]) == block.digest:
                    return data
        self.delete(name)
        return None

    def write(self, name: str, about: About, parts: Sequence[Buffer]) -> bool:
        """Writes a block. If there is no room, first deletes the least recently used
        blocks. Returns False if the block was not written."""
        header = json.dumps(astuple(about)).encode()
        begin = _HEADER.size + len(header)
        n_bytes = begin + sum(len(part) for part in parts)
        if self.is_off or n_bytes > self.limit_bytes or begin > MOST_HEADER_BYTES:
            return False
        body = [header, *parts]
        first = _HEADER.pack(MAGIC, _digest(name.encode(), body), len(header))
        temporary = ""
        try:
            self._make_room(n_bytes)
            path = self._path(name)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = locked_temporary(self.folder, ".block.", "")
            with os.fdopen(handle, "wb") as file:
                file.writelines((first, *body))
                file.flush()
                os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            self._turn_off(error)
            return False
        return True

    def touch(self, names: Sequence[str]) -> None:
        """Marks these blocks as just used. The first block gets the latest time, so it
        is deleted last, because the other blocks are useless without it."""
        now = time.time_ns()
        for age, name in enumerate(names):
            with suppress(OSError):
                os.utime(self._path(name), ns=(now - age * 1000, now - age * 1000))

    def delete(self, name: str) -> None:
        """Deletes a block. Ignores errors, such as a missing block."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _make_room(self, n_bytes: int) -> None:
        """Deletes the least recently used blocks if `n_bytes` more would exceed the
        limit."""
        self._room_bytes -= n_bytes
        if self._room_bytes >= 0:
            return
        files = sorted(_files(self.folder), key=lambda file: file[1].st_mtime_ns)
        used_bytes = n_bytes + sum(info.st_size for _, info in files)
        most = self.limit_bytes
        if used_bytes > most:
            most = most * KEPT_PARTS[0] // KEPT_PARTS[1]
        for path, info in files:
            if used_bytes <= most:
                break
            with suppress(FileNotFoundError):
                path.unlink()
            used_bytes -= info.st_size
        self._room_bytes = min(
            self.limit_bytes - used_bytes, self.limit_bytes // UNCOUNTED_PARTS
        )

    def _turn_off(self, error: OSError) -> None:
        if not self.is_off:
            self.is_off = True
            reason = error.strerror or error
            warnings.warn(
                f"contexts are not kept on disk: {self.folder}: {reason}; free some space, correct the folder, or give"
                " context_store=0.",
                stacklevel=3,
            )
