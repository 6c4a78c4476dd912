"""ExpertFlow's routing-path predictor (section 3.1): experts of all layers from token ids, before the first layer.

A small T5 in numpy: a bidirectional encoder over the `window` tokens before a chunk, a decoder over the chunk token by
token with cross-attention to it, and one linear head per MoE layer for the experts of the token.
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

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Announcement, Float32s, Int32s, RoutingEvent
from moegguf.native.matvec import QuantizedMatrix
from moegguf.native.predictor import Array, NativePredictor, integers

NAME = "routing-path"
NORM_EPS = 1e-6
PROMPT_CHUNKS = 8  # of a longer prompt, this many evenly spaced chunks are computed; the others copy their neighbour

Memory = list[tuple[Float32s, Float32s]]  # per decoder block, keys and values of the encoder's states


def normed(x: Float32s) -> Float32s:
    """T5's norm over rows of (n, n_embd); its gain is part of the matrix that follows."""
    return x / np.sqrt(np.einsum("ij,ij->i", x, x)[:, np.newaxis] / x.shape[1] + NORM_EPS)


def attend(q: Float32s, k: Float32s, v: Float32s, mask: Float32s | None = None) -> Float32s:
    """Softmax attention. q (B, n_head, n, n_embd_head), already scaled; k, v the same with m rows; mask (n, m)."""
    scores: Float32s = q @ k.swapaxes(-1, -2)
    if mask is not None:
        scores += mask
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ v


class _Attention:
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

    def heads(self, x: Float32s, n_batch: int) -> Float32s:
        """(n_batch * n, parts * n_head * n_embd_head) as (parts, n_batch, n_head, n, n_embd_head)."""
        return x.reshape(n_batch, -1, x.shape[1] // self.out.shape[0], self.n_head, self.n_embd_head).transpose(
            2, 0, 3, 1, 4
        )

    def project(self, mixed: Float32s) -> Float32s:
        """Heads (B, n_head, n, n_embd_head) joined and projected: (B * n, n_embd)."""
        return mixed.transpose(0, 2, 1, 3).reshape(-1, self.out.shape[0]) @ self.out

    def arrays(self, name: str) -> dict[str, Array]:
        """What the store takes of it."""
        found = {"projection": self.projection, "out": self.out, **({"memory": self.memory} if self.crosses else {})}
        return {f"{name}.n_head": integers(self.n_head), **_quantized(name, found)}


class _FeedForward:
    """Two matrices with a ReLU between them."""

    def __init__(self, weights: Weights, name: str, n_embd: int) -> None:
        found = weights.arrays.get(f"{name}.up")
        n_ff = found.shape[1] if found is not None and found.ndim == 2 else 0
        gain = weights.array(f"{name}.norm", n_embd)[:, np.newaxis]
        self.up = gain * weights.array(f"{name}.up", n_embd, n_ff)
        self.down = weights.array(f"{name}.down", n_ff, n_embd)

    def __call__(self, x: Float32s) -> Float32s:
        return np.maximum(normed(x) @ self.up, 0) @ self.down

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
            (_Attention(weights, f"{name}.self", n_embd), _FeedForward(weights, f"{name}.feed", n_embd))
            for name in _blocks(arrays, "encoder")
        ]
        self.decoder = [
            (
                _Attention(weights, f"{name}.self", n_embd),
                _Attention(weights, f"{name}.cross", n_embd, encoder_gain),
                _FeedForward(weights, f"{name}.feed", n_embd),
            )
            for name in _blocks(arrays, "decoder")
        ]
        size = len(shape.layers), shape.n_expert
        gain = weights.array("output_norm", n_embd)[:, np.newaxis]
        self.heads = np.ascontiguousarray(gain * weights.array("heads.weight", n_embd, *size).reshape(n_embd, -1))
        self.bias = weights.array("heads.bias", *size).ravel()
        self.causal = np.triu(np.full((self.chunk, self.chunk), -np.inf, np.float32), k=1)

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

    def encode(self, windows: Int32s) -> Memory:
        """Keys and values of the encoder's states, for windows (B, window): the tokens before each chunk."""
        n_batch = len(windows)
        x = (self.embedding[windows] + self.window_positions).reshape(-1, self.embedding.shape[1])
        for attention, feed in self.encoder:
            q, k, v = attention.heads(normed(x) @ attention.projection, n_batch)
            x = x + attention.project(attend(q, k, v))
            x = x + feed(x)
        states = normed(x)
        return [self._keys_and_values(cross, states, n_batch) for _, cross, _ in self.decoder]

    @staticmethod
    def _keys_and_values(cross: _Attention, states: Float32s, n_batch: int) -> tuple[Float32s, Float32s]:
        k, v = np.ascontiguousarray(cross.heads(states @ cross.memory, n_batch))
        return k, v

    def empty_cache(self, n_batch: int) -> list[Float32s]:
        """An empty cache of the decoder for one chunk: per block (2, n_batch, n_head, chunk, n_embd_head)."""
        return [
            np.empty((2, n_batch, attention.n_head, self.chunk, attention.n_embd_head), np.float32)
            for attention, _, _ in self.decoder
        ]

    def decode(self, tokens: Int32s, first: int, memory: Memory, cache: list[Float32s]) -> Float32s:
        """Logits (B * n, n_moe_layer * n_expert) of tokens (B, n) at position `first` of their chunks; fills cache."""
        n_batch, n_tokens = tokens.shape
        end = first + n_tokens
        mask = self.causal[first:end, :end] if n_tokens > 1 else None
        x = (self.embedding[tokens] + self.chunk_positions[first:end]).reshape(-1, self.embedding.shape[1])
        for (attention, cross, feed), (keys, values), cached in zip(self.decoder, memory, cache, strict=True):
            q, *new = attention.heads(normed(x) @ attention.projection, n_batch)
            cached[0][:, :, first:end], cached[1][:, :, first:end] = new
            x = x + attention.project(attend(q, cached[0][:, :, :end], cached[1][:, :, :end], mask))
            (q,) = cross.heads(normed(x) @ cross.projection, n_batch)
            x = x + cross.project(attend(q, keys, values))
            x = x + feed(x)
        return normed(x) @ self.heads + self.bias


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


class RoutingPath(Predictor):
    """Predicts all layers of a pass when its tokens are announced; expert ids of routing events are not used.

    Probabilities of a pass of many tokens are those that any of them uses the expert, taken as independent. The encoder
    runs at the last layer of the last token of a chunk, so that it is finished before the next announcement. Tokens
    outside the vocabulary (embeddings instead of tokens) clear its state; such a pass has no prediction.
    """

    name: ClassVar[str] = NAME
    needs_tokens: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, network: PathNetwork) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self.network = network
        self._cache = self.network.empty_cache(1)
        self._recent: Int32s = np.empty(self.network.window, np.int32)
        self._sequence = -1
        self._released = False
        self._nonuse: Float32s | None = None  # (n_chunk, ...): -log of the probability that no token uses the expert
        self._table: Float32s | None = None
        self._reset()

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> RoutingPath:
        """Raises ValueError as `PathNetwork` does."""
        return cls(shape, PathNetwork(shape, weights))

    def native(self) -> NativePredictor:
        """The network in signed bytes. The store predicts tokens that decode, not prompts."""
        return NativePredictor(self.name, self.network.arrays())

    def release(self) -> None:
        """Forgets the network in float32."""
        self._released = True
        del self.network, self._cache

    def fork(self) -> RoutingPath:
        """Shares the network."""
        return RoutingPath(self.shape, self.network)

    def announce(self, announcement: Announcement) -> None:
        """Predicts: one decoder step for one token, chunk by chunk for many."""
        tokens = announcement.tokens
        self._nonuse = self._table = None
        if self._released:
            return
        if announcement.sequence != self._sequence:
            self._sequence = announcement.sequence
            self._reset()
        if len(tokens) == 0:
            return
        if tokens.min() < 0 or tokens.max() >= self.shape.n_vocab:
            self._reset()
            return
        self._nonuse = self._step(tokens) if len(tokens) == 1 else self._read(tokens)
        self._append_recent(tokens)
        self._set_table(self._nonuse)

    def observe(self, event: RoutingEvent) -> None:
        """Restricts a long announcement to the pass that began; a pass not announced discards the prediction."""
        if self._nonuse is None or event.first_token < 0 or event.sequence != self._sequence:
            self._nonuse = self._table = None
            return
        if len(self._nonuse) > 1 and event.il == self.shape.layers[0]:
            first, end = event.first_token, event.first_token + len(event.expert_ids)
            self._set_table(self._nonuse[first // self.network.chunk : -(-end // self.network.chunk)])
        if event.il == self.shape.layers[-1] and self._position == self.network.chunk:
            self._begin_chunk()

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The same at any distance; None for a pass that was not announced."""
        row = self.shape.row_of.get(il)
        return None if self._table is None or row is None else self._table[row]

    def _set_table(self, nonuse: Float32s) -> None:
        self._table = -np.expm1(-nonuse.sum(axis=0)).reshape(len(self.shape.layers), self.shape.n_expert)

    def _reset(self) -> None:
        self._recent[:] = self.shape.n_vocab
        self._position = self.network.chunk

    def _append_recent(self, tokens: Int32s) -> None:
        kept = np.concatenate([self._recent, tokens[-self.network.window :]])
        self._recent = kept[-self.network.window :]

    def _begin_chunk(self) -> None:
        self._memory = self.network.encode(self._recent[np.newaxis])
        self._position = 0

    def _step(self, tokens: Int32s) -> Float32s:
        if self._position == self.network.chunk:
            self._begin_chunk()
        logits = self.network.decode(tokens[np.newaxis], self._position, self._memory, self._cache)
        self._position += 1
        return np.logaddexp(0, logits)

    def _read(self, tokens: Int32s) -> Float32s:
        """(n_chunk, n_moe_layer * n_expert). The next token starts a new chunk."""
        window, chunk = self.network.window, self.network.chunk
        n_chunk = -(-len(tokens) // chunk)
        padded = np.full(window + n_chunk * chunk, self.shape.n_vocab, np.int32)
        padded[:window], padded[window : window + len(tokens)] = self._recent, tokens
        n_read = min(n_chunk, PROMPT_CHUNKS)
        starts = np.arange(n_read)[:, np.newaxis] * n_chunk // n_read * chunk
        memory = self.network.encode(padded[starts + np.arange(window)])
        positions = starts + window + np.arange(chunk)
        logits = self.network.decode(padded[positions], 0, memory, self.network.empty_cache(n_read))
        nonuse = np.logaddexp(0, logits) * (positions < window + len(tokens)).reshape(-1, 1)
        self._position = chunk
        return nonuse.reshape(n_read, chunk, -1).sum(axis=1)[np.arange(n_chunk) * n_read // n_chunk]
