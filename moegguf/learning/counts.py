"""Counts which experts the tokens of a recorded trace used: for popularity, affinity,
the token table and MoE-Infinity's collection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from moegguf.controller.collection import Eamc
from moegguf.controller.predictors.counts import MAX_COUNT
from moegguf.controller.weights import Weights
from moegguf.learning.gradients import Integers
from moegguf.native.events import Bools, Float32s
from moegguf.trace.trace import Trace

MOST_TOKENS = 1 << 15  # maximum number of entries in a token table


def multi_hot(expert_ids: Integers, n_expert: int) -> Bools:
    """Returns an array (..., n_expert) that is True for the experts in `expert_ids`
    (..., n_expert_used). Negative ids are padding."""
    *leading, _ = expert_ids.shape
    columns = np.where(expert_ids < 0, n_expert, expert_ids)
    columns = columns.astype(np.intp)
    size = *leading, n_expert + 1
    hot = np.zeros(size, np.bool_)
    np.put_along_axis(hot, columns, True, axis=-1)
    return hot[..., :n_expert]


def choices(trace: Trace, row: int) -> Float32s:
    """Returns (n_tokens, n_expert): 1 if the layer's router chose the expert for the
    token, else 0. `row` is the layer's position among the layers with experts. A token
    that the layer did not process has only zeros."""
    ids = trace.expert_ids[row]
    hot = multi_hot(ids, trace.shape.n_expert)
    return hot.astype(np.float32)


def choices_by_layer(trace: Trace) -> Iterator[Float32s]:
    """Yields the `choices` of each layer with experts."""
    for row in range(trace.shape.n_moe_layer):
        yield choices(trace, row)


def count_popularity(trace: Trace) -> Float32s:
    """Returns DuoServe-MoE's popularity P (n_moe_layer, n_expert) (equation 2): each
    expert's share of its layer's choices. In a layer without choices, all experts have
    equal shares."""
    counts = count_choices(trace)
    return _shares(counts, 1 / trace.shape.n_expert)


def count_choices(trace: Trace) -> Float32s:
    """Returns how often each expert was chosen, (n_moe_layer, n_expert)."""
    counts = [hot.sum(axis=0) for hot in choices_by_layer(trace)]
    return np.stack(counts)


def count_affinity(trace: Trace, popularity: Float32s) -> Float32s:
    """Returns DuoServe-MoE's affinity A (n_moe_layer - 1, n_expert, n_expert) (equation
    3). Row e of layer l holds the shares of the experts of layer l + 1 in the choices
    of tokens that used expert e in layer l.

    Each row sums to 1. If there are no such choices, row e of layer l is the popularity
    of layer l + 1.
    """
    by_layer = pairwise(choices_by_layer(trace))
    pairs = [here.T @ after for here, after in by_layer]
    n_expert = trace.shape.n_expert
    counts = np.array(pairs, np.float32)
    counts = counts.reshape(-1, n_expert, n_expert)
    return _shares(counts, popularity[1:, np.newaxis])


def _shares(counts: Float32s, default: Float32s | float) -> Float32s:
    """Returns the counts divided by their sum along the last axis, or `default` where
    the sum is 0."""
    totals = counts.sum(axis=-1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    found = np.where(totals > 0, shares, default)
    return found.astype(np.float32)


def count_tokens(trace: Trace, most_tokens: int = MOST_TOKENS) -> Weights:
    """Returns ProMoE's token table (section 4.2): `tokens` (n_entry,), and `counts`
    (n_entry, n_moe_layer, n_expert), how often each token id used each expert, at most
    MAX_COUNT. Tokens whose id is unknown or outside the vocabulary are left out. If
    there are more than `most_tokens` token ids, only the smallest ids are kept."""
    shape = trace.shape
    all_tokens = trace.tokens
    known = all_tokens >= 0
    known &= all_tokens < shape.n_vocab
    tokens = np.unique(all_tokens[known])[:most_tokens]
    kept = np.isin(all_tokens, tokens)
    entries = np.searchsorted(tokens, all_tokens[kept])
    size = len(tokens), shape.n_expert
    by_layer = []
    for hot in choices_by_layer(trace):
        sums = np.zeros(size, np.float32)
        np.add.at(sums, entries, hot[kept])
        limited = np.minimum(sums, MAX_COUNT)
        by_layer.append(limited.astype(np.uint16))
    counts = np.stack(by_layer, axis=1)
    tokens = tokens.astype(np.int32)
    return Weights({"tokens": tokens, "counts": counts})


def _popularity(trace: Trace) -> Weights:
    return Weights({"popularity": count_popularity(trace)})


def _affinity(trace: Trace) -> Weights:
    popularity = count_popularity(trace)
    return Weights({"affinity": count_affinity(trace, popularity)})


COUNTED: dict[str, Callable[[Trace], Weights]] = {
    "token-id": count_tokens,
    "popularity": _popularity,
    "affinity": _affinity,
}
"""{predictor: function that counts the predictor's arrays over all passes of a
trace}"""


def collect(trace: Trace, eamc: Eamc) -> None:
    """Adds each request's counts of decoded tokens to MoE-Infinity's collection. Skips
    a request if the collection already has an entry with equal counts."""
    shape = trace.shape
    rows = list(shape.layers)
    answers = trace.decode()
    for sequence in answers.sequences():
        answer = answers.select([sequence])
        ream = np.zeros(shape.table, np.float32)
        ream[rows] = count_choices(answer)
        is_equal = eamc.state == ream
        equal_entries = is_equal.all(axis=(1, 2))
        if not equal_entries.any():
            eamc.add(ream)
