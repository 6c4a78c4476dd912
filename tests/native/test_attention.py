"""Compares the CPU's flash attention with sums in float64.

Also tests that its bits depend neither on the number of rows, nor on the number of
threads, nor on AVX-512.
"""

import ctypes as c
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moegguf.processor import has_kernels, read_processor
from moegguf.settings import read_environment
from tools.width_check import Array, Ggml

pytestmark = pytest.mark.skipif(
    not has_kernels(read_processor(), read_environment().kernels),
    reason="the processor has no kernel for attention",
)

ROOT = Path(__file__).resolve().parents[2]
# More rows than fit in a tile, and enough cells for two whole parts of the keys and the
# beginning of a third part.
N_ROWS, N_CELLS = 140, 1100
SOME_ROWS = (
    [0],
    [37],
    [69],
    [139],
    [3, 4],
    range(5, 10),
    range(10, 18),
    range(30, 39),
    range(20, 53),
    range(5, 135),
)


@dataclass(frozen=True)
class Attention:
    """Attention of the last N_ROWS of N_CELLS tokens.

    `window` is the number of keys that a token sees, including its own. 0: the token
    sees its own and all earlier keys.
    """

    d_key: int = 64
    d_value: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    cache: str = "f16"
    window: int = 0
    cap: float = 0
    max_bias: float = 0
    has_sinks: bool = False
    tolerance: float = 1e-5

    def inputs(self) -> tuple[Array, Array, Array, Array, Array]:
        """Returns q [n_head, N_ROWS, d], k and v [n_head_kv, N_CELLS, d], mask [N_ROWS,
        N_CELLS] and sinks [n_head]."""
        rng = np.random.default_rng(self.d_key + self.n_head)
        q, k, v = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in (
                (self.n_head, N_ROWS, self.d_key),
                (self.n_head_kv, N_CELLS, self.d_key),
                (self.n_head_kv, N_CELLS, self.d_value),
            )
        )
        distance = np.arange(N_CELLS - N_ROWS, N_CELLS)[:, None] - np.arange(N_CELLS)
        sees = (distance >= 0) & (distance < (self.window or N_CELLS))
        mask = np.where(sees, -distance * 0.01 if self.max_bias else 0.0, -np.inf)
        return (
            q,
            k,
            v,
            mask.astype(np.float16),
            3 * rng.standard_normal(self.n_head).astype(np.float32),
        )

    def compute(self, ggml: Ggml, rows: Sequence[int]) -> Array:
        """Uses ggml to compute the rows with these indices. Returns [len(rows), n_head,
        d_value]."""
        q, k, v, mask, sinks = self.inputs()
        graph = ggml.graph()
        ggml_type = ggml.types[self.cache]
        # The heads of a cell are adjacent, as in a cache.
        keys, values = (
            graph.op(
                "permute",
                graph.input(ggml_type, x.shape, ggml.quantized(ggml_type, x)),
                0,
                2,
                1,
                3,
            )
            for x in (k.transpose(1, 0, 2), v.transpose(1, 0, 2))
        )
        numbers = (
            c.c_float(self.d_key**-0.5),
            c.c_float(self.max_bias),
            c.c_float(self.cap),
        )
        queries = graph.array(q[:, list(rows)])
        node = graph.op(
            "flash_attn_ext",
            queries,
            keys,
            values,
            graph.array(mask[list(rows)]),
            *numbers,
        )
        if self.has_sinks:
            graph.change("flash_attn_ext_add_sinks", node, graph.array(sinks))
        out = graph.compute(node, (len(rows), self.n_head, self.d_value))
        graph.close()
        return out

    def exact(self, ggml: Ggml) -> Array:
        """Computes all rows in float64, with the cached keys and values. Returns
        [N_ROWS, n_head, d_value]."""
        q, k, v, mask, sinks = (x.astype(np.float64) for x in self.inputs())
        k, v = (stored(ggml, self.cache, x) for x in (k, v))
        n_shared = self.n_head // self.n_head_kv
        scores = (
            np.einsum("htd,hcd->htc", q, np.repeat(k, n_shared, axis=0))
            * self.d_key**-0.5
        )
        scores = self.cap * np.tanh(scores / self.cap) if self.cap else scores
        n_slopes = 2 ** int(np.log2(self.n_head))
        heads = np.arange(self.n_head)
        powers = np.where(
            heads < n_slopes,
            -(heads + 1) / n_slopes,
            -(2 * (heads - n_slopes) + 1) / n_slopes / 2,
        )
        slopes = (
            2.0 ** (self.max_bias * powers) if self.max_bias else np.ones(self.n_head)
        )
        scores = scores + slopes[:, None, None] * mask
        highest = np.maximum(
            scores.max(axis=2), sinks[:, None] if self.has_sinks else -np.inf
        )
        weights = np.exp(scores - highest[:, :, None])
        total = weights.sum(axis=2) + (
            np.exp(sinks[:, None] - highest) if self.has_sinks else 0
        )
        out: Array = np.einsum(
            "htc,hcd->thd", weights / total[:, :, None], np.repeat(v, n_shared, axis=0)
        )
        return out


def stored(ggml: Ggml, cache: str, values: Array) -> Array:
    """Returns the values, float64 [n_head, n, d], after rounding to the type of the
    cache."""
    if cache == "f32":
        return values.astype(np.float32).astype(np.float64)
    if cache == "f16":
        return values.astype(np.float16).astype(np.float64)
    blocks = np.frombuffer(
        ggml.quantized(ggml.types["q8_0"], values),
        np.dtype([("d", "<f2"), ("q", "i1", 32)]),
    )
    return (blocks["d"].astype(np.float64)[:, None] * blocks["q"]).reshape(values.shape)


KINDS = {
    "one head for each": Attention(n_head=3, n_head_kv=3),
    "eight heads share keys": Attention(128, 128, 8, 1),
    "six heads share keys": Attention(80, 80, 12, 2),
    "heads of 96": Attention(96, 96),
    "heads of 112": Attention(112, 112),
    "heads of 192 and 128": Attention(192, 128, 16, 2),
    "heads of 256": Attention(256, 256, tolerance=2e-5),
    "latent": Attention(576, 512, 134, 1, tolerance=2e-5),
    "cache of q8_0": Attention(cache="q8_0", n_head=16, n_head_kv=1),
    "cache of f32": Attention(cache="f32"),
    "window": Attention(window=100, n_head=32),
    "soft-capped": Attention(cap=2.0, n_head_kv=4),
    "alibi": Attention(max_bias=8.0, n_head=6, n_head_kv=6),
    "sinks": Attention(has_sinks=True, window=40, n_head=16),
}


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    return Ggml()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_attention_matches_float64_and_has_equal_bits_at_any_width(
    ggml: Ggml, kind: Attention
) -> None:
    together = kind.compute(ggml, range(N_ROWS))
    for rows in SOME_ROWS:
        assert kind.compute(ggml, rows).tobytes() == together[list(rows)].tobytes(), (
            rows
        )
    np.testing.assert_allclose(together, kind.exact(ggml), rtol=0, atol=kind.tolerance)


def test_attention_has_equal_bits_for_any_number_of_threads(ggml: Ggml) -> None:
    for kind in KINDS.values():
        together, alone = (kind.compute(ggml, rows) for rows in (range(N_ROWS), [7]))
        for n_threads in (1, 3):
            other = Ggml(n_threads)
            assert kind.compute(other, range(N_ROWS)).tobytes() == together.tobytes()
            assert kind.compute(other, [7]).tobytes() == alone.tobytes()


def test_attention_ignores_infinite_values_in_masked_cells(ggml: Ggml) -> None:
    class Infinite(Attention):
        def inputs(self) -> tuple[Array, Array, Array, Array, Array]:
            q, k, v, mask, sinks = super().inputs()
            k[:, -5:] = v[:, -5:] = np.inf
            return q, k, v, mask, sinks

    finite, infinite = (
        kind().compute(ggml, range(N_ROWS)) for kind in (Attention, Infinite)
    )
    assert infinite[:-5].tobytes() == finite[:-5].tobytes()
    assert not np.isfinite(infinite[-1]).any()


def all_bits() -> bytes:
    """Returns the attention outputs of all KINDS as bytes, one kind after another."""
    ggml = Ggml()
    return b"".join(
        kind.compute(ggml, range(N_ROWS)).tobytes() for kind in KINDS.values()
    )


def test_attention_has_equal_bits_with_and_without_avx512() -> None:
    program = (
        "import sys, test_attention; sys.stdout.buffer.write(test_attention.all_bits())"
    )
    environment = os.environ | {
        "MOEGGUF_KERNELS": "avx2",
        "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
    }
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    assert ran.stdout == all_bits()
