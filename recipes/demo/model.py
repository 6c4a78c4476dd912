"""The demo's network: qwen2moe with a shared expert. The network computes the same
function as llama.cpp's `src/models/qwen2moe.cpp`.

Matrices have the shape [rows, row length], and experts [n_expert, rows, row length], as
in GGUF files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the network, with the names that GGUF uses. With the default sizes,
    every row length is a multiple of 64."""

    n_vocab: int = 4096
    n_layer: int = 6
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_ctx_train: int = 2048
    n_expert: int = 32
    n_expert_used: int = 4
    n_ff_exp: int = 128
    n_ff_shexp: int = 256
    rope_freq_base: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def n_embd_head(self) -> int:
        """The width of one attention head."""
        return self.n_embd // self.n_head


def matrix(*sizes: int, gain: float = 1.0) -> nn.Parameter:
    """Returns a random normal matrix. If the elements of an input are independent with
    mean 0, the output's standard deviation is about `gain` times the input's."""
    return nn.Parameter(torch.randn(*sizes) * (gain / math.sqrt(sizes[-1])))


class RMSNorm(nn.Module):
    """Root mean square norm with a gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns x (..., size) divided by its root mean square, and multiplied by the
        gain."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding of GPT-NeoX, in which dimension i forms a pair with
    dimension i + n_embd_head / 2. x: (B, H, T, n_embd_head)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention. Only q, k and v have biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.n_head_kv * shape.n_embd_head
        self.q, self.k, self.v = (
            matrix(n, shape.n_embd) for n in (shape.n_embd, kv, kv)
        )
        self.q_bias, self.k_bias, self.v_bias = (
            nn.Parameter(torch.zeros(n)) for n in (shape.n_embd, kv, kv)
        )
        self.out = matrix(
            shape.n_embd, shape.n_embd, gain=1 / math.sqrt(2 * shape.n_layer)
        )

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Returns the attention's output (B, T, n_embd). x: (B, T, n_embd). mask: (B,
        1, T, T), True where a token attends to another token; None: causal
        attention."""
        n_batch, n_tokens, _ = x.shape

        def heads(weight: Tensor, bias: Tensor) -> Tensor:
            return (
                functional.linear(x, weight, bias)
                .view(n_batch, n_tokens, -1, self.shape.n_embd_head)
                .transpose(1, 2)
            )

        group = self.shape.n_head // self.shape.n_head_kv
        q = rotate(heads(self.q, self.q_bias), *rope)
        k = rotate(heads(self.k, self.k_bias), *rope).repeat_interleave(group, dim=1)
        v = heads(self.v, self.v_bias).repeat_interleave(group, dim=1)
        mixed: Tensor = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        return functional.linear(
            mixed.transpose(1, 2).reshape(n_batch, n_tokens, -1), self.out
        )


class MoE(nn.Module):
    """A mixture of experts. The router's softmax covers all experts. The most probable
    experts are weighted by their probabilities, which are not renormalised. A gated
    shared expert is added."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        down_gain = 1 / math.sqrt(2 * shape.n_layer)
        self.router = matrix(shape.n_expert, shape.n_embd)
        self.gate_exps = matrix(shape.n_expert, shape.n_ff_exp, shape.n_embd)
        self.up_exps = matrix(shape.n_expert, shape.n_ff_exp, shape.n_embd)
        self.down_exps = matrix(
            shape.n_expert, shape.n_embd, shape.n_ff_exp, gain=4 * down_gain
        )
        self.gate_shexp = matrix(shape.n_ff_shexp, shape.n_embd)
        self.up_shexp = matrix(shape.n_ff_shexp, shape.n_embd)
        self.down_shexp = matrix(shape.n_embd, shape.n_ff_shexp, gain=down_gain)
        self.router_shexp = nn.Parameter(torch.zeros(shape.n_embd))
        self.load = torch.zeros(shape.n_expert)
        self.balance_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mixture's output. Sets `load` (each expert's share of the
        choices) and `balance_loss` (1: even loads). x: (n_tokens, n_embd)."""
        probs = functional.linear(x, self.router).softmax(dim=-1)
        weights, ids = probs.topk(self.shape.n_expert_used, dim=-1)
        counts = torch.bincount(ids.flatten(), minlength=self.shape.n_expert)
        self.load = counts / ids.numel()
        self.balance_loss = self.shape.n_expert * (self.load * probs.mean(dim=0)).sum()
        shared = functional.linear(
            functional.silu(functional.linear(x, self.gate_shexp))
            * functional.linear(x, self.up_shexp),
            self.down_shexp,
        )
        return (
            self.experts(x, weights, ids, counts)
            + shared * (x @ self.router_shexp).sigmoid()[:, None]
        )

    def experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, counts: Tensor
    ) -> Tensor:
        """Sorts the tokens' choices by expert, runs each expert once on its tokens, and
        adds up the weighted results of each token."""
        order = ids.flatten().argsort()
        tokens = order // self.shape.n_expert_used
        parts = [
            functional.linear(
                functional.silu(functional.linear(rows, gate))
                * functional.linear(rows, up),
                down,
            )
            for rows, gate, up, down in zip(
                torch.split(x[tokens], counts.tolist()),
                self.gate_exps.unbind(),
                self.up_exps.unbind(),
                self.down_exps.unbind(),
                strict=True,
            )
        ]
        weighted = torch.cat(parts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, tokens, weighted)


class Layer(nn.Module):
    """A layer: attention, then the mixture of experts. A norm precedes each of the two,
    and each output is added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        self.attn = Attention(shape)
        self.ffn_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        self.moe = MoE(shape)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Returns the layer's output (B, T, n_embd) for x (B, T, n_embd)."""
        x = x + self.attn(self.attn_norm(x), rope, mask)
        mixed: Tensor = self.moe(self.ffn_norm(x).flatten(0, 1)).view_as(x)
        return x + mixed


class DemoModel(nn.Module):
    """The whole network, from token ids to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Parameter(torch.randn(shape.n_vocab, shape.n_embd) * 0.5)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.output_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        self.output = matrix(shape.n_vocab, shape.n_embd, gain=0.5)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of the rotary angles, each (B, 1, T, n_embd_head / 2)."""
        half = self.shape.n_embd_head // 2
        freqs = self.shape.rope_freq_base ** (-torch.arange(half) / half)
        angles = positions[:, None, :, None] * freqs
        return angles.cos(), angles.sin()

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (B, T, n_vocab) for ids (B, T).

        positions: (B, T); None: 0, 1, 2 and so on. wanted: (B, T), True for the n
        tokens whose logits (n, n_vocab) are returned; None: the logits of all tokens
        are returned.
        """
        x = functional.embedding(ids, self.token_embd)
        rope = self.rope(
            torch.arange(ids.shape[1])[None] if positions is None else positions
        )
        for layer in self.layers:
            x = layer(x, rope, mask)
        return functional.linear(
            self.output_norm(x if wanted is None else x[wanted]), self.output
        )

    def mixtures(self) -> list[MoE]:
        """Returns the MoE modules of all layers, in order. Each has the `load` and the
        `balance_loss` of its last forward pass."""
        return [module for module in self.modules() if isinstance(module, MoE)]


def quantised_on_export(name: str, weight: Tensor) -> bool:
    """Returns True if the GGUF file stores this weight in Q4_0. All matrices are stored
    in Q4_0 except routers, embedding and output."""
    return (
        weight.dim() >= 2
        and not name.endswith("router")
        and name not in ("token_embd", "output")
    )


def round_q4_0(weight: Tensor) -> Tensor:
    """Rounds each block of 32 values to values that llama.cpp's Q4_0 can represent.
    Gradients pass through unchanged."""
    with torch.no_grad():
        blocks = weight.view(-1, 32)
        peak = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
        scale = peak / -8
        inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
        levels = (blocks * inverse + 8.5).floor_().clamp_(0, 15).sub_(8)
        error = (levels * scale.half().float()).view_as(weight) - weight
    return weight + error


def with_rounded_weights(model: DemoModel) -> Callable[..., Tensor]:
    """Returns a function like the model's forward function, but with weights rounded as
    in the Q4_0 file."""

    def forward(*inputs: Tensor | None) -> Tensor:
        rounded = {
            n: round_q4_0(p)
            for n, p in model.named_parameters()
            if quantised_on_export(n, p)
        }
        logits: Tensor = torch.func.functional_call(model, rounded, inputs)
        return logits

    return forward
