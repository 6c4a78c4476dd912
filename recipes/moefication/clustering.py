"""Chooses the shared neurons, and divides the others into clusters of equal size.
Neurons that are active for the same tokens go into the same cluster.

A single clustering uses each neuron once. If the model needs more experts, the neurons
are clustered again with other tokens. A neuron then belongs to several experts, just as
several experts of a trained model share some knowledge.

The methods are from MoEfication (Zhang et al., 2022, section 3.2, co-activation graph
split) and from CMoE (Pei et al., 2025, section 3.1: shared neurons, then balanced
k-means). MoEfication counts non-zero activations, but SwiGLU's activations are
practically never 0. A neuron's contribution is therefore the length of the vector that
it adds to the residual stream.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROUNDS = 8


def order_neurons(
    contributions: Tensor, n_shared: int, n_expert: int, n_ff_exp: int
) -> Tensor:
    """Returns the indices of the neurons in the order of a Mixture: first the shared
    neurons, then the neurons of each expert. contributions: (n_tokens, n_ff)."""
    by_size = contributions.square().mean(dim=0).argsort(descending=True)
    shared, others = by_size[:n_shared], by_size[n_shared:].sort().values
    order, n_clusters = [shared], len(others) // n_ff_exp
    n_times = -(-n_expert // n_clusters)
    for number in range(n_times):
        some = contributions[number::n_times, others]
        clusters = balanced_clusters(some.T, n_clusters, number)
        order.append(others[clusters.argsort(stable=True)])
    return torch.cat(order)[: n_shared + n_expert * n_ff_exp]


def balanced_clusters(rows: Tensor, n_clusters: int, seed: int = 0) -> Tensor:
    """Returns the cluster of each row, by k-means on the rows scaled to length 1. All
    clusters have the same number of rows. The number of rows must be a multiple of
    n_clusters."""
    rows = functional.normalize(rows, dim=1)
    start = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[
        :n_clusters
    ]
    centres, clusters = rows[start], torch.empty(0)
    for _ in range(ROUNDS):
        clusters = fill_evenly(rows @ centres.T)
        sums = torch.zeros_like(centres).index_add(0, clusters, rows)
        centres = functional.normalize(sums, dim=1)
    return clusters


def fill_evenly(similarity: Tensor) -> Tensor:
    """Returns a column for each row, so that each column is chosen equally often. Rows
    whose best column is clearly better than their second-best column choose first. The
    number of rows must be a multiple of the number of columns."""
    n_rows, n_columns = similarity.shape
    best = similarity.topk(min(2, n_columns), dim=1).values
    wishes = similarity.argsort(dim=1, descending=True).tolist()
    room, chosen = (
        [n_rows // n_columns] * n_columns,
        torch.empty(n_rows, dtype=torch.int64),
    )
    for row in (best[:, 0] - best[:, -1]).argsort(descending=True).tolist():
        column = next(wish for wish in wishes[row] if room[wish])
        room[column] -= 1
        chosen[row] = column
    return chosen
