"""Adds simulated devices to ggml, for machines without a GPU. Copies to and from a
device take as long as they would over a given link. link_device.cpp describes the
devices."""

from __future__ import annotations

import ctypes as c
import functools
import time
from dataclasses import dataclass

import numpy as np

from moegguf.quantities import Link
from moegguf.testing.library import ABI, load


def add_link_device(
    link: Link,
    *,
    memory_bytes: int = 0,
    most_buffer_bytes: int = 0,
    pinned: int = ABI.PINNED_OWN,
    n_threads: int = 0,
    strict_seed: int = 0,
) -> str:
    """Adds a simulated device behind `link`, and returns ggml's name for the device.
    The device stays until the process ends.

    llama.cpp can use the device as a GPU for every model loaded later. The other
    arguments are fields of struct moegguf_link (testing.h). Raises OptionError if an
    argument is out of range, such as a link without bandwidth.
    """
    name = c.c_char_p()
    described = ABI.Link(
        link.bytes_per_s / 1e9,
        link.latency_s * 1e9,
        memory_bytes,
        most_buffer_bytes,
        pinned,
        n_threads,
        strict_seed,
    )
    load().moegguf_link_add(c.byref(described), c.byref(name))
    assert name.value is not None
    return name.value.decode()


@dataclass(frozen=True)
class LinkFigures:
    """The counts of a simulated device and its first fault: the fields of struct
    moegguf_link_figures (testing.h)."""

    launches: int
    replays: int
    copies: int
    copies_to_host: int
    launches_beside_copies: int
    fault: str


def link_figures(name: str) -> LinkFigures:
    """Returns the counts and the first fault of a simulated device. Raises OptionError
    if no device has this name."""
    read = ABI.LinkFigures()
    load().moegguf_link_read(name.encode(), c.byref(read))
    return LinkFigures(
        launches=read.launches,
        replays=read.replays,
        copies=read.copies,
        copies_to_host=read.copies_to_host,
        launches_beside_copies=read.launches_beside_copies,
        fault=read.fault.decode(),
    )


@functools.cache
def link_device(link: Link, n_threads: int = 0) -> str:
    """Returns the name of a simulated device with this link and number of threads (0:
    as many as the CPU).

    The first call with these arguments adds the device, and later calls return the name
    of that device.
    """
    return add_link_device(link, n_threads=n_threads)


def memory_copy_bytes_per_s() -> float:
    """Returns the bytes per second at which one thread copies within this machine's
    memory: the fastest of four copies of 16 MiB. A simulated link cannot be faster,
    because it transfers data by such copies, too."""
    source, copy = np.ones(1 << 24, np.uint8), np.empty(1 << 24, np.uint8)
    times = []
    for _ in range(4):  # the first copy is slower: the system provides the pages
        start = time.perf_counter()
        np.copyto(copy, source)
        times.append(time.perf_counter() - start)
    return source.size / min(times)
