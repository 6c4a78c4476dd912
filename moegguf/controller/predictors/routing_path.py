"""ExpertFlow's routing-path predictor (section 3.1): predicts the experts of all layers
from token ids, before the first layer.

The store computes a small T5. A bidirectional encoder reads a window of tokens that
precedes a chunk of tokens. A decoder reads the chunk token by token with
cross-attention to the encoder. One linear head per layer with experts predicts the
experts of the token. moegguf/learning/routing_path.py trains the network.

The network differs from T5 to reduce the cost of one token. A chunk's encoder states
and the decoder's keys and values are cached, so a token costs one decoder step, and the
encoder runs once per chunk. Positions in the window and the chunk are learned vectors
instead of relative biases, because both have fixed lengths. A window that begins before
the request is filled with a learned token, so only the causal mask is needed. The
embeddings, (n_vocab + 1) * n_embd, are usually most of the network's weights.
"""

from __future__ import annotations

import numpy as np

from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Float32s
from moegguf.native.predictor import Array, QuantizedMatrix, integers

NORM_EPS = 1e-6


def routing_path(shape: MoeShape, weights: Weights) -> StorePredictor:
    """Creates the predictor. It predicts all layers of a pass when the pass's tokens
    are announced, and does not use the expert ids of routing events.

    The store predicts for answer tokens, not for prompts. The encoder runs at the last
    layer of the last token of a chunk, so the next token usually does not wait for it.
    Token ids outside the vocabulary (the caller passed embeddings instead of token ids)
    clear the predictor's state. A pass with such ids has no prediction.

    The store reads matrices in signed bytes, with the norms' gains folded in. Raises
    ValueError when an array is missing, not finite, or does not fit the model. The
    arrays in the file are:
    - embedding (n_vocab + 1, n_embd). Its last row is the padding token.
    - window (window, n_embd) and chunk (chunk, n_embd), the positions.
    - encoder.I and decoder.I with .self and .cross (decoder only). Each has .norm (n_embd,), .q, .k, .v (n_embd,
      n_head, n_embd_head) and .out (n_head, n_embd_head, n_embd).
    - encoder.I.feed and decoder.I.feed with .norm (n_embd,), .up (n_embd, n_ff) and .down (n_ff, n_embd).
    - memory_norm and output_norm, the gains after the last blocks.
    - heads.weight (n_embd, n_moe_layer, n_expert) and heads.bias (n_moe_layer, n_expert).
    """
    n_embd = _length(weights, "embedding", 1)
    n_window = _length(weights, "window", 0)
    n_chunk = _length(weights, "chunk", 0)
    embedding = QuantizedMatrix(weights.array("embedding", shape.n_vocab + 1, n_embd))
    size = shape.n_moe_layer, shape.n_expert
    heads = weights.array("heads.weight", n_embd, *size).reshape(n_embd, -1)
    heads = _gain(weights, "output_norm", n_embd) * heads
    bias = weights.array("heads.bias", *size).ravel()
    arrays: dict[str, Array] = {
        "n_embd": integers(n_embd),
        "n_vocab": integers(shape.n_vocab),
        "n_window": integers(n_window),
        "n_chunk": integers(n_chunk),
        "embedding.weights": embedding.bytes,
        "embedding.scale": embedding.scale,
        "window": weights.array("window", n_window, n_embd),
        "chunk": weights.array("chunk", n_chunk, n_embd),
        **QuantizedMatrix(np.ascontiguousarray(heads.T), bias).arrays("heads"),
    }
    for part in ("encoder", "decoder"):
        names = [name for name in weights.arrays if name.startswith(f"{part}.")]
        n_blocks = len({name.split(".")[1] for name in names})
        arrays[f"n_{part}"] = integers(n_blocks)
        for i in range(n_blocks):
            block = f"{part}.{i}"
            arrays |= _attention(weights, f"{block}.self", n_embd)
            arrays |= _feed_forward(weights, f"{block}.feed", n_embd)
            if part == "decoder":
                memory_gain = _gain(weights, "memory_norm", n_embd)
                arrays |= _attention(weights, f"{block}.cross", n_embd, memory_gain)
    return StorePredictor("routing-path", shape, shape.n_moe_layer, arrays)


def _attention(
    weights: Weights, name: str, n_embd: int, memory_gain: Float32s | None = None
) -> dict[str, Array]:
    """Returns the matrices of one attention block for the store. With `memory_gain`,
    the gain of the encoder's output, the block attends to the encoder's states. With
    None it attends to the tokens that it reads."""
    found = weights.arrays.get(f"{name}.q")
    _, n_head, n_embd_head = (
        found.shape if found is not None and found.ndim == 3 else (0, 0, 0)
    )
    gain = _gain(weights, f"{name}.norm", n_embd)
    size = n_embd, n_head, n_embd_head
    q, k, v = (
        weights.array(f"{name}.{part}", *size).reshape(n_embd, -1) for part in "qkv"
    )
    q = q * (gain / np.sqrt(max(1, n_embd_head)))
    out = weights.array(f"{name}.out", n_head, n_embd_head, n_embd).reshape(-1, n_embd)
    if memory_gain is None:
        matrices = {"projection": np.hstack([q, gain * k, gain * v]), "out": out}
    else:
        matrices = {
            "projection": q,
            "out": out,
            "memory": memory_gain * np.hstack([k, v]),
        }
    return {f"{name}.n_head": integers(n_head), **_quantized(name, matrices)}


def _feed_forward(weights: Weights, name: str, n_embd: int) -> dict[str, Array]:
    """Returns the two matrices of a feed-forward block, which has a ReLU between them,
    for the store."""
    found = weights.arrays.get(f"{name}.up")
    n_ff = found.shape[1] if found is not None and found.ndim == 2 else 0
    up = weights.array(f"{name}.up", n_embd, n_ff)
    up = _gain(weights, f"{name}.norm", n_embd) * up
    down = weights.array(f"{name}.down", n_ff, n_embd)
    return _quantized(name, {"up": up, "down": down})


def _quantized(name: str, matrices: dict[str, Float32s]) -> dict[str, Array]:
    """Returns the matrices, each (n_in, n_out), transposed and in signed bytes: the
    form that the store reads."""
    found: dict[str, Array] = {}
    for part, matrix in matrices.items():
        transposed = np.ascontiguousarray(matrix.T, np.float32)
        found |= QuantizedMatrix(transposed).arrays(f"{name}.{part}")
    return found


def _gain(weights: Weights, name: str, n_embd: int) -> Float32s:
    return weights.array(name, n_embd)[:, np.newaxis]


def _length(weights: Weights, name: str, axis: int) -> int:
    found = weights.arrays.get(name)
    if found is None or found.ndim != 2 or found.shape[axis] == 0:
        raise ValueError(f"'{name}' must be a matrix that is not empty")
    return found.shape[axis]
