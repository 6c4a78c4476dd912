"""A device behind a link in real time, for machines without one (link_device.cpp says how it behaves)."""

from __future__ import annotations

import ctypes as c
import functools
import time

import numpy as np

from moegguf.native import abi, library
from moegguf.quantities import Link


def add_link_device(
    link: Link,
    *,
    memory_bytes: int = 0,
    most_buffer_bytes: int = 0,
    pinned: int = abi.PINNED_OWN,
    n_threads: int = 0,
    strict_seed: int = 0,
) -> str:
    """ggml's name of a new simulated device behind `link`; ggml knows it until the process ends.

    llama.cpp uses it as a GPU for every model loaded later. memory_bytes: of the device, most_buffer_bytes: of one of
    its buffers, and of all experts that its kernels multiply with; 0: without a limit. pinned: of the host's memory, an
    enum moegguf_pinned. n_threads: that it computes with, 0: as many as llama.cpp tells the CPU to. strict_seed: not 0:
    as hard on its users as CUDA (link_device.cpp), with delays by this seed. Raises OptionError for a link without
    bandwidth.
    """
    name = c.c_char_p()
    described = abi.Link(
        link.bytes_per_s / 1e9, link.latency_s * 1e9, memory_bytes, most_buffer_bytes, pinned, n_threads, strict_seed
    )
    library.load().moegguf_link_add(c.byref(described), c.byref(name))
    assert name.value is not None
    return name.value.decode()


@functools.cache
def link_device(link: Link, n_threads: int = 0) -> str:
    """The name of this process's simulated device behind `link`, which is added when it is first asked for."""
    return add_link_device(link, n_threads=n_threads)


def memory_copy_bytes_per_s() -> float:
    """What one thread copies within this machine's memory: no simulated link is faster. Takes some 20 ms."""
    source, copy = np.ones(1 << 24, np.uint8), np.empty(1 << 24, np.uint8)
    times = []
    for _ in range(4):  # the first one also asks the system for the pages
        start = time.perf_counter()
        np.copyto(copy, source)
        times.append(time.perf_counter() - start)
    return source.size / min(times)
