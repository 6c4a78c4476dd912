"""The kernel of signed bytes gives what numpy gives, for any shape; bad calls are refused; threads may share it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moegguf.errors import OptionError
from moegguf.native.events import Float32s
from moegguf.native.library import load
from moegguf.native.matvec import QuantizedMatrix

RNG = np.random.default_rng(0)


def apply(matrix: QuantizedMatrix, x: Float32s, relu: bool = False) -> Float32s:
    out = np.empty(matrix.shape[0], np.float32)
    arrays = (a.ctypes.data for a in (matrix.bytes, matrix.scale, matrix.bias))
    load().moegguf_matvec_q8(*arrays, *matrix.shape, x.ctypes.data, relu, out.ctypes.data)
    return out


@pytest.mark.parametrize("n_cols", [1, 31, 32, 511, 512, 513, 2048, 5000])
@pytest.mark.parametrize("n_rows", [1, 3, 64])
def test_it_agrees_with_numpy_on_the_same_bytes(n_rows: int, n_cols: int) -> None:
    weights = RNG.standard_normal((n_rows, n_cols)).astype(np.float32)
    bias, x = RNG.standard_normal(n_rows).astype(np.float32), RNG.standard_normal(n_cols).astype(np.float32)
    matrix = QuantizedMatrix(weights, bias)
    exact = (matrix.bytes * matrix.scale[:, None].astype(np.float64)) @ x + bias
    # Only the vector is rounded on the way: half a step of 1/32767 of its peak per element.
    error = np.abs(x).max() / 32767 / 2 * np.abs(weights).sum(axis=1) + 1e-4
    assert (np.abs(apply(matrix, x) - exact) <= error).all()
    assert np.array_equal(apply(matrix, x, relu=True), np.maximum(apply(matrix, x), 0))


def test_the_largest_sums_do_not_overflow() -> None:
    ones = np.ones(1 << 16, np.float32)
    for sign in (1, -1):
        assert apply(QuantizedMatrix(sign * ones[None]), ones) == pytest.approx([sign * (1 << 16)], rel=1e-4)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_vector_without_a_scale_counts_as_zero(value: float) -> None:
    matrix = QuantizedMatrix(np.ones((2, 3), np.float32), np.array([1, -2], np.float32))
    assert apply(matrix, np.full(3, value, np.float32)).tolist() == [1, -2]


def test_a_call_without_arrays_is_refused() -> None:
    with pytest.raises(OptionError):
        load().moegguf_matvec_q8(None, None, None, 1, 1, None, 0, None)


def test_threads_may_share_a_matrix() -> None:
    matrix = QuantizedMatrix(RNG.standard_normal((64, 1024)).astype(np.float32))
    vectors = RNG.standard_normal((64, 1024)).astype(np.float32)
    expected = [apply(matrix, x) for x in vectors]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: apply(matrix, x), vectors))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
