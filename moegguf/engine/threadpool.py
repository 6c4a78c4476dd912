"""A lasting thread pool for builds without OpenMP.

The hook splits each layer's graph, and without OpenMP ggml creates and destroys a thread pool for every part: a tiny
model ran at a tenth of its speed. A pool attached to the context lasts as long as the context. OpenMP keeps its threads
itself, so nothing is attached then.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path

from moegguf.errors import AllocationError
from moegguf.native import library

GGML_MAX_N_THREADS = 512


class _Params(c.Structure):
    """struct ggml_threadpool_params (ggml.h)."""

    _fields_ = [
        ("cpumask", c.c_bool * GGML_MAX_N_THREADS),
        ("n_threads", c.c_int),
        ("prio", c.c_int),
        ("poll", c.c_uint32),
        ("strict_cpu", c.c_bool),
        ("paused", c.c_bool),
    ]


def built_with_openmp() -> bool:
    """Whether ggml was built with OpenMP, which keeps its threads itself."""
    return b"OPENMP = 1" in library.llama_cpp().llama_print_system_info()


class Threadpool:
    """ggml threads for one context, attached at construction; close it after the context is freed.

    Raises AllocationError when the threads cannot be created.
    """

    def __init__(self, context: int, n_threads: int) -> None:
        llama = library.llama_cpp().llama_cpp._lib
        new = c.CFUNCTYPE(c.c_void_p, c.POINTER(_Params))(library.cpu_function("ggml_threadpool_new"))
        self._free = c.CFUNCTYPE(None, c.c_void_p)(library.cpu_function("ggml_threadpool_free"))
        params = _Params()
        base = c.CDLL(str(next(Path(library.find_library()).glob("libggml-base.*"))))
        base.ggml_threadpool_params_init.argtypes = [c.POINTER(_Params), c.c_int]
        base.ggml_threadpool_params_init(c.byref(params), n_threads)
        self._pool: int | None = new(c.byref(params))
        if not self._pool:
            raise AllocationError(f"{n_threads} compute threads cannot be created; give a smaller n_threads.")
        llama.llama_attach_threadpool.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p]
        llama.llama_attach_threadpool(context, self._pool, self._pool)

    def close(self) -> None:
        """Ends the threads. Twice is harmless."""
        pool, self._pool = self._pool, None
        if pool:
            self._free(pool)
