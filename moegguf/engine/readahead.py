"""Reads dense weights into the page cache ahead of llama.cpp, which reads and converts one tensor after the other.

Without it the disk idles during each conversion and while the vocabulary is built. Where a memory limit would count
the pages beside llama.cpp's copies they are dropped afterwards; else an unloaded model is loaded from them again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from moegguf.engine.machine import MACHINE, read_memory
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.reader import Shard

STEP_BYTES = 4 << 20


def dense_ranges(layout: ExpertLayout, shard: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of everything in a shard that is not an expert, headers included."""
    experts = sorted((m.offset, m.n_expert * m.expert_bytes) for m in layout.matrices if m.shard == shard)
    position = 0
    for offset, n_bytes in [*experts, (layout.shards[shard].n_bytes, 0)]:
        if offset > position:
            yield position, offset - position
        position = offset + n_bytes


def _read_ahead(shard: Shard, ranges: list[tuple[int, int]], stop: threading.Event) -> None:
    with ExitStack() as stack:
        try:
            file = os.open(shard.path, os.O_RDONLY)
        except OSError:
            return  # llama.cpp opens it next, and reports the error
        stack.callback(os.close, file)
        for start, length in ranges:
            for offset in range(start, start + length, STEP_BYTES):
                if stop.is_set():
                    return
                os.posix_fadvise(file, offset, min(STEP_BYTES, start + length - offset), os.POSIX_FADV_WILLNEED)


def _drop_pages(shard: Shard) -> None:
    try:
        file = os.open(shard.path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@contextmanager
def readahead(layout: ExpertLayout) -> Iterator[None]:
    """Reads dense weights into the page cache while the block runs; under a memory limit they are dropped from it
    afterwards."""
    if not hasattr(os, "posix_fadvise"):
        yield
        return
    stop = threading.Event()

    def work() -> None:
        for index, shard in enumerate(layout.shards):
            _read_ahead(shard, list(dense_ranges(layout, index)), stop)

    thread = threading.Thread(target=work, name="moegguf-readahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if read_memory().limited_by != MACHINE:
            for shard in layout.shards:
                _drop_pages(shard)
