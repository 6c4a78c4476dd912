"""Limits the memory used by tables that are read row by row, if a memory limit counts their pages.

llama.cpp memory-maps such a table, and the operating system reads the page of each row that a token looks up. Without a
memory limit, these pages stay as long as nothing else needs the memory. A memory cgroup counts the pages like slots, so
other loads would see less free memory. In a cgroup, the pages are therefore dropped after a pass if they occupy too
much memory.
"""

from __future__ import annotations

import ctypes as c
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moegguf.engine.machine import MACHINE, read_memory
from moegguf.gguf.experts import ExpertLayout, RowTable

# maximum memory, in bytes, that a plan allows for pages of row tables; it is counted as memory for weights
ROW_PAGES_BYTES = 64 << 20
_MAPS = Path("/proc/self/maps")
_STATM = Path("/proc/self/statm")


def row_pages_bytes(layout: ExpertLayout) -> int:
    """Returns the number of bytes of memory that a plan allows for the pages of a model's row tables."""
    return min(ROW_PAGES_BYTES, sum(table.n_bytes for table in layout.row_tables))


class RowTables:
    """The row tables of a model. The constructor is called after the load, before any row is read."""

    def __init__(self, layout: ExpertLayout) -> None:
        is_limited = bool(layout.row_tables) and read_memory().limited_by != MACHINE
        self._layout = layout
        self._tables = layout.row_tables if is_limited else ()
        # bytes of mapped files, such as libraries, that are in memory before any row is read
        self._before = _mapped_bytes() if is_limited else 0

    def after_pass(self) -> None:
        """Drops the pages if they occupy more than half of ROW_PAGES_BYTES. Does nothing without a memory limit."""
        if self._tables and _mapped_bytes() - self._before > ROW_PAGES_BYTES // 2:
            self.drop_pages()

    def drop_pages(self) -> None:
        """Drops the pages from memory. Later look-ups reread the rows from the file."""
        for table in self._tables:
            shard = self._layout.shards[table.shard]
            for begin, n_bytes in _mapped(shard.path, table):
                _libc_madvise(begin, n_bytes)
            with suppress(OSError), open(shard.path, "rb") as file:
                advice = os.POSIX_FADV_DONTNEED
                os.posix_fadvise(file.fileno(), table.offset, table.n_bytes, advice)


def _mapped_bytes() -> int:
    """Returns how many bytes of mapped files are currently in this process's memory."""
    return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE


def _mapped(path: Path, table: RowTable) -> Iterator[tuple[int, int]]:
    """Yields (address, number of bytes) for each mapped range of a table's whole pages."""
    first = -(-table.offset // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (table.offset + table.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    file = os.stat(path)
    for line in _MAPS.read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        major, minor = (int(number, 16) for number in fields[3].split(":"))
        if int(fields[4]) != file.st_ino or os.makedev(major, minor) != file.st_dev:
            continue
        begin, end = (int(number, 16) for number in fields[0].split("-"))
        offset = int(fields[2], 16)
        low = max(first, offset)
        high = min(last, offset + end - begin)
        if low < high:
            yield begin + low - offset, high - low


def _libc_madvise(begin: int, n_bytes: int) -> None:
    """Drops pages of a read-only mapping from this process's memory. Their contents remain in the file."""
    madvise = c.CDLL(None, use_errno=True).madvise
    madvise(c.c_void_p(begin), c.c_size_t(n_bytes), mmap.MADV_DONTNEED)
