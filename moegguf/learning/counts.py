"""Counts which experts the tokens of a recorded trace used: for popularity, affinity,
the token table and MoE-Infinity's collection."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moegguf.controller.collection import Eamc
from moegguf.controller.predictors.counts import MAX_COUNT
from moegguf.controller.weights import Weights
from moegguf.native.events import Float32s
from moegguf.trace.trace import Trace

MOST_TOKENS = 1 << 15  # maximum number of entries in a token table


def multi_hot(
    expert_ids: npt.NDArray[np.integer], n_expert: int
) -> npt.NDArray[np.bool_]:
    """Returns an array (..., n_expert) that is True for the experts in `expert_ids`
    (..., n_expert_used). Negative ids are padding."""
    hot = np.zeros((*expert_ids.shape[:-1], n_expert + 1), np.bool_)
    np.put_along_axis(
        hot,
        np.where(expert_ids < 0, n_expert, expert_ids).astype(np.intp),
        True,
        axis=-1,
    )
    return hot[..., :n_expert]


def choices(trace: Trace, row: int) -> Float32s:
    """Returns (n_tokens, n_expert): 1 if the layer's router chose the expert for the
    token, else 0. `row` is the layer's position among the layers with experts. A token
    that the layer did not process has only zeros."""
    return multi_hot(trace.expert_ids[row], trace.shape.n_expert).astype(np.float32)


def count_popularity(trace: Trace) -> Float32s:
    """Returns DuoServe-MoE's popularity P (n_moe_layer, n_expert) (equation 2): each
    expert's share of its layer's choices. In a layer without choices, all experts have
    equal shares."""
    counts = np.stack(
        [choices(trace, row).sum(axis=0) for row in range(len(trace.shape.layers))]
    )
    return _shares(counts, np.full_like(counts, 1 / trace.shape.n_expert))


def count_affinity(trace: Trace, popularity: Float32s) -> Float32s:
    """Returns DuoServe-MoE's affinity A (n_moe_layer - 1, n_expert, n_expert) (equation
    3). Row e of layer l holds the shares of the experts of layer l + 1 in the choices
    of tokens that used expert e in layer l.

    Each row sums to 1. If there are no such choices, row e of layer l is the popularity
    of layer l + 1.
    """
    hot = [choices(trace, row) for row in range(len(trace.shape.layers))]
    pairs = [here.T @ after for here, after in pairwise(hot)]
    n_expert = trace.shape.n_expert
    counts = np.stack(pairs) if pairs else np.zeros((0, n_expert, n_expert), np.float32)
    return _shares(counts, np.broadcast_to(popularity[1:, None, :], counts.shape))


def _shares(counts: Float32s, default: Float32s) -> Float32s:
    totals = counts.sum(axis=-1, keepdims=True)
    return np.where(totals > 0, counts / np.maximum(totals, 1), default).astype(
        np.float32
    )


def count_tokens(trace: Trace, most_tokens: int = MOST_TOKENS) -> Weights:
    """Returns ProMoE's token table (section 4.2): `tokens` (n_entry,), and `counts`
    (n_entry, n_moe_layer, n_expert), how often each token id used each expert, at most
    MAX_COUNT. Tokens whose id is unknown or outside the vocabulary are left out. If
    there are more than `most_tokens` token ids, only the smallest ids are kept."""
    known = (trace.tokens >= 0) & (trace.tokens < trace.shape.n_vocab)
    tokens = np.unique(trace.tokens[known])[:most_tokens]
    kept = np.isin(trace.tokens, tokens)
    entries = np.searchsorted(tokens, trace.tokens[kept])
    counts = np.zeros(
        (len(tokens), len(trace.shape.layers), trace.shape.n_expert), np.uint16
    )
    for row in range(len(trace.shape.layers)):
        sums = np.zeros((len(tokens), trace.shape.n_expert), np.float32)
        np.add.at(sums, entries, choices(trace, row)[kept])
        counts[:, row] = np.minimum(sums, MAX_COUNT)
    return Weights({"tokens": tokens.astype(np.int32), "counts": counts})


COUNTED: dict[str, Callable[[Trace], Weights]] = {
    "token-id": count_tokens,
    "popularity": lambda trace: Weights({"popularity": count_popularity(trace)}),
    "affinity": lambda trace: Weights(
        {"affinity": count_affinity(trace, count_popularity(trace))}
    ),
}
"""{predictor: function that counts the predictor's arrays over all passes of a
trace}"""


def collect(trace: Trace, eamc: Eamc) -> None:
    """Adds each request's counts of decoded tokens to MoE-Infinity's collection. Skips
    a request if the collection already has an entry with equal counts."""
    rows = list(trace.shape.layers)
    answers = trace.decode()
    for sequence in answers.sequences():
        ream = np.zeros(trace.shape.table, np.float32)
        request = answers.select([sequence])
        ream[rows] = [choices(request, row).sum(axis=0) for row in range(len(rows))]
        known = eamc.state
        if not (known == ream).all(axis=(1, 2)).any():
            eamc.add(ream)
