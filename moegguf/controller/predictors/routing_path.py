"""ExpertFlow's routing-path predictor (section 3.1): experts of all layers from token ids, before the first layer.

A small T5, which the store computes: a bidirectional encoder over the `window` tokens before a chunk, a decoder over
the chunk token by token with cross-attention to it, and one linear head per MoE layer for the experts of the token.
predictors/train/routing_path.py trains it. Differences from T5, all to reduce the cost of one token: a chunk's encoder
states and the decoder's keys and values are cached, so that a token costs one decoder step and the encoder runs once
per chunk; positions in window and chunk are learned vectors instead of relative biases, as both have fixed lengths; a
window that begins before the request is filled with a learned token, so that only the causal mask is needed. Most of
its bytes are embeddings: n_vocab * n_embd * 2 in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Float32s
from moegguf.native.predictor import Array, NativePredictor, QuantizedMatrix, integers

NAME = "routing-path"
NORM_EPS = 1e-6


class Attention:
    """Projections of one attention; the norm's gain and the scale of the queries are folded into the matrices."""

    def __init__(self, weights: Weights, name: str, n_embd: int, memory_gain: Float32s | None = None) -> None:
        found = weights.arrays.get(f"{name}.q")
        _, self.n_head, self.n_embd_head = found.shape if found is not None and found.ndim == 3 else (0, 0, 0)
        size = n_embd, self.n_head, self.n_embd_head
        gain = weights.array(f"{name}.norm", n_embd)[:, np.newaxis]
        q, k, v = (weights.array(f"{name}.{part}", *size).reshape(n_embd, -1) for part in "qkv")
        q = q * (gain / np.sqrt(max(1, self.n_embd_head)))
        self.crosses = memory_gain is not None
        if memory_gain is None:
            self.projection = np.ascontiguousarray(np.hstack([q, gain * k, gain * v]), np.float32)
        else:
            self.projection = np.ascontiguousarray(q, np.float32)
            self.memory = np.ascontiguousarray(memory_gain[:, np.newaxis] * np.hstack([k, v]), np.float32)
        self.out = weights.array(f"{name}.out", self.n_head, self.n_embd_head, n_embd).reshape(-1, n_embd)

    def arrays(self, name: str) -> dict[str, Array]:
        """What the store takes of it."""
        found = {"projection": self.projection, "out": self.out, **({"memory": self.memory} if self.crosses else {})}
        return {f"{name}.n_head": integers(self.n_head), **_quantized(name, found)}


class FeedForward:
    """Two matrices with a ReLU between them."""

    def __init__(self, weights: Weights, name: str, n_embd: int) -> None:
        found = weights.arrays.get(f"{name}.up")
        n_ff = found.shape[1] if found is not None and found.ndim == 2 else 0
        gain = weights.array(f"{name}.norm", n_embd)[:, np.newaxis]
        self.up = gain * weights.array(f"{name}.up", n_embd, n_ff)
        self.down = weights.array(f"{name}.down", n_ff, n_embd)

    def arrays(self, name: str) -> dict[str, Array]:
        """What the store takes of it."""
        return _quantized(name, {"up": self.up, "down": self.down})


class PathNetwork:
    """The network. ValueError when an array is missing, not finite, or does not fit the shape of the model.

    Arrays: embedding (n_vocab + 1, n_embd), its last row the padding token; window (window, n_embd) and
    chunk (chunk, n_embd), the positions; encoder.I and decoder.I with .self, .cross (decoder only), each with .norm
    (n_embd,), .q, .k, .v (n_embd, n_head, n_embd_head) and .out (n_head, n_embd_head, n_embd), and .feed with .norm,
    .up (n_embd, n_ff) and .down; memory_norm and output_norm, the gains after the last blocks; heads.weight (n_embd,
    n_moe_layer, n_expert) and heads.bias.
    """

    def __init__(self, shape: MoeShape, weights: Weights) -> None:
        arrays = weights.arrays
        n_embd = _length(arrays, "embedding", 1)
        self.window, self.chunk = _length(arrays, "window", 0), _length(arrays, "chunk", 0)
        self.embedding = weights.array("embedding", shape.n_vocab + 1, n_embd)
        self.window_positions = weights.array("window", self.window, n_embd)
        self.chunk_positions = weights.array("chunk", self.chunk, n_embd)
        encoder_gain = weights.array("memory_norm", n_embd)
        self.encoder = [
            (Attention(weights, f"{name}.self", n_embd), FeedForward(weights, f"{name}.feed", n_embd))
            for name in _blocks(arrays, "encoder")
        ]
        self.decoder = [
            (
                Attention(weights, f"{name}.self", n_embd),
                Attention(weights, f"{name}.cross", n_embd, encoder_gain),
                FeedForward(weights, f"{name}.feed", n_embd),
            )
            for name in _blocks(arrays, "decoder")
        ]
        size = len(shape.layers), shape.n_expert
        gain = weights.array("output_norm", n_embd)[:, np.newaxis]
        self.heads = np.ascontiguousarray(gain * weights.array("heads.weight", n_embd, *size).reshape(n_embd, -1))
        self.bias = weights.array("heads.bias", *size).ravel()

    def arrays(self) -> dict[str, Array]:
        """What the store predicts with (`predictors/routing_path.cpp`): matrices in signed bytes."""
        n_vocab, n_embd = self.embedding.shape
        embedding = QuantizedMatrix(self.embedding)
        arrays: dict[str, Array] = {
            "n_embd": integers(n_embd), "n_vocab": integers(n_vocab - 1), "n_window": integers(self.window),
            "n_chunk": integers(self.chunk), "n_encoder": integers(len(self.encoder)),
            "n_decoder": integers(len(self.decoder)), "embedding.weights": embedding.bytes,
            "embedding.scale": embedding.scale, "window": self.window_positions, "chunk": self.chunk_positions,
            **QuantizedMatrix(np.ascontiguousarray(self.heads.T), self.bias).arrays("heads"),
        }  # fmt: skip
        for part, blocks in (("encoder", self.encoder), ("decoder", self.decoder)):
            for i, block in enumerate(blocks):
                for name, layer in zip(("self", *["cross"] * (len(block) - 2), "feed"), block, strict=True):
                    arrays |= layer.arrays(f"{part}.{i}.{name}")
        return arrays


def _quantized(name: str, matrices: Mapping[str, Float32s]) -> dict[str, Array]:
    """Matrices (n_in, n_out) as the store multiplies with them."""
    found: dict[str, Array] = {}
    for part, matrix in matrices.items():
        found |= QuantizedMatrix(np.ascontiguousarray(matrix.T)).arrays(f"{name}.{part}")
    return found


def _length(arrays: Mapping[str, npt.NDArray[Any]], name: str, axis: int) -> int:
    found = arrays.get(name)
    if found is None or found.ndim != 2 or found.shape[axis] == 0:
        raise ValueError(f"'{name}' must be a matrix that is not empty")
    return found.shape[axis]


def _blocks(arrays: Mapping[str, npt.NDArray[Any]], part: str) -> list[str]:
    """encoder.0, encoder.1, ...: one per distinct number in the arrays' names."""
    found = {name.split(".")[1] for name in arrays if name.startswith(f"{part}.")}
    return [f"{part}.{i}" for i in range(len(found))]


class RoutingPath(StorePredictor):
    """Predicts all layers of a pass when its tokens are announced; expert ids of routing events are not used.

    The store predicts tokens that decode, not prompts. The encoder runs at the last layer of the last token of a chunk,
    so that it is finished before the next announcement. Tokens outside the vocabulary (embeddings instead of tokens)
    clear its state; such a pass has no prediction.
    """

    name: ClassVar[str] = NAME
    needs_tokens: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, network: PathNetwork) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self.network = network

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> RoutingPath:
        """Raises ValueError as `PathNetwork` does."""
        return cls(shape, PathNetwork(shape, weights))

    def native(self) -> NativePredictor:
        """The network in signed bytes."""
        return NativePredictor(self.name, self.network.arrays())

    def release(self) -> None:
        """Forgets the network in float32."""
        del self.network
