#!/usr/bin/env python3
"""How well a simulated link keeps its time: copies, one and two at once, against latency + bytes/bandwidth.

python tools/link_bench.py                      # 2 GB/s and 35 us
python tools/link_bench.py --link 0.8GB/s,35us --repetitions 200
"""

from __future__ import annotations

import argparse
import ctypes as c
import functools
import threading
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from moegguf.native import library
from moegguf.quantities import Link, parse_link
from moegguf.testing.link_device import link_device, memory_copy_bytes_per_s

SIZES = (1 << 12, 1 << 16, 884_736, 2_654_208, 1 << 24)  # the third: a matrix of a Qwen3-30B expert in Q4_0; then all 3
F32 = 0


class _InitParams(c.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


def _ggml() -> c.CDLL:
    library.load()
    ggml = c.CDLL(str(library.find_library() / "libggml.so"))
    for name in (
        "ggml_init", "ggml_new_tensor_1d", "ggml_backend_dev_by_name", "ggml_backend_dev_buffer_type",
        "ggml_backend_alloc_ctx_tensors_from_buft",
    ):  # fmt: skip
        getattr(ggml, name).restype = c.c_void_p
    return ggml


def copies(device: str, n_bytes: int, n_at_once: int) -> list[Callable[[], None]]:
    """Calls that copy so many bytes to the device, each into a tensor of its own; they end when the bytes are there."""
    ggml = _ggml()
    buffer_type = ggml.ggml_backend_dev_buffer_type(c.c_void_p(ggml.ggml_backend_dev_by_name(device.encode())))
    source = np.ones(n_bytes, np.uint8)

    def copy_into(tensor: int) -> None:
        data = source.ctypes.data_as(c.c_void_p)
        ggml.ggml_backend_tensor_set(c.c_void_p(tensor), data, c.c_size_t(0), c.c_size_t(n_bytes))

    calls: list[Callable[[], None]] = []
    for _ in range(n_at_once):
        context = c.c_void_p(ggml.ggml_init(_InitParams(1 << 12, None, True)))
        tensor = ggml.ggml_new_tensor_1d(context, F32, c.c_int64(n_bytes // 4))
        ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, c.c_void_p(buffer_type))
        calls.append(functools.partial(copy_into, tensor))
    return calls


def elapsed_s(calls: list[Callable[[], None]]) -> float:
    """Seconds until all of them, called at once, have ended."""
    threads = [threading.Thread(target=call) for call in calls[1:]]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    calls[0]()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def measure(link: Link, repetitions: int) -> None:
    """Prints a row per size and number of copies at once."""
    device = link_device(link)
    print(f"link {link}; one thread copies {memory_copy_bytes_per_s() / 1e9:.1f} GB/s within this machine's memory")
    print("   bytes  at once   model us  median us   ratio     p10     p90")
    for n_at_once in (1, 2):
        for n_bytes in SIZES:
            calls = copies(device, n_bytes, n_at_once)
            elapsed_s(calls)  # asks the system for the pages
            times = sorted(elapsed_s(calls) for _ in range(repetitions))
            model = link.latency_s + n_at_once * n_bytes / link.bytes_per_s
            low, high = times[repetitions // 10], times[-1 - repetitions // 10]
            print(
                f"{n_bytes:8}  {n_at_once:7}  {model * 1e6:9.1f}  {median(times) * 1e6:9.1f}"
                f"  {median(times) / model:6.3f}  {low / model:6.3f}  {high / model:6.3f}"
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=parse_link, default="2GB/s,35us", metavar="BANDWIDTH[,LATENCY]")
    parser.add_argument("--repetitions", type=int, default=100, metavar="N")
    args = parser.parse_args()
    measure(args.link, args.repetitions)


if __name__ == "__main__":
    main()
