"""Tests kernels that compute many rows of an expert at a time, and element-wise
operations on rows.

The second operand of such an operation has one value for each row, or one for each
element.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import (
    F16,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    FakeModel,
    Open,
    Types,
    make_model,
)
from grid_blocks import GridBlocks
from product import N_THREADS, Product

from moegguf.gguf.experts import ExpertMatrix
from tools.width_check import Ggml

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "moegguf/native"
TYPES = {"q4_0": Q4_0, "q8_0": Q8_0, "iq4_nl": IQ4_NL, "mxfp4": MXFP4}
PLAIN = {
    "q8_0": Q8_0, "q5_0": Q5_0, "q5_1": Q5_1, "q4_1": Q4_1, "q2_K": Q2_K, "q3_K": Q3_K, "iq4_xs": IQ4_XS,
    "iq3_s": IQ3_S, "iq3_xxs": IQ3_XXS, "iq2_s": IQ2_S, "iq2_xs": IQ2_XS, "iq2_xxs": IQ2_XXS, "iq1_s": IQ1_S,
    "iq1_m": IQ1_M,
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n_tokens", [3, 4, 15, 16, 21, 70])
def test_product_of_many_rows_of_an_expert_equals_products_of_single_rows(
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
def test_product_is_exact_if_a_token_chooses_one_expert_many_times(
    tmp_path: Path, open_store: Open, products: list[Product], n_tokens: int
) -> None:
    fake = make_model(tmp_path, n_layer=1, n_embd=256, n_ff=96)
    store, context = open_store(fake, 8, repack=True)
    store.drain(10)
    x = np.random.default_rng(0).standard_normal((n_tokens, 256)).astype(np.float32)
    for n_times in (8, 1):
        products.append(
            Product(store, context, fake, np.full((n_tokens, n_times), 7), x)
        )
    many, once = (
        np.frombuffer(product.compute(), np.uint32).reshape(n_tokens, -1, 96)
        for product in products
    )
    assert (many == once).all()


def test_upstreams_product_is_exact_if_a_token_chooses_one_expert_many_times() -> None:
    test = f"{__file__}::{test_product_is_exact_if_a_token_chooses_one_expert_many_times.__name__}"
    environment = os.environ | {"MOEGGUF_KERNELS": "upstream"}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test],
        check=True,
        env=environment,
        cwd=ROOT,
        timeout=100,
    )


def quantized(m: ExpertMatrix) -> bytes:
    """Returns the bytes of all experts of `m`: normally distributed weights, or random
    blocks for a type in GRIDS."""
    values = np.random.default_rng(m.ggml_type).standard_normal(
        (m.n_expert, m.ne1, m.ne0)
    )
    return GridBlocks(1).quantized(m.ggml_type, values)


def resident(
    fake: FakeModel, ids: npt.NDArray[np.int32], x: npt.NDArray[np.float32]
) -> bytes:
    """Returns the bits of ggml's MUL_MAT_ID on the first matrix, with all experts in
    ordinary memory, not in slots."""
    m = fake.layout.matrices[0]
    data = b"".join(fake.matrix_bytes(0, expert) for expert in range(m.n_expert))
    graph = Ggml(N_THREADS).graph()
    weights = graph.input(m.ggml_type, (m.n_expert, m.ne1, m.ne0), data, is_weight=True)
    node = graph.op("mul_mat_id", weights, graph.array(x[:, None, :]), graph.array(ids))
    out = graph.compute(node, (*ids.shape, m.ne1))
    graph.close()
    return out.tobytes()


@pytest.mark.parametrize("n_tokens", [1, 2, 37])
@pytest.mark.parametrize("name", PLAIN)
def test_product_from_plain_slots_equals_the_product_of_resident_experts(
    tmp_path: Path, open_store: Open, products: list[Product], name: str, n_tokens: int
) -> None:
    types: Types = {"gate": PLAIN[name], "up": PLAIN[name], "down": F16}
    fake = make_model(
        tmp_path, n_layer=1, n_embd=256, n_ff=75, types=(types,), weights=quantized
    )
    store, context = open_store(fake, 8, repack=True)
    store.drain(10)
    rng = np.random.default_rng(n_tokens)
    x = rng.standard_normal((n_tokens, 256)).astype(np.float32)
    ids = np.column_stack([np.full(n_tokens, 5), rng.integers(0, 5, n_tokens)]).astype(
        np.int32
    )
    products.append(Product(store, context, fake, ids, x))
    assert products[-1].compute() == resident(fake, ids, x)


OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def computed(
    operation: str, x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Computes an element-wise operation with ggml. x: [n_tokens, n_rows, n]; y:
    [n_tokens, n_rows, 1 or n]."""
    graph = Ggml(N_THREADS).graph()
    out = graph.compute(graph.op(operation, graph.array(x), graph.array(y)), x.shape)
    graph.close()
    return out


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("n", [1, 3, 64, 131])
@pytest.mark.parametrize("is_broadcast", [True, False])
def test_elementwise_operations_equal_numpys_bits(
    operation: str, n: int, is_broadcast: bool
) -> None:
    random = np.random.default_rng(n)
    x = random.standard_normal((5, 4, n)).astype(np.float32)
    y = random.standard_normal((5, 4, 1 if is_broadcast else n)).astype(np.float32)
    x[0, 0, 0], y[1, 1, 0] = np.inf, 0.0
    with np.errstate(divide="ignore"):
        expected = OPERATIONS[operation](x, y)
    assert computed(operation, x, y).tobytes() == expected.tobytes()


def test_kernels_are_chosen_only_with_every_instruction_set_that_they_are_compiled_for() -> (
    None
):
    sets = re.findall(
        r"^set\(avx(?:2|512) (.*)\)",
        (NATIVE / "CMakeLists.txt").read_text(),
        re.MULTILINE,
    )
    flags = re.findall(r"-m(\w+)", " ".join(sets))
    source = (NATIVE / "kernels/multiply.cpp").read_text()
    function = source.partition("const Kernels * detect() {")[2].partition("\n}")[0]
    checked = re.findall(r'__builtin_cpu_supports\("(\w+)"\)|has_(f16c)\(\)', function)
    assert (
        sorted(flags) == sorted("".join(name) for name in checked)
        and "avx512vnni" in flags
    )
