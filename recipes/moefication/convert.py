"""Converts a dense network to a mixture of experts, layer by layer, using the
activations of tokens of text.

A layer's input is the output of the converted layers before it. Its down matrices are
fitted so that the residual stream after the layer is as close as possible to the dense
network's. Each layer thereby also corrects the error of the earlier layers, which
compute only some of their experts.
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
# Ridge penalties of the fits, as shares of the Gram matrix's diagonal.
ROUTER_RIDGE, DOWN_RIDGE = 0.1, 0.03
# A router is fitted to its own layer's input and, with less weight, to the inputs of at
# most LAYERS_BEFORE layers before it. The target for a token is the clusters'
# contributions at this token and, with more weight, at the preceding tokens. The
# choices then depend on features that neighbouring layers and tokens have in common, as
# in trained models. The experts that are not chosen contribute no more to the output
# than they would after a fit to the token alone.
LAYERS_BEFORE, WEIGHT_BEFORE = 8, 0.5
# TOKENS_BEFORE: weight of the running mean over tokens; SMOOTHING: share of this mean
# that is kept from token to token
TOKENS_BEFORE, SMOOTHING = 0.75, 0.8

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Split:
    """The division of a feed-forward network into experts."""

    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_expert_shared: int
    # standard deviation of a router's logits; if small, all chosen experts have about
    # the same weight
    router_std: float = 0.5

    @property
    def n_shared(self) -> int:
        """The number of neurons in the shared expert."""
        return self.n_expert_shared * self.n_ff_exp

    @property
    def name(self) -> str:
        """A name for files. Splits that differ only in `router_std` have the same
        name."""
        return f"{self.n_expert}x{self.n_ff_exp}-{self.n_expert_used}-{self.n_expert_shared}"

    def check(self, n_ff: int) -> None:
        """Raises ValueError unless the neurons that are not shared fill whole experts,
        and the experts can hold each such neuron at least once. Also raises ValueError
        if the number of used experts is not between 1 and n_expert."""
        n_routed = n_ff - self.n_shared
        if (
            n_routed < self.n_ff_exp
            or n_routed % self.n_ff_exp
            or self.n_expert * self.n_ff_exp < n_routed
        ):
            raise ValueError(
                f"{self.n_expert} experts of {self.n_ff_exp} neurons must hold the {n_routed} of the network's {n_ff}"
                f" that are not among {self.n_shared} shared ones, in whole experts"
            )
        if not 1 <= self.n_expert_used <= self.n_expert:
            raise ValueError(
                f"experts used must be in 1..{self.n_expert}, but are {self.n_expert_used}"
            )


@torch.no_grad()
def convert(
    network: Network,
    split: Split,
    ids: Tensor,
    rounded: Rounding,
    progress: Callable[[str], None],
) -> None:
    """Replaces each layer's feed-forward network with a Mixture. ids: (B, T), the text
    to fit on.

    `rounded` rounds a matrix to the values that the file can hold. The down matrices
    are fitted to the rounded gate and up matrices. Raises ValueError if the split does
    not fit the network.
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
        progress(
            f"layer {il}: {missing:.1%} of the output missing; stream {distance:.2%} from the dense one"
        )


def in_parts(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Applies the function to one part of `rows` at a time, and returns the joined
    results."""
    n_rows = ROWS_AT_ONCE if rows.dim() == 3 else ROWS_AT_ONCE * 512
    return torch.cat([function(part) for part in rows.split(n_rows)])


def mixture(
    ffn: FeedForward,
    split: Split,
    inputs: Sequence[Tensor],
    sizes: Tensor,
    rounded: Rounding,
    n_ctx: int,
) -> Mixture:
    """Returns a Mixture of the neurons of `ffn`, with its router.

    inputs: (n_tokens, n_embd) arrays, first the inputs of this layer, then the inputs
    of the layers before it. Each n_ctx tokens form one row of text. sizes: (n_tokens,
    1), the root mean square of each token's residual stream.
    """
    x = inputs[0]
    contributions = in_parts(ffn.neurons, x).abs() * ffn.down.norm(dim=0) / sizes
    some = contributions[:: max(1, len(x) // CLUSTERING_TOKENS)]
    order = order_neurons(some, split.n_shared, split.n_expert, split.n_ff_exp)
    routed = contributions[:, order[split.n_shared :]].unflatten(
        1, (split.n_expert, split.n_ff_exp)
    )
    clustered = FeedForward(ffn.gate.shape[1], len(order)).requires_grad_(False)
    clustered.gate.copy_(rounded(ffn.gate[order]))
    clustered.up.copy_(rounded(ffn.up[order]))
    router = fit_router(
        inputs, smoothed(routed.norm(dim=2).unflatten(0, (-1, n_ctx))), split.router_std
    )
    made = Mixture(clustered, router, split.n_ff_exp, split.n_expert_used)
    clustered.down.copy_(
        ffn.down[:, order] * _balance(made, order, x, contributions)[order]
    )
    return made


def fit_router(inputs: Sequence[Tensor], wanted: Tensor, std: float) -> Tensor:
    """Returns a router (n_expert, n_embd), fitted by ridge regression from the inputs
    to the target logits. Its logits are scaled to the standard deviation `std`.

    MoEfication fits a small network to the clusters' activation (section 3.3), but
    llama.cpp needs a linear router.
    """
    shares = [1.0, *[WEIGHT_BEFORE] * (len(inputs) - 1)]
    router = solve(
        sum(share * (x.T @ x) for share, x in zip(shares, inputs, strict=True)),
        sum(share * (x.T @ wanted) for share, x in zip(shares, inputs, strict=True)),
        ROUTER_RIDGE,
    )
    return router * (std / (inputs[0] @ router.T).std())


def smoothed(contributions: Tensor) -> Tensor:
    """Subtracts the mean over experts from each token's contributions, then mixes each
    token with a running mean of the tokens up to and including it.

    contributions: (B, T, n_expert). Returns (B * T, n_expert).
    """
    own = contributions - contributions.mean(dim=2, keepdim=True)
    before = own.clone()
    for at in range(1, own.shape[1]):
        before[:, at] = SMOOTHING * before[:, at - 1] + (1 - SMOOTHING) * own[:, at]
    return ((1 - TOKENS_BEFORE) * own + TOKENS_BEFORE * before).flatten(0, 1)


def _balance(layer: Mixture, order: Tensor, x: Tensor, contributions: Tensor) -> Tensor:
    """Returns, for each neuron of the dense network, a factor for the outputs of its
    copies.

    The chosen experts may contain several copies of a neuron, or none. The factor is
    fitted by least squares over the tokens, so that the copies together contribute
    about as much as the neuron does in the dense network.
    """
    weights = layer.weights(x).repeat_interleave(layer.n_ff_exp, dim=-1)
    ones = weights.new_ones(len(x), layer.n_ff_shexp)
    given = torch.zeros_like(contributions).index_add_(
        1, order, torch.cat((ones, weights), dim=-1)
    )
    squares = contributions.square()
    return (squares * given).sum(dim=0) / (squares * given.square()).sum(
        dim=0
    ).clamp_min(1e-12)


def correct(
    layer: Mixture, x: Tensor, target: Tensor, sizes: Tensor
) -> tuple[Tensor, float]:
    """Fits the down matrices so that the output of the chosen neurons is as close as
    possible to the target. Returns the output and the share of the target that is
    missing.

    Errors are divided by the size of their token's residual stream, because the next
    norm divides by this size. Without this division, a few tokens with a huge stream
    would dominate the fit.
    """
    neurons = in_parts(layer.weighted_neurons, x)
    missing = target - functional.linear(neurons, layer.ffn.down)
    layer.ffn.down += ridge(neurons / sizes, missing / sizes, DOWN_RIDGE)
    output = functional.linear(neurons, layer.ffn.down)
    return output, float(
        ((target - output) / sizes).square().sum() / (target / sizes).square().sum()
    )


def ridge(inputs: Tensor, outputs: Tensor, strength: float) -> Tensor:
    """Returns the matrix (n_outputs, n_inputs) of a ridge regression. The penalty on an
    input's weights is roughly in proportion to the input's sum of squares."""
    return solve(inputs.T @ inputs, inputs.T @ outputs, strength)


def solve(gram: Tensor, products: Tensor, strength: float) -> Tensor:
    """Solves the regression of `ridge`. `gram` is the inputs' Gram matrix, which is
    overwritten. `products` is inputs.T
    @ outputs."""
    diagonal = gram.diagonal().clone()
    gram.diagonal().add_(strength * (diagonal + diagonal.mean() * 1e-3))
    return torch.cholesky_solve(products, torch.linalg.cholesky(gram)).T.contiguous()
