"""Creates predictors that work by counting: popularity, affinity, the last token's
experts, and the experts that a token id used. The store computes the predictions."""

from __future__ import annotations

import numpy as np

from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.predictor import Array

MAX_COUNT = np.iinfo(np.uint16).max


def popularity(shape: MoeShape, weights: Weights) -> StorePredictor:
    """Creates DuoServe-MoE's popularity predictor (section 4.1): for each layer, how
    often an average token uses each expert. The store computes it as a `token-id` table
    without entries, in which every token id gets the average."""
    found = weights.array("popularity", shape.n_moe_layer, shape.n_expert)
    made = _table(
        shape,
        np.zeros(0, np.int32),
        np.zeros((0, *found.shape), np.uint16),
        found * shape.n_expert_used,
    )
    made.title = "popularity"
    return made


def affinity(shape: MoeShape, weights: Weights) -> StorePredictor:
    """Creates DuoServe-MoE's affinity predictor (section 4.1). For a sequence with one
    token in the pass, it predicts the next layer from the mean of the affinity matrix's
    rows for the experts just chosen."""
    found = weights.array(
        "affinity", shape.n_moe_layer - 1, shape.n_expert, shape.n_expert
    )
    return StorePredictor("affinity", shape, 1, {"affinity": found})


def previous_token(shape: MoeShape) -> StorePredictor:
    """Creates the predictor that uses temporal locality (ExpertFlow, section 5.2: TLP):
    the experts that the last token used in a layer get probability 1, and all others 0.

    It can predict every layer that it has observed at least once. If one request runs
    at a time, layers that were observed in an earlier request count, too.
    """
    return StorePredictor("previous-token", shape, shape.n_moe_layer)


def token_table(shape: MoeShape, weights: Weights) -> StorePredictor:
    """Creates ProMoE's token-based predictor (section 4.2): for all layers at once, the
    experts that a token id used most often.

    The arrays are `tokens` (n_entry,), token ids, and `counts` (n_entry, n_moe_layer,
    n_expert), how often each token id used each expert. Raises ValueError if they are
    not valid for the model, and KeyError if `tokens` is missing. A probability is the
    share of the token id's occurrences that used the expert, after adding one
    occurrence of an average token. The paper does not cover unseen tokens; here they
    get the layer's popularity.
    """
    tokens = weights.arrays["tokens"]
    below = tokens.min(initial=0) >= 0 and tokens.max(initial=-1) < shape.n_vocab
    if (
        tokens.ndim != 1
        or tokens.dtype != np.int32
        or not below
        or len(np.unique(tokens)) != len(tokens)
    ):
        raise ValueError(
            "'tokens' must be distinct token ids of the model; make the file again with `moegguf learn`"
        )
    counts = weights.array("counts", len(tokens), shape.n_moe_layer, shape.n_expert)
    if counts.min(initial=0) < 0 or counts.max(initial=0) > MAX_COUNT:
        raise ValueError(f"'counts' must be from 0 to {MAX_COUNT}; make the file again")
    counts = counts.astype(np.uint16)
    chosen = counts.sum(axis=0)
    sums = np.maximum(chosen.sum(axis=-1, keepdims=True), 1.0)
    return _table(shape, tokens, counts, chosen * (shape.n_expert_used / sums))


def _table(
    shape: MoeShape, tokens: Array, counts: Array, average: Array
) -> StorePredictor:
    """Creates the `token-id` predictor. `counts` has one entry for each token id in
    `tokens`. `average` (n_moe_layer, n_expert) is how often an average token uses each
    expert."""
    entry_of = np.full(max(1, shape.n_vocab), -1, np.int32)
    entry_of[tokens] = np.arange(len(tokens))
    arrays: dict[str, Array] = {
        "entry_of": entry_of,
        "counts": counts,
        "average": np.asarray(average, np.float32),
    }
    return StorePredictor("token-id", shape, shape.n_moe_layer, arrays)
