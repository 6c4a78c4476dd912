"""Predictors fitted to a recorded trace by counting: popularity, affinity, the token table."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from moegguf.controller.predictors.base import multi_hot
from moegguf.controller.predictors.popularity import Affinity, Popularity
from moegguf.controller.predictors.token_table import TokenTable
from moegguf.native.events import Float32s
from moegguf.trace.trace import Trace


def choices(trace: Trace, row: int) -> Float32s:
    """(n_tokens, n_expert): 1 where a token's router in MoE layer number `row` chose the expert; 0 if not computed."""
    return multi_hot(trace.expert_ids[row], trace.shape.n_expert).astype(np.float32)


def count_popularity(trace: Trace) -> Float32s:
    """DuoServe-MoE, equation 2: P (n_moe_layer, n_expert), rows sum to 1; uniform for layers never computed."""
    counts = np.stack([choices(trace, row).sum(axis=0) for row in range(len(trace.shape.layers))])
    return _shares(counts, np.full_like(counts, 1 / trace.shape.n_expert))


def count_affinity(trace: Trace, popularity: Float32s) -> Float32s:
    """DuoServe-MoE, equation 3: A (n_moe_layer - 1, n_expert, n_expert): choices in layer l + 1 per expert of layer l.

    Rows sum to 1; that of an expert never chosen is the popularity of the next layer.
    """
    hot = [choices(trace, row) for row in range(len(trace.shape.layers))]
    pairs = [here.T @ after for here, after in pairwise(hot)]
    n_expert = trace.shape.n_expert
    counts = np.stack(pairs) if pairs else np.zeros((0, n_expert, n_expert), np.float32)
    return _shares(counts, np.broadcast_to(popularity[1:, None, :], counts.shape))


def _shares(counts: Float32s, default: Float32s) -> Float32s:
    totals = counts.sum(axis=-1, keepdims=True)
    return np.where(totals > 0, counts / np.maximum(totals, 1), default).astype(np.float32)


def fit_popularity(trace: Trace) -> Popularity:
    """Popularity counted over all passes (DuoServe-MoE, section 4.1)."""
    return Popularity(trace.shape, count_popularity(trace))


def fit_affinity(trace: Trace) -> Affinity:
    """Affinity counted over all passes (DuoServe-MoE, section 4.1)."""
    return Affinity(trace.shape, count_affinity(trace, count_popularity(trace)))


def fit_token_table(trace: Trace) -> TokenTable:
    """Token table (ProMoE, section 4.2) of all passes; tokens without known id and experts are left out."""
    table = TokenTable(trace.shape)
    table.learn(trace.tokens, list(trace.expert_ids))
    return table
