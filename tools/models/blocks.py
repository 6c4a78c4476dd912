"""Generates random quantised weights (pools of blocks with mean zero) and the few
tensors that stay F32.

The mean must be zero. Plain random Q4_0 bytes have a mean of -0.5 steps. With such
bytes, every matrix would have one common direction, and the router would choose only a
few experts. The values of Q4_0, Q5_0, Q8_0, MXFP4, F16 and BF16 are therefore drawn
symmetrically around zero. In Q4_K and Q5_K, each minimum is half the range of the
values. Q6_K, IQ4_NL and IQ4_XS have scales with random signs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from math import isqrt, sqrt

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as QType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tools.models.gemma import ROPE_FACTORS
from tools.models.tensors import GAINS, HEADS_INPUT, TIED_OUTPUT_NORM, Tensor

Bytes = NDArray[np.uint8]

POOL_BYTES = 16 << 20

# Ends of the names of tensors that are no norms, and whose values are near one.
NEAR_ONE_ENDS = ("ssm_d", ".scale", "layer_output_scale.weight")

# numpy scalars of type uint8, so that shifted bytes stay uint8
FOUR = np.uint8(4)
LOW_NIBBLE = np.uint8(15)

# Standard deviation of router logits. With 1, the largest of 60 experts' weights would
# be about 0.1. With 2, it is about 0.3.
ROUTER_STD = 2.0
# Standard deviation of the logarithm of a router row's length: experts with longer rows
# are chosen more often.
ROUTER_SKEW = 0.15


class BlockPools:
    """Pools of random blocks, one for each (type, standard deviation). Each pool is
    created on first use, and occupies at most about POOL_BYTES. A chunk is one matrix:
    it starts at its own block of the pool and wraps around. The number of blocks is
    prime, so no two chunks start at the same block while a model has fewer chunks than
    a pool has blocks. The rows of a chunk that is larger than its pool begin at
    different blocks, too.
    """

    def __init__(self, plan: list[Tensor], seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[QType, float], Bytes] = {}
        self._n_bytes: dict[tuple[QType, float], int] = {}
        self._first_chunk: dict[str, int] = {}
        n_chunks = 0
        for tensor in plan:
            key = tensor.qtype, tensor.std
            self._n_bytes[key] = self._n_bytes.get(key, 0) + tensor.n_bytes
            self._first_chunk[tensor.name] = n_chunks
            n_chunks += tensor.n_chunks

    def deltas(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yields the bytes of a tensor: views into its pool, and zeros for the zero
        rows of each matrix.

        The bytes do not depend on the order in which the tensors are generated.
        """
        pool = self._pool(tensor)
        n_blocks, block_bytes = pool.shape
        flat = pool.reshape(-1).data
        step = int(n_blocks * 0.6180339887) | 1
        for chunk in range(tensor.n_chunks):
            start = (
                (self._first_chunk[tensor.name] + chunk) * step % n_blocks * block_bytes
            )
            n_zero_bytes = tensor.n_zero_rows * tensor.row_bytes
            if n_zero_bytes:
                yield memoryview(bytes(n_zero_bytes))
            left = tensor.n_bytes // tensor.n_chunks - n_zero_bytes
            while left:
                piece = flat[start : start + left]
                yield piece
                left -= len(piece)
                start = 0

    def _pool(self, tensor: Tensor) -> Bytes:
        key = tensor.qtype, tensor.std
        if key not in self._pools:
            n_bytes = min(self._n_bytes[key], POOL_BYTES)
            n_blocks = _prime_from(n_bytes // GGML_QUANT_SIZES[tensor.qtype][1])
            self._pools[key] = random_blocks(
                tensor.qtype, n_blocks, tensor.std, self._seed
            )
        return self._pools[key]


def random_blocks(qtype: QType, n_blocks: int, std: float, seed: int) -> Bytes:
    """Returns blocks (n_blocks, bytes per block) whose weights have a mean of zero and
    a standard deviation of about `std`."""
    rng = np.random.default_rng([seed, int(qtype), zlib.crc32(repr(std).encode())])
    spread = rng.uniform(0.75, 1.25, n_blocks).astype(np.float32)
    return BLOCK_MAKERS[qtype](rng, spread * (std / _unit_std(qtype)))


def f32_weights(tensor: Tensor, seed: int) -> NDArray[np.float32]:
    """Returns random values that suit the role of an F32 tensor, such as norms near one
    and small biases."""
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    normal = rng.standard_normal(tensor.shape, dtype=np.float32)
    if tensor.name == ROPE_FACTORS:
        # RoPE rotates only the first quarter of the dimensions of Gemma 4's heads.
        is_rotated = np.arange(len(normal)) < len(normal) // 4
        return np.where(is_rotated, np.float32(1.0), np.float32(1e30))
    if tensor.name.endswith(".ffn_gate_inp.scale"):
        return np.float32(sqrt(len(normal))) * (1 + np.float32(0.1) * normal)
    if "norm" in tensor.name or tensor.name.endswith(NEAR_ONE_ENDS):
        scale = (
            GAINS["output"] / sqrt(tensor.shape[0])
            if tensor.name == TIED_OUTPUT_NORM
            else 1.0
        )
        return np.float32(scale) * (np.float32(1.0) + np.float32(0.1) * normal)
    # Negative values, so that the recurrent state decays.
    if tensor.name.endswith("ssm_a"):
        return -np.exp(np.float32(0.5) * normal)
    # Typically, the recurrent state then decays by 5 % per token.
    if tensor.name.endswith("ssm_dt.bias"):
        return np.float32(-3.0) + normal
    if tensor.name.endswith(".bias"):
        return np.float32(0.1) * normal
    # The columns for the token's embedding are the identity. Small random weights are
    # added in all columns.
    if tensor.name.endswith(HEADS_INPUT):
        n_embd = tensor.shape[0]
        return (
            np.eye(n_embd, 2 * n_embd, dtype=np.float32)
            + np.float32(0.1 / sqrt(tensor.shape[-1])) * normal
        )
    if ".ffn_gate_inp." in tensor.name:
        normal *= np.exp(
            ROUTER_SKEW * rng.standard_normal((tensor.shape[0], 1), dtype=np.float32)
        )
        return normal * np.float32(ROUTER_STD / sqrt(tensor.shape[-1]))
    return normal * np.float32(1.0 / sqrt(tensor.shape[-1]))


def token_experts(tensor: Tensor, n_expert: int, seed: int) -> NDArray[np.int32]:
    """Returns a table (n_token, n_used) for a layer that routes by token id: distinct
    random expert ids in each row."""
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    n_token, n_used = tensor.shape
    return rng.random((n_token, n_expert)).argsort(axis=1)[:, :n_used].astype(np.int32)


def _unit_std(qtype: QType) -> float:
    """Returns the standard deviation of random weights in blocks with scale 1, measured
    once for each type."""
    if qtype not in _UNIT_STD:
        blocks = BLOCK_MAKERS[qtype](
            np.random.default_rng(0), np.ones(4096, np.float32)
        )
        _UNIT_STD[qtype] = float(dequantize(blocks, qtype).std())
    return _UNIT_STD[qtype]


_UNIT_STD: dict[QType, float] = {}


def _half_bytes(scale: NDArray[np.float32]) -> Bytes:
    return scale.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _random_bytes(
    rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...]
) -> Bytes:
    return rng.integers(low, high, shape, dtype=np.uint8)


def _nibble_bytes(low: Bytes, high: Bytes) -> Bytes:
    return low | (high << FOUR)


def _q4_0(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    low, high = _random_bytes(rng, 1, 16, (2, len(scale), 16))
    return np.concatenate([_half_bytes(scale), _nibble_bytes(low, high)], axis=1)


def _q5_0(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    values = _random_bytes(rng, 1, 32, (len(scale), 32))
    fifth_bits = np.packbits(values >> FOUR, axis=1, bitorder="little")
    nibbles = _nibble_bytes(values[:, :16] & LOW_NIBBLE, values[:, 16:] & LOW_NIBBLE)
    return np.concatenate([_half_bytes(scale), fifth_bits, nibbles], axis=1)


def _q8_0(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    values = rng.integers(-127, 128, (len(scale), 32), dtype=np.int8)
    return np.concatenate([_half_bytes(scale), values.view(np.uint8)], axis=1)


def _k_scales(rng: np.random.Generator, n_blocks: int) -> Bytes:
    """Returns eight 6-bit scales for each block, and eight minima equal to the scales:
    (n_blocks, 12).

    They are packed as ggml's get_scale_min_k4 reads them.
    """
    scales = _random_bytes(rng, 24, 64, (n_blocks, 8))
    first = scales[:, :4]
    last = scales[:, 4:]
    low = first | ((last >> FOUR) << np.uint8(6))
    return np.concatenate(
        [low, low, _nibble_bytes(last & LOW_NIBBLE, last & LOW_NIBBLE)], axis=1
    )


def _q4_k(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    values = _random_bytes(rng, 0, 256, (len(scale), 128))
    head = [
        _half_bytes(scale),
        _half_bytes(scale * np.float32(7.5)),
        _k_scales(rng, len(scale)),
    ]
    return np.concatenate([*head, values], axis=1)


def _q5_k(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    values = _random_bytes(rng, 0, 256, (len(scale), 32 + 128))
    head = [
        _half_bytes(scale),
        _half_bytes(scale * np.float32(15.5)),
        _k_scales(rng, len(scale)),
    ]
    return np.concatenate([*head, values], axis=1)


def _q6_k(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    values = _random_bytes(rng, 0, 256, (len(scale), 128 + 64))
    signs = rng.integers(0, 2, (len(scale), 16), dtype=np.int8) * np.int8(2) - np.int8(
        1
    )
    scales = rng.integers(8, 17, (len(scale), 16), dtype=np.int8) * signs
    return np.concatenate([values, scales.view(np.uint8), _half_bytes(scale)], axis=1)


def _iq4_nl(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    signs = rng.choice(np.array([-1, 1], np.float32), len(scale))
    return np.concatenate(
        [_half_bytes(scale * signs), _random_bytes(rng, 0, 256, (len(scale), 16))],
        axis=1,
    )


def _iq4_xs(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    """Returns IQ4_XS blocks.

    Each block has eight 6-bit scales, which are stored with 32 added. The low four bits
    of two scales share a byte. The high two bits of all eight scales share a 16-bit
    number.
    """
    signs = rng.integers(0, 2, (len(scale), 8), dtype=np.int8) * np.int8(2) - np.int8(1)
    scales = (32 + rng.integers(8, 17, (len(scale), 8), dtype=np.int8) * signs).astype(
        np.uint16
    )
    high = ((scales >> 4) << (2 * np.arange(8, dtype=np.uint16))).sum(
        axis=1, dtype=np.uint16
    )
    low = (scales & 15).astype(np.uint8)
    values = _random_bytes(rng, 0, 256, (len(scale), 128))
    head = [
        _half_bytes(scale),
        high.view(np.uint8).reshape(-1, 2),
        _nibble_bytes(low[:, ::2], low[:, 1::2]),
    ]
    return np.concatenate([*head, values], axis=1)


def _mxfp4(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    """Returns MXFP4 blocks. Each scale is rounded at random up or down to a power of
    two.

    The probabilities preserve the expected square of the scale.
    """
    exponent = np.floor(np.log2(scale))
    rest = (scale / np.exp2(exponent)) ** 2  # a value from 1 to 4
    exponent += rng.random(len(scale)) < (rest - 1) / 3
    return np.concatenate(
        [
            (exponent + 128).astype(np.uint8)[:, None],
            _random_bytes(rng, 0, 256, (len(scale), 16)),
        ],
        axis=1,
    )


def _f16(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    """Returns blocks with one F16 weight each."""
    return _half_bytes(scale * rng.standard_normal(len(scale), np.float32))


def _bf16(rng: np.random.Generator, scale: NDArray[np.float32]) -> Bytes:
    """Returns blocks with one BF16 weight each: the upper two bytes of a float32."""
    weights = scale * rng.standard_normal(len(scale), np.float32)
    return (
        (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    )


BLOCK_MAKERS: dict[
    QType, Callable[[np.random.Generator, NDArray[np.float32]], Bytes]
] = {
    QType.Q4_0: _q4_0,
    QType.Q5_0: _q5_0,
    QType.Q8_0: _q8_0,
    QType.Q4_K: _q4_k,
    QType.Q5_K: _q5_k,
    QType.Q6_K: _q6_k,
    QType.IQ4_NL: _iq4_nl,
    QType.IQ4_XS: _iq4_xs,
    QType.MXFP4: _mxfp4,
    QType.F16: _f16,
    QType.BF16: _bf16,
}


def _prime_from(n: int) -> int:
    """Returns the smallest prime that is at least n."""
    n = max(n, 2)
    while any(n % divisor == 0 for divisor in range(2, isqrt(n) + 1)):
        n += 1
    return n
