"""Tests that moegguf's code converts rows to the interleaved layout exactly as
upstream's code does."""

import ctypes as c

import numpy as np
import pytest

from moegguf.processor import read_processor
from tools.width_check import Ggml, InitParams

N_IN, N_OUT, N_EXPERTS = 512, 24, 2
# moegguf's code only writes to addresses that are multiples of 16.
ALIGNED, UNALIGNED = 64, 72

pytestmark = pytest.mark.skipif(
    "avx2" not in read_processor().flags,
    reason="moegguf's code converts rows only for kernels with AVX2",
)


def interleaved(ggml: Ggml, ggml_type: int, rows: bytes, offset: int) -> bytes:
    """Returns the bytes of an interleaved tensor [N_EXPERTS, N_OUT, N_IN], which begins
    `offset` bytes after the beginning of its buffer. `rows` has the file's layout."""
    base = ggml._base
    context = ggml._pointer(base.ggml_init, InitParams(1 << 16, None, True))
    dims = (c.c_int64 * 3)(N_IN, N_OUT, N_EXPERTS)
    tensor = ggml._pointer(base.ggml_new_tensor, context, ggml_type, 3, dims)
    buffer = ggml._pointer(
        base.ggml_backend_buft_alloc_buffer,
        ggml.interleaved,
        c.c_size_t(len(rows) + offset),
    )
    begin = ggml._pointer(base.ggml_backend_buffer_get_base, buffer).value
    assert begin is not None and begin % 64 == 0
    address = c.c_void_p(begin + offset)
    base.ggml_backend_tensor_alloc(buffer, tensor, address)
    base.ggml_backend_tensor_set(tensor, rows, c.c_size_t(0), c.c_size_t(len(rows)))
    found = c.string_at(address, len(rows))
    base.ggml_backend_buffer_free(buffer)
    base.ggml_free(context)
    return found


@pytest.mark.parametrize("name", ["q4_0", "q4_K", "q5_K", "q6_K"])
def test_rows_are_interleaved_as_upstream_interleaves_them(name: str) -> None:
    ggml = Ggml()
    ggml_type = ggml.types[name]
    n_bytes = N_EXPERTS * N_OUT * ggml.row_bytes(ggml_type, N_IN)
    rows = np.random.default_rng(0).bytes(n_bytes)
    by_upstream = interleaved(ggml, ggml_type, rows, UNALIGNED)
    assert by_upstream != rows
    assert interleaved(ggml, ggml_type, rows, ALIGNED) == by_upstream
