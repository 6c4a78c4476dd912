"""Generates weights for random models that reuse experts from token to token like a
real model (`tools.models.locality`).

The hidden state of the model begins with three parts of equal width, which the routers
read. `shared` is the same for all tokens, and `token` is different for each token. Both
come from the token's embedding. The first layer's attention or delta net writes `slow`.
Later layers leave all three unchanged.

The attention of the first layer has one active head. Its queries and keys come from
`shared`, so they are equal for every token, and only RoPE distinguishes positions. A
pair of dimensions rotates by `angle` per token. The score at distance d is therefore
-sin(d * angle) / (angle * memory_tokens), which is nearly -d / memory_tokens. So the
head averages `token` over earlier tokens, with weights that fall by a factor of e in
memory_tokens tokens. This is the AR(1) process of `synthesize`, computed by a
transformer.

In Qwen3.5, the first layer is a gated delta net. One head has the same key for every
token, and the state does not decay. Each token replaces about the share 1 /
memory_tokens of the state's value for this key. This is the AR(1) process, too. Values
pass through SiLU, and silu(v) - silu(-v) = v, so each value is stored with both signs.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log, pi, sqrt

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as QType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tools.models.blocks import ROUTER_STD, f32_weights, random_blocks
from tools.models.locality import Locality, popularity
from tools.models.shapes import ROPE_FREQ_BASE, Shape
from tools.models.tensors import Tensor

Floats = NDArray[np.float32]

# Minimum number of dimensions outside the three parts; all layers may write these
# dimensions.
LEAST_REST = 32
# Maximum distance in tokens over which the chosen pair rotates by at most a quarter
# turn. Beyond a quarter turn, the score rises again. Smaller angles would reach
# further, but the keys of neighbouring tokens would then be equal in 16 bits.
LONGEST_CONTEXT = 8192
# Factor on queries in the attention of all layers but the first. Each head then attends
# to only a few tokens, which change at every step, so that greedy decoding does not
# loop.
SHARPNESS = 4.0
# Factor on the variance of the part that is drawn independently for each token. Without
# this factor, the hit rate of LRU eviction would be 1 or 2 percentage points higher
# than with the process of `synthesize`. There are two reasons: with few dimensions,
# experts' logits depend on each other, and sampled tokens repeat.
OWN_GAIN = 1.08
# Variance that each layer adds to the hidden state (measured). The norm then shrinks
# the three parts, so the routers of later layers are scaled up.
GROWTH_PER_LAYER = 0.37
VALUE_REACH = 8.0  # factor on a delta net's values before SiLU
OPEN_GATE = 1.2784645  # gate input at which SiLU is 1


@dataclass(frozen=True)
class SlowRouting:
    """Generates the tensors that give a random model's routing its locality. `qtype` is
    the token embeddings' type."""

    shape: Shape
    locality: Locality
    qtype: QType
    seed: int

    def __post_init__(self) -> None:
        first_attends = self.shape.mixer(0) == "a"
        if self.shape.hc_mult or not (first_attends or self._has_delta_net):
            raise ValueError(
                "locality needs a model whose first layer attends or is a gated delta net, and which has "
                f"one residual stream, but {self.shape.arch} is none: choose --locality none"
            )
        needed = self.n_left_alone + LEAST_REST
        if self.shape.n_embd < needed:
            raise ValueError(
                f"locality with token embeddings in {self.qtype.name} needs n_embd of at least {needed}, "
                f"but it is {self.shape.n_embd}: choose another quant, or --locality none"
            )

    @property
    def width(self) -> int:
        """Returns the number of dimensions of each of the three parts, a multiple of
        `qtype`'s block size."""
        block = GGML_QUANT_SIZES[self.qtype][0]
        return max(self.shape.n_embd // 8 // block, 1) * block

    @property
    def n_left_alone(self) -> int:
        """Returns the number of dimensions of the three parts together. Layers after
        the first do not write them."""
        return 3 * self.width

    @cached_property
    def row_head(self) -> NDArray[np.uint8]:
        """Returns the first bytes of every token's embedding: random blocks for
        `shared`, then zeros for `slow`."""
        shared = random_blocks(
            self.qtype, self.width // GGML_QUANT_SIZES[self.qtype][0], 1.0, self.seed
        ).ravel()
        return np.concatenate([shared, np.zeros_like(shared)])

    def plan(self, tensor: Tensor) -> Tensor:
        """Returns the tensor's description, with the type, standard deviation and zero
        rows that the locality needs."""
        role = tensor.name.split(".")[-2]
        if _is_memory(tensor):
            return (
                replace(tensor, qtype=QType.F16)
                if tensor.qtype != QType.F32
                else tensor
            )
        if role in ("attn_output", "ssm_out") or role.startswith("ffn_down"):
            return replace(tensor, n_zero_rows=self.n_left_alone)
        # A model with delta nets has gates in attn_q, too.
        if role == "attn_q" and not self._has_delta_net:
            return replace(tensor, std=tensor.std * SHARPNESS)
        return tensor

    def weights(self, tensor: Tensor) -> NDArray[np.generic] | None:
        """Returns the values of a tensor that the locality determines; None for an
        ordinary random tensor."""
        if _is_memory(tensor):
            made = (
                self._delta_memory(tensor)
                if self._has_delta_net
                else self._memory(tensor)
            )
            return made.astype(np.float32 if tensor.qtype == QType.F32 else np.float16)
        if ".ffn_gate_inp." in tensor.name:
            return self._router(tensor)
        if ".attn_q_norm." in tensor.name:
            return f32_weights(tensor, self.seed) * np.float32(SHARPNESS)
        if tensor.name == "output_norm.weight":
            return self._output_norm()
        return None

    def _router(self, tensor: Tensor) -> Floats:
        """Returns router rows whose products with `shared`, `slow` and `token` have the
        locality's shares of variance.

        The share of `token` is larger by the factor OWN_GAIN.
        """
        rng = np.random.default_rng([self.seed, zlib.crc32(tensor.name.encode())])
        n_expert = tensor.shape[0]
        width = self.width
        locality = self.locality
        rows = sqrt(locality.constant) * np.outer(
            popularity(n_expert, rng), self._shared
        )
        slow = rows[:, width : width + self._n_slow]
        token = rows[:, 2 * width : 3 * width]
        slow += sqrt(locality.slow / self._n_slow) * rng.standard_normal(
            slow.shape, np.float32
        )
        token += sqrt(OWN_GAIN * locality.own / width) * rng.standard_normal(
            token.shape, np.float32
        )
        il = int(tensor.name.split(".")[1])
        return rows * np.float32(ROUTER_STD * sqrt(1 + GROWTH_PER_LAYER * il))

    def _output_norm(self) -> Floats:
        """Returns the output norm's weights: 0 for the three parts, so that they do not
        make tokens repeat, else 1."""
        made = np.ones(self.shape.n_embd, np.float32)
        made[: self.n_left_alone] = 0
        return made

    def _memory(self, tensor: Tensor) -> Floats:
        """Returns a tensor of the first layer's attention. The matrices of all heads
        but the averaging one are zero."""
        made = np.zeros(tensor.shape, np.float32)
        shape = self.shape
        from_shared = self._length * self._rms * self._shared
        first, second = self._pair
        kept = np.arange(self._n_slow)
        match tensor.name.removeprefix("blk.0."):
            case "attn_norm.weight" | "attn_kv_a_norm.weight":
                made[:] = 1
            case "attn_q_norm.weight" | "attn_k_norm.weight":
                made[:] = self._length / sqrt(shape.n_embd_head)
            case "attn_q.weight":
                made[shape.n_embd_head - self._n_rot + second] = from_shared
            case "attn_k.weight":
                made[first] = from_shared
            case "attn_v.weight":
                made[kept, 2 * self.width + kept] = 1
            case "attn_kv_a_mqa.weight":
                # Rows of the compressed values, then rows of the keys that RoPE
                # rotates.
                made[kept, 2 * self.width + kept] = 1
                made[shape.kv_lora_rank + first] = from_shared
            case "attn_v_b.weight":
                made[0, kept, kept] = 1
            case "attn_output.weight":
                made[self.width + kept, kept] = self._gain
        return made

    @property
    def _has_delta_net(self) -> bool:
        return self.shape.arch == "qwen35moe"

    def _delta_memory(self, tensor: Tensor) -> Floats:
        """Returns a tensor of the first layer's delta net. The matrices of all heads
        but the first are zero."""
        made = np.zeros(tensor.shape, np.float32)
        shape = self.shape
        one = self._rms * self._shared
        n_key = shape.ssm_n_group * shape.ssm_d_state
        n_head = shape.ssm_d_inner // shape.ssm_dt_rank
        kept = np.arange(self._n_slow)
        match tensor.name.removeprefix("blk.0."):
            case "attn_norm.weight" | "ssm_norm.weight":
                made[:] = 1
            case "attn_qkv.weight":  # rows of queries, keys and values
                made[0] = made[n_key] = VALUE_REACH * one
                made[2 * n_key + 2 * kept, 2 * self.width + kept] = (
                    VALUE_REACH * self._rms
                )
                made[2 * n_key + 2 * kept + 1, 2 * self.width + kept] = (
                    -VALUE_REACH * self._rms
                )
            case "attn_gate.weight":
                made[:n_head] = OPEN_GATE * one
            case "ssm_conv1d.weight":
                made[:, -1] = 1
            case "ssm_beta.weight":
                replaced = 1 - exp(-1 / self.locality.memory_tokens)
                made[0] = log(replaced / (1 - replaced)) * one
            case "ssm_out.weight":
                made[self.width + kept, 2 * kept] = self._delta_gain
                made[self.width + kept, 2 * kept + 1] = -self._delta_gain
        return made

    @property
    def _delta_gain(self) -> float:
        """Returns the output factor that makes the delta net's averages vary as much as
        the values that they average.

        The factor also cancels the norm before the output, which divides by the RMS of
        a head's values.
        """
        values = np.linspace(-8, 8, 4001)
        weights = np.exp(-(values**2) / 2)
        weights /= weights.sum()
        activated = VALUE_REACH * values / (1 + np.exp(-VALUE_REACH * values))
        mean = float(weights @ activated)
        variance = float(weights @ activated**2) - mean**2
        share = self._averaged_variance
        return sqrt(mean**2 + variance * share) / (VALUE_REACH * sqrt(share))

    @property
    def _averaged_variance(self) -> float:
        """Returns the variance of an exponential average, divided by the variance of
        the averaged values."""
        kept = exp(-1 / self.locality.memory_tokens)
        return (1 - kept) / (1 + kept)

    @cached_property
    def _shared(self) -> Floats:
        """Returns a row (n_embd,) whose dot product with every token embedding is 1."""
        block = dequantize(self.row_head, self.qtype)[: self.width]
        row = np.zeros(self.shape.n_embd, np.float32)
        row[: self.width] = block / (block @ block)
        return row

    @property
    def _n_slow(self) -> int:
        """Returns the number of used dimensions of `slow`: the values that one head can
        store, limited by `width`. A delta net stores each value with both signs, so its
        head can store half as many values as it has dimensions."""
        shape = self.shape
        n_values = (
            shape.ssm_d_state // 2
            if self._has_delta_net
            else shape.n_embd_head_v or shape.n_embd_head
        )
        return min(self.width, n_values)

    @property
    def _rms(self) -> float:
        """Returns the approximate RMS of a token embedding, by which the first layer's
        norm divides."""
        squares = (
            1 / float(self._shared @ self._shared) + self.shape.n_embd - 2 * self.width
        )
        return sqrt(squares / self.shape.n_embd)

    @property
    def _n_rot(self) -> int:
        return self.shape.n_rot or self.shape.n_embd_head

    def _angle(self, index: int) -> float:
        return ROPE_FREQ_BASE ** (-2 * index / self._n_rot)

    @cached_property
    def _pair_index(self) -> int:
        most = pi / 2 / min(self.shape.n_ctx_train, LONGEST_CONTEXT)
        return next(i for i in range(self._n_rot // 2) if self._angle(i) <= most)

    @property
    def _pair(self) -> tuple[int, int]:
        """Returns the chosen pair of dimensions: neighbours, or half of n_rot apart if
        RoPE rotates as in GPT-NeoX."""
        if self.shape.arch in ("llama", "deepseek2"):
            return 2 * self._pair_index, 2 * self._pair_index + 1
        return self._pair_index, self._pair_index + self._n_rot // 2

    @property
    def _length(self) -> float:
        """Returns the length of query and key at which q * k / sqrt(n_embd_head) is 1 /
        (angle * memory_tokens)."""
        score = 1 / (self._angle(self._pair_index) * self.locality.memory_tokens)
        return sqrt(score * sqrt(self.shape.n_embd_head))

    @property
    def _gain(self) -> float:
        """Returns the output factor that makes the head's averages vary as much as the
        averaged values."""
        value_std = (
            sqrt(self.shape.kv_lora_rank / self._n_slow)
            if self.shape.kv_lora_rank
            else 1 / self._rms
        )
        return 1 / (value_std * sqrt(self._averaged_variance))


def _is_memory(tensor: Tensor) -> bool:
    return tensor.name.startswith(("blk.0.attn_", "blk.0.ssm_"))
