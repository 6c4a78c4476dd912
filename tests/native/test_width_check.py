"""Tests tools/width_check.py, and thereby that CPU results do not depend on the number
of rows computed together.

Other tests compare the kernels' products with products in float64.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from grid_blocks import GRIDS, GridBlocks

from moegguf.processor import has_kernels, read_processor
from moegguf.settings import read_environment
from tools import width_check
from tools.width_check import Array, Case, Ggml, StateCase

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1, 2, 3, 7, 8, 17)
# 40 columns are five groups of 8, and AVX-512 kernels compute two groups at a time.
N_ROWS, N_IN, N_OUT = 17, 512, 40
# Not a multiple of 16, the number of values in a float row that kernels compute at a
# time.
N_FLOATS = 37
INTERLEAVED = ("q4_0", "q4_K", "q5_K", "q6_K", "iq4_nl", "mxfp4")
# Types that moegguf's kernels read in the layout of the file.
TERNARY = ("tq1_0", "tq2_0")
PLAIN = (
    *("q8_0", "q5_0", "q5_1", "q4_1", "q2_K", "q3_K", "nvfp4", "q1_0", "q2_0"),
    *(*TERNARY, *GRIDS),
)
FLOATS = ("f32", "f16", "bf16")
# Types that are slow to quantise. Tests that quantise weights leave them out or are
# marked as slow.
SLOW = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")

# A program that writes the bytes of `products` to stdout, with the kernels that
# MOEGGUF_KERNELS selects.
PRODUCTS = """
import sys
from tests.native.test_width_check import products
sys.stdout.buffer.write(products().tobytes())
"""


def products() -> Array:
    """Returns the products of random rows with weights of each supported type:
    [n_types, N_ROWS, N_OUT]."""
    ggml = GridBlocks()
    x = np.random.default_rng(0).standard_normal((N_ROWS, N_IN)).astype(np.float32)
    made = [
        width_check.product(ggml, ggml.types[name], x, N_OUT, ggml.interleaved)
        for name in INTERLEAVED
    ]
    made += [
        width_check.product(ggml, ggml.types[name], x, N_OUT, None) for name in PLAIN
    ]
    made += [
        width_check.product(ggml, ggml.types[name], x[:, :N_FLOATS], N_OUT, None)
        for name in FLOATS
    ]
    return np.stack([compute(range(N_ROWS)) for compute in made if compute])


def products_by(kernels: str) -> Array:
    """Returns `products()`, computed in another process with MOEGGUF_KERNELS=`kernels`
    (empty: the default kernels)."""
    environment = os.environ | {
        "MOEGGUF_KERNELS": kernels,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/native'}",
    }
    command = [sys.executable, "-c", PRODUCTS]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, check=True
    )
    return np.frombuffer(ran.stdout, np.float32).reshape(-1, N_ROWS, N_OUT)


pytestmark = pytest.mark.skipif(
    not has_kernels(read_processor(), read_environment().kernels),
    reason="the processor has no batch-invariant kernels",
)


def test_operations_have_equal_rows_at_any_width() -> None:
    """Checks products with weights of many types, attention, norms, rope, softmax,
    gates and sums.

    Other cases are operations with a recurrent state, each for three sequences.
    """
    cases = {
        case.name: case
        for case in width_check.cases(N_IN, N_OUT, N_ROWS, left_out=SLOW)
    }
    assert len(cases) > 100
    assert sum(isinstance(case, StateCase) for case in cases.values()) == 9
    assert cases.keys() >= set(width_check.CHECKED_BY.values())
    assert {
        name: changed
        for name, case in cases.items()
        if (changed := case.changed(WIDTHS))
    } == {}


@pytest.mark.parametrize("n_in", [N_IN, N_FLOATS])
@pytest.mark.parametrize("name", FLOATS)
def test_float_products_have_equal_rows_at_any_width(name: str, n_in: int) -> None:
    ggml = Ggml()
    x = np.random.default_rng(0).standard_normal((N_ROWS, n_in)).astype(np.float32)
    compute = width_check.product(ggml, ggml.types[name], x, N_OUT, None)
    assert compute is not None
    assert Case(name, compute).changed(WIDTHS) == {}
    exact = x.astype(np.float64) @ weights(ggml, ggml.types[name], n_in).T
    assert np.abs(compute(range(N_ROWS)) - exact).max() < 1e-4


@pytest.mark.parametrize("name", GRIDS)
def test_grid_products_have_equal_rows_at_any_width(name: str) -> None:
    ggml = GridBlocks()
    x = np.random.default_rng(0).standard_normal((N_ROWS, N_IN)).astype(np.float32)
    for make in (width_check.product, width_check.expert_product):
        compute = make(ggml, ggml.types[name], x, N_OUT, None)
        assert compute is not None
        assert Case(name, compute).changed(WIDTHS) == {}


def test_products_have_equal_bits_with_and_without_avx512() -> None:
    assert products_by("avx2").tobytes() == products_by("").tobytes()


def rounded(x: Array, n: int) -> Array:
    """Rounds activations as kernels do. Each group of n values shares a scale, which is
    a 16-bit float if n is 32."""
    blocks = x.reshape(len(x), -1, n)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    scale = largest / np.float32(127)
    codes = np.rint(blocks * (np.float32(127) / largest))
    kept = scale.astype(np.float16) if n == 32 else scale
    return (codes * kept.astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("name", PLAIN + INTERLEAVED)
def test_plain_products_equal_float64_products_of_rounded_activations(
    name: str,
) -> None:
    """Also asserts that a matrix of 11 columns, which do not fill a vector, yields the
    first columns of a wider matrix's product.

    Kernels compute a single row and several rows differently.
    """
    ggml = GridBlocks()
    x = np.random.default_rng(0).standard_normal((N_ROWS, N_IN)).astype(np.float32)
    whole, few = (
        width_check.product(ggml, ggml.types[name], x, n_out, None)
        for n_out in (N_OUT, 11)
    )
    assert whole is not None
    assert few is not None
    exact = (
        rounded(x, 256 if name in (*TERNARY, *GRIDS) or name.endswith("_K") else 32)
        @ weights(ggml, ggml.types[name]).T
    )
    for rows in ([0], range(2), range(N_ROWS)):
        computed = whole(rows)
        assert np.abs(computed - exact[list(rows)]).max() < 1e-5 * np.abs(exact).max()
        assert few(rows).tobytes() == computed[:, :11].tobytes()


@pytest.mark.parametrize("n_rows", [1, 7])
@pytest.mark.parametrize("name", PLAIN)
def test_batched_products_multiply_each_matrix_with_the_rows_of_its_plane(
    name: str, n_rows: int
) -> None:
    """Two planes of x share one matrix, as two query heads share the keys of a KV
    head."""
    ggml = GridBlocks()
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 24, 256))
    x = rng.standard_normal((6, n_rows, 256)).astype(np.float32)

    def product(first: int, last: int) -> Array:
        graph = ggml.graph()
        data = ggml.quantized(ggml.types[name], values[first:last])
        w = graph.input(ggml.types[name], (last - first, 24, 256), data, is_weight=True)
        rows = x[2 * first : 2 * last]
        out = graph.compute(
            graph.op("mul_mat", w, graph.array(rows)), (len(rows), n_rows, 24)
        )
        graph.close()
        return out

    assert product(0, 3).tobytes() == b"".join(
        product(i, i + 1).tobytes() for i in range(3)
    )


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_products_are_as_exact_as_plain_products(name: str) -> None:
    ggml = Ggml()
    x = np.random.default_rng(0).standard_normal((N_ROWS, N_IN)).astype(np.float32)
    compute, plain = (
        width_check.product(ggml, ggml.types[name], x, N_OUT, at)
        for at in (ggml.interleaved, None)
    )
    if compute is None or plain is None:
        pytest.skip("the processor has no such layout")
    assert compute(range(N_ROWS)).tobytes() == plain(range(N_ROWS)).tobytes()
    exact = x.astype(np.float64) @ weights(ggml, ggml.types[name]).T
    errors = [
        np.sqrt(np.mean((made(range(N_ROWS)) - exact) ** 2))
        for made in (compute, plain)
    ]
    assert errors[0] < 1.001 * errors[1]


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plain_products_differ_from_float64_only_by_rounded_activations(
    is_slow: bool,
) -> None:
    """Multiplies weights of quantised types with one row and with 17 rows. `is_slow`
    selects the types in SLOW."""
    ggml = Ggml()
    x = np.random.default_rng(0).standard_normal((N_ROWS, N_IN)).astype(np.float32)
    quantised = [
        name
        for name in ggml.types
        if name.startswith(("q", "iq", "mxfp4")) and name not in ("q8_1", "q8_K")
    ]
    assert len(quantised) > 18
    assert set(SLOW) < set(quantised)
    for name in [name for name in quantised if (name in SLOW) == is_slow]:
        compute = width_check.product(ggml, ggml.types[name], x, 4, None)
        assert compute is not None, name
        exact = x.astype(np.float64) @ weights(ggml, ggml.types[name], n_out=4).T
        for rows in ([0], range(N_ROWS)):
            error = compute(rows) - exact[list(rows)]
            assert np.sqrt(np.mean(error**2)) < 0.02 * np.sqrt(np.mean(exact**2)), name


def weights(ggml: Ggml, ggml_type: int, n_in: int = N_IN, n_out: int = N_OUT) -> Array:
    """Returns the quantised weights of width_check.product, converted to float64
    [n_out, n_in]."""
    values = ggml.quantized(
        ggml_type, np.random.default_rng(1).standard_normal((n_out, n_in))
    )
    graph = ggml.graph()
    rows = graph.array(np.arange(n_out, dtype=np.int32))
    out = graph.compute(
        graph.op("get_rows", graph.input(ggml_type, (n_out, n_in), values), rows),
        (n_out, n_in),
    )
    graph.close()
    return out.astype(np.float64)


def test_case_finds_a_row_that_depends_on_the_width() -> None:
    def compute(rows: Sequence[int]) -> Array:
        values = np.array(rows, np.float32)[:, None]
        values[1:2] += len(rows) > 2
        return values

    assert Case("wrong", compute).changed((1, 2, 4)) == {4: [1]}


@pytest.mark.parametrize("changes", ["output", "state", "earlier state"])
def test_state_case_finds_a_state_that_depends_on_the_width(changes: str) -> None:
    """Uses a state that is a sum. For the second sequence, the second pass of three
    tokens computes a wrong value."""
    values = np.arange(3 * 6, dtype=np.float32).reshape(3, 6)

    def advance(states: Array, part: Array) -> tuple[Array, Array]:
        sums = states + np.cumsum(part, axis=1)
        outputs, after = sums.copy(), sums[:, ::-1].T[:2, :, None].copy()
        if np.array_equal(part, values[:, 3:]):
            outputs[1, 0] += changes == "output"
            after[0, 1] += changes == "state"
            after[1, 1] += changes == "earlier state"
        return outputs, after

    wrong = {"output": 3, "state": 5, "earlier state": 4}[changes]
    case = StateCase("wrong", advance, np.zeros((3, 1), np.float32), [values])
    assert case.changed((1, 2, 3, 6)) == {3: [wrong]}
