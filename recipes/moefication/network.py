"""The network before and after the conversion: Llama's layers, each with a dense
feed-forward network or a mixture of experts.

The networks compute the same functions as llama.cpp's `src/models/llama.cpp` and
`deepseek.cpp`. Matrices have the shape [rows, row length].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.demo.model import RMSNorm


@dataclass(frozen=True)
class Shape:
    """Sizes of the dense network, with the names that GGUF uses."""

    n_vocab: int
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_ctx_train: int
    rope_freq_base: float
    norm_eps: float

    @property
    def n_embd_head(self) -> int:
        """The width of one attention head."""
        return self.n_embd // self.n_head


def rope(shape: Shape, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of the rotary angles, each (n_tokens, n_embd_head / 2)."""
    half = shape.n_embd_head // 2
    freqs = shape.rope_freq_base ** (-torch.arange(half) / half)
    angles = torch.arange(n_tokens)[:, None] * freqs
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding of Llama's GGUF files, in which neighbouring
    dimensions form a pair. x: (B, H, T, n_embd_head)."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack(
        (even * cos - odd * sin, odd * cos + even * sin), dim=-1
    ).flatten(-2)


def zeros(*sizes: int) -> nn.Parameter:
    """Returns a parameter filled with zeros; its values are loaded later."""
    return nn.Parameter(torch.zeros(*sizes))


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n_kv = shape.n_head_kv * shape.n_embd_head
        self.q, self.k, self.v = (
            zeros(n, shape.n_embd) for n in (shape.n_embd, n_kv, n_kv)
        )
        self.out = zeros(shape.n_embd, shape.n_embd)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the attention's output (B, T, n_embd) for x (B, T, n_embd)."""

        def heads(weight: Tensor) -> Tensor:
            return (
                functional.linear(x, weight)
                .unflatten(-1, (-1, self.shape.n_embd_head))
                .transpose(1, 2)
            )

        q, k = rotate(heads(self.q), *angles), rotate(heads(self.k), *angles)
        mixed: Tensor = functional.scaled_dot_product_attention(
            q, k, heads(self.v), is_causal=True, enable_gqa=True
        )
        return functional.linear(mixed.transpose(1, 2).flatten(-2), self.out)


class FeedForward(nn.Module):
    """A SwiGLU feed-forward network. gate, up: (n_ff, n_embd); down: (n_embd, n_ff)."""

    def __init__(self, n_embd: int, n_ff: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            zeros(n_ff, n_embd),
            zeros(n_ff, n_embd),
            zeros(n_embd, n_ff),
        )

    def neurons(self, x: Tensor) -> Tensor:
        """Returns the activation of each neuron for the input x. These activations are
        the input of the down matrix."""
        return functional.silu(functional.linear(x, self.gate)) * functional.linear(
            x, self.up
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the network's output (..., n_embd) for x (..., n_embd)."""
        return functional.linear(self.neurons(x), self.down)


class Mixture(nn.Module):
    """A FeedForward whose neurons are in a fixed order: first the shared expert's
    neurons, then the neurons of expert 0, 1 and so on.

    A chosen expert's weight is its probability times n_expert.
    """

    def __init__(
        self, ffn: FeedForward, router: Tensor, n_ff_exp: int, n_expert_used: int
    ) -> None:
        super().__init__()
        self.ffn, self.router = ffn, nn.Parameter(router)
        self.n_ff_exp, self.n_expert_used = n_ff_exp, n_expert_used
        self.n_ff_shexp = len(ffn.gate) - len(router) * n_ff_exp

    @classmethod
    def empty(
        cls,
        n_embd: int,
        n_shared: int,
        n_expert: int,
        n_ff_exp: int,
        n_expert_used: int,
    ) -> Mixture:
        """Returns a Mixture whose weights are loaded later."""
        ffn = FeedForward(n_embd, n_shared + n_expert * n_ff_exp)
        return cls(ffn, zeros(n_expert, n_embd), n_ff_exp, n_expert_used)

    def weights(self, x: Tensor) -> Tensor:
        """Returns (..., n_expert): the weight of each chosen expert, and 0 for experts
        that are not chosen."""
        probs = functional.linear(x, self.router).float().softmax(dim=-1)
        chosen = probs.topk(self.n_expert_used, dim=-1).indices
        kept: Tensor = torch.zeros_like(probs).scatter(
            -1, chosen, probs.gather(-1, chosen)
        )
        return kept * len(self.router)

    def weighted_neurons(self, x: Tensor) -> Tensor:
        """Returns each neuron's activation times its expert's weight, which is 1 for
        the shared expert. This is slow, because the neurons of experts that are not
        chosen are computed, too."""
        neurons = self.ffn.neurons(x)
        shared, routed = neurons.split(
            [self.n_ff_shexp, neurons.shape[-1] - self.n_ff_shexp], dim=-1
        )
        weights = self.weights(x).to(x.dtype).repeat_interleave(self.n_ff_exp, dim=-1)
        return torch.cat((shared, routed * weights), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mixture's output (..., n_embd) for x (..., n_embd)."""
        return functional.linear(self.weighted_neurons(x), self.ffn.down)


class Layer(nn.Module):
    """A layer: attention, then the feed-forward network. A norm precedes each of the
    two, and each output is added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = (
            RMSNorm(shape.n_embd, shape.norm_eps) for _ in range(2)
        )
        self.attn = Attention(shape)
        self.ffn: nn.Module = FeedForward(shape.n_embd, shape.n_ff)

    def attended(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the residual stream after attention, before the feed-forward network.
        x: (B, T, n_embd)."""
        return x + self.attn(self.attn_norm(x), angles)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the residual stream after the layer, (B, T, n_embd), for x (B, T,
        n_embd)."""
        x = self.attended(x, angles)
        return x + self.ffn(self.ffn_norm(x))


class Network(nn.Module):
    """The whole network, from token ids to logits. The embedding matrix is also the
    output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = zeros(shape.n_vocab, shape.n_embd)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.output_norm = RMSNorm(shape.n_embd, shape.norm_eps)

    def hidden(self, ids: Tensor) -> Tensor:
        """Returns the output matrix's input (B, T, n_embd) for ids (B, T)."""
        x = functional.embedding(ids, self.token_embd)
        angles = rope(self.shape, ids.shape[1])
        for layer in self.layers:
            x = layer(x, angles)
        normed: Tensor = self.output_norm(x)
        return normed

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits (B, T, n_vocab) for ids (B, T)."""
        return functional.linear(self.hidden(ids), self.token_embd)
