"""Random models whose routing is reused from token to token as published of a real model (`tools.models.locality`).

The hidden state of such a model begins with three parts of equal width. Only the first layer writes them, and the
routers read them. `shared` is equal for all tokens, `slow` is written by the first layer's attention, and `token`
comes from the token's embedding.

That attention has one head. Its queries and keys come from `shared`, so they are equal for every token, and only RoPE
distinguishes positions. A pair of dimensions that turns by `angle` per token gives distance d the score
-sin(d * angle) / (angle * memory_tokens), which is nearly -d / memory_tokens. So the head averages `token` over the
last memory_tokens tokens. This is the AR(1) process of `synthesize`, computed by a transformer that llama.cpp knows.

The first layer of Qwen3.5 and later is a gated delta net. There one head has one key for every token, and nothing
decays. Each token replaces the share 1 / memory_tokens of the state's value for that key, which is the AR(1) process,
too. Values pass SiLU on their way, and silu(v) - silu(-v) = v, so each value is stored with both signs.
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

LEAST_REST = 32  # dimensions that are left to the layers
# The score rises again beyond pi / angle tokens, so the angle is at most a quarter turn over this many. Smaller angles
# would reach further, but the keys of neighbouring tokens would then be equal in 16 bits.
LONGEST_CONTEXT = 8192
# Scores of attention in the other layers vary by this much: each head looks at few tokens, other ones at every step,
# which keeps greedy decoding from loops.
SHARPNESS = 4.0
# Least-recent-use eviction hits 1 or 2 points more often than in `synthesize`. Experts' logits depend on each other in
# few dimensions, and sampled tokens come again. More variance of the token's own part corrects this.
OWN_GAIN = 1.08
# Each layer adds this much variance to the hidden state (measured), whose norm then makes the three parts smaller.
GROWTH_PER_LAYER = 0.37
# The reach of a delta net's values into SiLU, and the input of a gate that SiLU makes 1.
VALUE_REACH = 8.0
OPEN_GATE = 1.2784645


@dataclass(frozen=True)
class SlowRouting:
    """The weights that make the routing of a random model slow. qtype: of the token embeddings."""

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
        """Width of each of the three parts: whole blocks of the token embeddings."""
        block = GGML_QUANT_SIZES[self.qtype][0]
        return max(self.shape.n_embd // 8 // block, 1) * block

    @property
    def n_left_alone(self) -> int:
        """The number of first dimensions that the layers do not write."""
        return 3 * self.width

    @cached_property
    def row_head(self) -> NDArray[np.uint8]:
        """The bytes of `shared` and `slow` in every token's embedding: the same random blocks, then zeros."""
        shared = random_blocks(self.qtype, self.width // GGML_QUANT_SIZES[self.qtype][0], 1.0, self.seed).ravel()
        return np.concatenate([shared, np.zeros_like(shared)])

    def plan(self, tensor: Tensor) -> Tensor:
        """A tensor of the model, with the type, the spread and the rows of zeros that it gets here."""
        role = tensor.name.split(".")[-2]
        if _is_memory(tensor):
            return replace(tensor, qtype=QType.F16) if tensor.qtype != QType.F32 else tensor
        if role in ("attn_output", "ssm_out") or role.startswith("ffn_down"):
            return replace(tensor, n_zero_rows=self.n_left_alone)
        if role == "attn_q" and not self._has_delta_net:  # there it holds gates, too
            return replace(tensor, std=tensor.std * SHARPNESS)
        return tensor

    def weights(self, tensor: Tensor) -> NDArray[np.generic] | None:
        """The values of a tensor; None for those that stay as random as in any other model."""
        if _is_memory(tensor):
            made = self._delta_memory(tensor) if self._has_delta_net else self._memory(tensor)
            return made.astype(np.float32 if tensor.qtype == QType.F32 else np.float16)
        if ".ffn_gate_inp." in tensor.name:
            return self._router(tensor)
        if ".attn_q_norm." in tensor.name:
            return f32_weights(tensor, self.seed) * np.float32(SHARPNESS)
        if tensor.name == "output_norm.weight":
            return self._output_norm()
        return None

    def _router(self, tensor: Tensor) -> Floats:
        """Rows whose products with the three parts have the variances of `locality`."""
        rng = np.random.default_rng([self.seed, zlib.crc32(tensor.name.encode())])
        n_expert = tensor.shape[0]
        width = self.width
        locality = self.locality
        rows = sqrt(locality.constant) * np.outer(popularity(n_expert, rng), self._shared)
        slow = rows[:, width : width + self._n_slow]
        token = rows[:, 2 * width : 3 * width]
        slow += sqrt(locality.slow / self._n_slow) * rng.standard_normal(slow.shape, np.float32)
        token += sqrt(OWN_GAIN * locality.own / width) * rng.standard_normal(token.shape, np.float32)
        il = int(tensor.name.split(".")[1])
        return rows * np.float32(ROUTER_STD * sqrt(1 + GROWTH_PER_LAYER * il))

    def _output_norm(self) -> Floats:
        """Hides the three parts from the output: a token that they made likely would come again and again."""
        made = np.ones(self.shape.n_embd, np.float32)
        made[: self.n_left_alone] = 0
        return made

    def _memory(self, tensor: Tensor) -> Floats:
        """A tensor of the first layer's attention. What is not named here is zero, such as all other heads."""
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
            case "attn_kv_a_mqa.weight":  # compressed values, then the part of the keys that RoPE turns
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
        """A tensor of the first layer's delta net. All but the first head is zero."""
        made = np.zeros(tensor.shape, np.float32)
        shape = self.shape
        one = self._rms * self._shared
        n_key = shape.ssm_n_group * shape.ssm_d_state
        n_head = shape.ssm_d_inner // shape.ssm_dt_rank
        kept = np.arange(self._n_slow)
        match tensor.name.removeprefix("blk.0."):
            case "attn_norm.weight" | "ssm_norm.weight":
                made[:] = 1
            case "attn_qkv.weight":  # queries, keys, values
                made[0] = made[n_key] = VALUE_REACH * one
                made[2 * n_key + 2 * kept, 2 * self.width + kept] = VALUE_REACH * self._rms
                made[2 * n_key + 2 * kept + 1, 2 * self.width + kept] = -VALUE_REACH * self._rms
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
        """Makes averages vary as much as what they are of, behind a norm that divides by the length of all values."""
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
        """The variance of an average, as a share of the variance of what is averaged."""
        kept = exp(-1 / self.locality.memory_tokens)
        return (1 - kept) / (1 + kept)

    @cached_property
    def _shared(self) -> Floats:
        """(n_embd,): gives 1 when multiplied with an embedding."""
        block = dequantize(self.row_head, self.qtype)[: self.width]
        row = np.zeros(self.shape.n_embd, np.float32)
        row[: self.width] = block / (block @ block)
        return row

    @property
    def _n_slow(self) -> int:
        """Dimensions of `slow` in use: as many as a head has values."""
        shape = self.shape
        n_values = shape.ssm_d_state // 2 if self._has_delta_net else shape.n_embd_head_v or shape.n_embd_head
        return min(self.width, n_values)

    @property
    def _rms(self) -> float:
        """The divisor of an embedding in the first layer's norm, about."""
        squares = 1 / float(self._shared @ self._shared) + self.shape.n_embd - 2 * self.width
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
        """The dimensions that turn together: neighbours or, as GPT-NeoX has it, half a head apart."""
        if self.shape.arch in ("llama", "deepseek2"):
            return 2 * self._pair_index, 2 * self._pair_index + 1
        return self._pair_index, self._pair_index + self._n_rot // 2

    @property
    def _length(self) -> float:
        """Scale of query and key: their product, over the root of the head's width, is 1 / (angle * memory_tokens)."""
        score = 1 / (self._angle(self._pair_index) * self.locality.memory_tokens)
        return sqrt(score * sqrt(self.shape.n_embd_head))

    @property
    def _gain(self) -> float:
        """Makes averages vary as much as what they are of."""
        value_std = sqrt(self.shape.kv_lora_rank / self._n_slow) if self.shape.kv_lora_rank else 1 / self._rms
        return 1 / (value_std * sqrt(self._averaged_variance))


def _is_memory(tensor: Tensor) -> bool:
    return tensor.name.startswith(("blk.0.attn_", "blk.0.ssm_"))
