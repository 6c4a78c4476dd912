"""From a dense network to a mixture of experts, layer by layer, with what tokens of text do in each layer.

Each layer sees what the converted layers before it give, and its down matrices are fitted to what the dense network
has in the stream after it, so that a layer makes good for the experts that were not computed up to there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from predictors.models.moefication.clustering import order_neurons
from predictors.models.moefication.network import FeedForward, Layer, Mixture, Network, rope

CLUSTERING_TOKENS = 4096
ROWS_AT_ONCE = 8
ROUTER_RIDGE, DOWN_RIDGE = 0.01, 0.03  # of the mean of the diagonal
# Standard deviation of the router's logits: chosen experts weigh the same within a few tenths of a percent.
LOGIT_STD = 1e-3

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Split:
    """How a feed-forward network is divided."""

    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_expert_shared: int

    @property
    def n_shared(self) -> int:
        """Neurons of the shared expert."""
        return self.n_expert_shared * self.n_ff_exp

    def check(self, n_ff: int) -> None:
        """Raises ValueError unless the parts add up to n_ff."""
        if self.n_ff_exp * (self.n_expert + self.n_expert_shared) != n_ff:
            raise ValueError(
                f"{self.n_expert} experts and {self.n_expert_shared} shared ones of {self.n_ff_exp} neurons must add"
                f" up to the network's {n_ff}, but give {self.n_ff_exp * (self.n_expert + self.n_expert_shared)}"
            )
        if not 1 <= self.n_expert_used <= self.n_expert:
            raise ValueError(f"experts used must be in 1..{self.n_expert}, but are {self.n_expert_used}")


@torch.no_grad()
def convert(network: Network, split: Split, ids: Tensor, rounded: Rounding, progress: Callable[[str], None]) -> None:
    """Replaces each layer's feed-forward network by a Mixture. ids: (B, T), the text to fit on.

    `rounded` gives a matrix as the file will hold it: down matrices are fitted to gate and up after rounding.
    """
    split.check(network.shape.n_ff)
    angles = rope(network.shape, ids.shape[1])
    dense = functional.embedding(ids, network.token_embd)
    sparse = dense.clone()
    for il, layer in enumerate(network.layers):
        assert isinstance(layer, Layer) and isinstance(layer.ffn, FeedForward)
        dense = in_parts(partial(layer.forward, angles=angles), dense)
        sparse = in_parts(partial(layer.attended, angles=angles), sparse)
        x = layer.ffn_norm(sparse).flatten(0, 1)
        sizes = dense.flatten(0, 1).square().mean(dim=1, keepdim=True).sqrt()
        layer.ffn = mixture(layer.ffn, split, x, sizes, rounded)
        output, missing = correct(layer.ffn, x, (dense - sparse).flatten(0, 1), sizes)
        sparse += output.view_as(sparse)
        distance = ((sparse - dense).flatten(0, 1) / sizes).square().mean()
        progress(f"layer {il}: {missing:.1%} of the output missing; stream {distance:.2%} from the dense one")


def in_parts(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """The function over a few rows at a time."""
    n_rows = ROWS_AT_ONCE if rows.dim() == 3 else ROWS_AT_ONCE * 512
    return torch.cat([function(part) for part in rows.split(n_rows)])


def mixture(ffn: FeedForward, split: Split, x: Tensor, sizes: Tensor, rounded: Rounding) -> Mixture:
    """The same neurons in clusters, with a router. x: (n_tokens, n_embd); sizes: (n_tokens, 1), of the stream."""
    contributions = in_parts(ffn.neurons, x).abs() * ffn.down.norm(dim=0) / sizes
    some = contributions[:: max(1, len(x) // CLUSTERING_TOKENS)]
    order = order_neurons(some, split.n_shared, split.n_ff_exp)
    routed = contributions[:, order[split.n_shared :]].unflatten(1, (split.n_expert, split.n_ff_exp))
    clustered = FeedForward(*reversed(ffn.gate.shape)).requires_grad_(False)
    clustered.gate.copy_(rounded(ffn.gate[order]))
    clustered.up.copy_(rounded(ffn.up[order]))
    clustered.down.copy_(ffn.down[:, order])
    return Mixture(clustered, fit_router(x, routed.norm(dim=2)), split.n_ff_exp, split.n_expert_used)


def fit_router(x: Tensor, contributions: Tensor) -> Tensor:
    """Least squares from the router's input to each cluster's contribution, scaled to LOGIT_STD: (n_expert, n_embd).

    MoEfication fits a small network to the clusters' activation (section 3.3); a router of llama.cpp is linear.
    """
    router = ridge(x, contributions, ROUTER_RIDGE)
    return router * (LOGIT_STD / (x @ router.T).std())


def correct(layer: Mixture, x: Tensor, target: Tensor, sizes: Tensor) -> tuple[Tensor, float]:
    """Moves the down matrices so that the chosen neurons give the target; returns (output, share that is missing).

    Errors count in proportion to the stream, which the next norm divides by its size: a few tokens have a huge one.
    """
    neurons = in_parts(layer.weighted_neurons, x)
    missing = target - functional.linear(neurons, layer.ffn.down)
    layer.ffn.down += ridge(neurons / sizes, missing / sizes, DOWN_RIDGE)
    output = functional.linear(neurons, layer.ffn.down)
    return output, float(((target - output) / sizes).square().sum() / (target / sizes).square().sum())


def ridge(inputs: Tensor, outputs: Tensor, strength: float) -> Tensor:
    """The matrix (n_outputs, n_inputs) that maps inputs to outputs best, held down in proportion to each input."""
    gram = inputs.T @ inputs
    diagonal = gram.diagonal().clone()
    gram.diagonal().add_(strength * (diagonal + diagonal.mean() * 1e-3))
    return torch.cholesky_solve(inputs.T @ outputs, torch.linalg.cholesky(gram)).T.contiguous()
