"""Kernels: signed bytes times floats, an expert's rows many at a time, and operations with one value for each row."""

from __future__ import annotations

import ctypes as c
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import F16, IQ4_NL, MXFP4, Q4_0, Q8_0, Open, Types, make_model
from product import F32, N_THREADS, InitParams, Product, load

from moegguf.errors import OptionError
from moegguf.native import library
from moegguf.native.events import Float32s
from moegguf.native.predictor import QuantizedMatrix

RNG = np.random.default_rng(0)


def apply(matrix: QuantizedMatrix, x: Float32s, relu: bool = False) -> Float32s:
    out = np.empty(matrix.shape[0], np.float32)
    arrays = (a.ctypes.data for a in (matrix.bytes, matrix.scale, matrix.bias))
    library.load().moegguf_matvec_q8(*arrays, *matrix.shape, x.ctypes.data, relu, out.ctypes.data)
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
        library.load().moegguf_matvec_q8(None, None, None, 1, 1, None, 0, None)


def test_threads_may_share_a_matrix() -> None:
    matrix = QuantizedMatrix(RNG.standard_normal((64, 1024)).astype(np.float32))
    vectors = RNG.standard_normal((64, 1024)).astype(np.float32)
    expected = [apply(matrix, x) for x in vectors]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: apply(matrix, x), vectors))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


TYPES = {"q4_0": Q4_0, "q8_0": Q8_0, "iq4_nl": IQ4_NL, "mxfp4": MXFP4}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n_tokens", [3, 4, 15, 16, 21, 70])
def test_many_rows_of_an_expert_have_the_bits_of_single_rows(
    tmp_path: Path, open_store: Open, products: list[Product], name: str, n_tokens: int
) -> None:
    types: Types = {"gate": TYPES[name], "up": TYPES[name], "down": F16}
    fake = make_model(tmp_path, n_layer=1, n_embd=256, n_ff=72, types=(types,))
    store, context = open_store(fake, 8, repack=True)
    store.drain(10)
    rng = np.random.default_rng(n_tokens)
    x = rng.standard_normal((n_tokens, 256)).astype(np.float32)
    ids = np.column_stack([np.full(n_tokens, 5), rng.integers(0, 5, n_tokens)])
    products.append(Product(store, context, fake, ids, x))
    at_once = products[-1].compute()
    one_by_one = []
    for i in range(n_tokens):
        products.append(Product(store, context, fake, ids[i : i + 1], x[i : i + 1]))
        one_by_one.append(products[-1].compute())
    assert at_once == b"".join(one_by_one)


@pytest.mark.parametrize("n_tokens", [1, 2, 5])
def test_an_expert_that_a_token_chose_many_times_has_more_rows_than_there_are_tokens(
    tmp_path: Path, open_store: Open, products: list[Product], n_tokens: int
) -> None:
    fake = make_model(tmp_path, n_layer=1, n_embd=256, n_ff=96)
    store, context = open_store(fake, 8, repack=True)
    store.drain(10)
    x = np.random.default_rng(0).standard_normal((n_tokens, 256)).astype(np.float32)
    for n_times in (8, 1):
        products.append(Product(store, context, fake, np.full((n_tokens, n_times), 7), x))
    many, once = (np.frombuffer(product.compute(), np.uint32).reshape(n_tokens, -1, 96) for product in products)
    assert (many == once).all()


OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def computed(operation: str, x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """ggml's result for x [n_tokens, n_rows, n] and y [n_tokens, n_rows, 1 or n]."""
    base = load("ggml-base", (
        "ggml_init", "ggml_new_tensor_3d", "ggml_new_graph", f"ggml_{operation}", "ggml_backend_cpu_buffer_type",
        "ggml_backend_alloc_ctx_tensors_from_buft",
    ))  # fmt: skip
    cpu = load("ggml-cpu", ("ggml_backend_cpu_init",))
    context = c.c_void_p(base.ggml_init(InitParams(1 << 20, None, True)))

    def tensor(values: npt.NDArray[np.float32]) -> Any:
        return c.c_void_p(base.ggml_new_tensor_3d(context, F32, *(c.c_int64(n) for n in reversed(values.shape))))

    inputs = [(tensor(values), values) for values in (x, y)]
    result = c.c_void_p(getattr(base, f"ggml_{operation}")(context, inputs[0][0], inputs[1][0]))
    graph = c.c_void_p(base.ggml_new_graph(context))
    base.ggml_build_forward_expand(graph, result)
    buffer_type = c.c_void_p(base.ggml_backend_cpu_buffer_type())
    buffer = c.c_void_p(base.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type))
    for into, values in inputs:
        pointer = values.ctypes.data_as(c.c_void_p)
        base.ggml_backend_tensor_set(into, pointer, c.c_size_t(0), c.c_size_t(values.nbytes))
    backend = c.c_void_p(cpu.ggml_backend_cpu_init())
    cpu.ggml_backend_cpu_set_n_threads(backend, N_THREADS)
    base.ggml_backend_graph_compute(backend, graph)
    out = np.empty(x.shape, np.float32)
    base.ggml_backend_tensor_get(result, out.ctypes.data_as(c.c_void_p), c.c_size_t(0), c.c_size_t(out.nbytes))
    base.ggml_backend_free(backend)
    base.ggml_backend_buffer_free(buffer)
    base.ggml_free(context)
    return out


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("n", [1, 3, 64, 131])
@pytest.mark.parametrize("is_broadcast", [True, False])
def test_each_element_has_numpys_bits(operation: str, n: int, is_broadcast: bool) -> None:
    random = np.random.default_rng(n)
    x = random.standard_normal((5, 4, n)).astype(np.float32)
    y = random.standard_normal((5, 4, 1 if is_broadcast else n)).astype(np.float32)
    x[0, 0, 0], y[1, 1, 0] = np.inf, 0.0
    with np.errstate(divide="ignore"):
        expected = OPERATIONS[operation](x, y)
    assert computed(operation, x, y).tobytes() == expected.tobytes()
