"""From a dense network to a mixture of experts, layer by layer, with what tokens of text do in each layer.

Each layer sees what the converted layers before it give, and its down matrices are fitted to what the dense network
has in the stream after it, so that a layer makes good for the experts that were not computed up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from recipes.moefication.clustering import order_neurons
from recipes.moefication.network import FeedForward, Layer, Mixture, Network, rope

CLUSTERING_TOKENS = 4096
ROWS_AT_ONCE = 8
ROUTER_RIDGE, DOWN_RIDGE = 0.1, 0.03  # of the mean of the diagonal
# A router is fitted to its own input and, with less weight, to those of the layers before; and to what clusters give
# at its token and, with more weight, at those before. Which experts it chooses then follows from what layers and tokens
# have in common, as in trained models, and what is left out by choosing them is no more.
LAYERS_BEFORE, WEIGHT_BEFORE = 8, 0.5
TOKENS_BEFORE, SMOOTHING = 0.75, 0.8  # weight of the running mean of tokens, and what it keeps at each

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Split:
    """How a feed-forward network is divided. router_std: standard deviation of a router's logits; chosen experts weigh
    nearly the same where it is small."""

    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_expert_shared: int
    router_std: float = 0.5

    @property
    def n_shared(self) -> int:
        """Neurons of the shared expert."""
        return self.n_expert_shared * self.n_ff_exp

    @property
    def name(self) -> str:
        """What tells it from others, for files."""
        return f"{self.n_expert}x{self.n_ff_exp}-{self.n_expert_used}-{self.n_expert_shared}"

    def check(self, n_ff: int) -> None:
        """Raises ValueError unless the experts hold each of n_ff neurons that is not shared at least once."""
        n_routed = n_ff - self.n_shared
        if n_routed < self.n_ff_exp or n_routed % self.n_ff_exp or self.n_expert * self.n_ff_exp < n_routed:
            raise ValueError(
                f"{self.n_expert} experts of {self.n_ff_exp} neurons must hold the {n_routed} of the network's {n_ff}"
                f" that are not among {self.n_shared} shared ones, in whole experts"
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
    sparse, inputs = dense.clone(), list[Tensor]()
    for il, layer in enumerate(network.layers):
        assert isinstance(layer, Layer) and isinstance(layer.ffn, FeedForward)
        dense = in_parts(partial(layer.forward, angles=angles), dense)
        sparse = in_parts(partial(layer.attended, angles=angles), sparse)
        x = layer.ffn_norm(sparse).flatten(0, 1)
        sizes = dense.flatten(0, 1).square().mean(dim=1, keepdim=True).sqrt()
        inputs = [x, *inputs[:LAYERS_BEFORE]]
        layer.ffn = mixture(layer.ffn, split, inputs, sizes, rounded, ids.shape[1])
        output, missing = correct(layer.ffn, x, (dense - sparse).flatten(0, 1), sizes)
        sparse += output.view_as(sparse)
        distance = ((sparse - dense).flatten(0, 1) / sizes).square().mean()
        progress(f"layer {il}: {missing:.1%} of the output missing; stream {distance:.2%} from the dense one")


def in_parts(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """The function over a few rows at a time."""
    n_rows = ROWS_AT_ONCE if rows.dim() == 3 else ROWS_AT_ONCE * 512
    return torch.cat([function(part) for part in rows.split(n_rows)])


def mixture(
    ffn: FeedForward, split: Split, inputs: Sequence[Tensor], sizes: Tensor, rounded: Rounding, n_ctx: int
) -> Mixture:
    """The same neurons in clusters, with a router.

    inputs: (n_tokens, n_embd), of this layer and of those before it, of rows of n_ctx tokens; sizes: (n_tokens, 1), of
    the stream.
    """
    x = inputs[0]
    contributions = in_parts(ffn.neurons, x).abs() * ffn.down.norm(dim=0) / sizes
    some = contributions[:: max(1, len(x) // CLUSTERING_TOKENS)]
    order = order_neurons(some, split.n_shared, split.n_expert, split.n_ff_exp)
    routed = contributions[:, order[split.n_shared :]].unflatten(1, (split.n_expert, split.n_ff_exp))
    clustered = FeedForward(ffn.gate.shape[1], len(order)).requires_grad_(False)
    clustered.gate.copy_(rounded(ffn.gate[order]))
    clustered.up.copy_(rounded(ffn.up[order]))
    router = fit_router(inputs, smoothed(routed.norm(dim=2).unflatten(0, (-1, n_ctx))), split.router_std)
    made = Mixture(clustered, router, split.n_ff_exp, split.n_expert_used)
    clustered.down.copy_(ffn.down[:, order] * _balance(made, order, x, contributions)[order])
    return made


def fit_router(inputs: Sequence[Tensor], wanted: Tensor, std: float) -> Tensor:
    """Least squares from the routers' inputs to what is wanted of each cluster, scaled to `std`: (n_expert, n_embd).

    MoEfication fits a small network to the clusters' activation (section 3.3); a router of llama.cpp is linear.
    """
    shares = [1.0, *[WEIGHT_BEFORE] * (len(inputs) - 1)]
    router = solve(
        sum(share * (x.T @ x) for share, x in zip(shares, inputs, strict=True)),
        sum(share * (x.T @ wanted) for share, x in zip(shares, inputs, strict=True)),
        ROUTER_RIDGE,
    )
    return router * (std / (inputs[0] @ router.T).std())


def smoothed(contributions: Tensor) -> Tensor:
    """(B, T, n_expert) -> (B * T, n_expert): each token's, less their mean, mixed with those of tokens before it."""
    own = contributions - contributions.mean(dim=2, keepdim=True)
    before = own.clone()
    for at in range(1, own.shape[1]):
        before[:, at] = SMOOTHING * before[:, at - 1] + (1 - SMOOTHING) * own[:, at]
    return ((1 - TOKENS_BEFORE) * own + TOKENS_BEFORE * before).flatten(0, 1)


def _balance(layer: Mixture, order: Tensor, x: Tensor, contributions: Tensor) -> Tensor:
    """By neuron of the dense network, what its copies' outputs are multiplied with so that, together, they give as much
    as it did where it contributes: several copies may be chosen, or none."""
    weights = layer.weights(x).repeat_interleave(layer.n_ff_exp, dim=-1)
    ones = weights.new_ones(len(x), layer.n_ff_shexp)
    given = torch.zeros_like(contributions).index_add_(1, order, torch.cat((ones, weights), dim=-1))
    squares = contributions.square()
    return (squares * given).sum(dim=0) / (squares * given.square()).sum(dim=0).clamp_min(1e-12)


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
    return solve(inputs.T @ inputs, inputs.T @ outputs, strength)


def solve(gram: Tensor, products: Tensor, strength: float) -> Tensor:
    """`ridge` of inputs with this Gram matrix, which is overwritten, and these products with the outputs."""
    diagonal = gram.diagonal().clone()
    gram.diagonal().add_(strength * (diagonal + diagonal.mean() * 1e-3))
    return torch.cholesky_solve(products, torch.linalg.cholesky(gram)).T.contiguous()
