"""Trains ExpertFlow's routing-path predictor (section 3.1.2) from a trace. The network is the torch form of
moegguf/controller/predictors/routing_path.py: the same arrays, the same sums.

A sample is a chunk of a request and the window of tokens before it; the chunks of a request begin somewhere else in
every epoch. Departures from the paper: a batch of 16 is 16 chunks, not 16 requests; Adam's weight decay is decoupled
(AdamW), for otherwise 0.01 wipes out the embeddings of rare tokens; and the network does not begin from nothing but
from what each token id says by itself (`first_guess`), which from 33,000 tokens it would take long to find out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from moegguf.controller.predictors.routing_path import NORM_EPS
from moegguf.controller.weights import Weights
from moegguf.trace.trace import Trace

NAME = "routing-path"
BLOCK_GAIN = 0.1  # blocks begin small beside the first guess
MIN_SHARE = 1e-3  # of tokens using an expert, where its logit is taken
PRIOR_TOKENS = 1.0  # how many tokens of mere popularity a token id's statistics begin with


@dataclass(frozen=True)
class Options:
    """Sizes of the network and training options; lr, weight_decay and batch are the paper's (section 5.2)."""

    n_embd: int = 128
    n_head: int = 4
    n_ff: int = 256
    n_encoder: int = 1
    n_decoder: int = 2
    window: int = 64
    chunk: int = 16
    epochs: int = 8
    batch: int = 16
    lr: float = 1e-3
    weight_decay: float = 0.01
    dropout: float = 0.2
    seed: int = 0


def matrix(*sizes: int, fan_in: int, gain: float = 1.0) -> nn.Parameter:
    """A normal matrix whose output has about `gain` times the spread of its input."""
    return nn.Parameter(torch.randn(*sizes) * gain / math.sqrt(fan_in))


def normed(x: Tensor, gain: Tensor) -> Tensor:
    """T5's norm. x (..., n_embd)."""
    return functional.rms_norm(x, gain.shape, gain, NORM_EPS)


class Attention(nn.Module):
    """Attention of normed x over itself, or over a memory."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        n_embd = options.n_embd
        n_head = options.n_head
        size = n_embd, n_head, n_embd // n_head
        self.norm = nn.Parameter(torch.ones(n_embd))
        self.q, self.k, self.v = (matrix(*size, fan_in=n_embd) for _ in "qkv")
        self.out = matrix(*size[1:], n_embd, fan_in=n_embd, gain=BLOCK_GAIN)

    def forward(self, x: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        """x (B, n, n_embd); memory (B, m, n_embd)."""
        x = normed(x, self.norm)
        source = x if memory is None else memory
        q = torch.einsum("bnd,dhe->bhne", x, self.q)
        k, v = (torch.einsum("bmd,dhe->bhme", source, weight) for weight in (self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.einsum("bhne,hed->bnd", mixed, self.out)


class Feed(nn.Module):
    """Two matrices with a ReLU between them."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(options.n_embd))
        self.up = matrix(options.n_embd, options.n_ff, fan_in=options.n_embd, gain=math.sqrt(2))
        self.down = matrix(options.n_ff, options.n_embd, fan_in=options.n_ff, gain=BLOCK_GAIN)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(normed(x, self.norm) @ self.up) @ self.down


class Heads(nn.Module):
    """One linear layer per MoE layer: (..., n_embd) to logits (..., n_moe_layer, n_expert)."""

    def __init__(self, weight: Tensor, popularity: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.logit(popularity, eps=MIN_SHARE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...d,dle->...le", x, self.weight) + self.bias


def block(options: Options, *attentions: str) -> nn.ModuleDict:
    """Attentions of these names and what follows them."""
    return nn.ModuleDict({**{name: Attention(options) for name in attentions}, "feed": Feed(options)})


class PathModel(nn.Module):
    """The network; parameters have the names and shapes of the arrays that `routing_path` reads."""

    def __init__(self, embedding: Tensor, heads: Tensor, popularity: Tensor, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding)
        self.window = nn.Parameter(0.2 * torch.randn(options.window, options.n_embd))
        self.chunk = nn.Parameter(0.2 * torch.randn(options.chunk, options.n_embd))
        self.encoder = nn.ModuleList([block(options, "self") for _ in range(options.n_encoder)])
        self.decoder = nn.ModuleList([block(options, "self", "cross") for _ in range(options.n_decoder)])
        self.memory_norm, self.output_norm = (nn.Parameter(torch.ones(options.n_embd)) for _ in range(2))
        self.heads = Heads(heads, popularity)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, windows: Tensor, chunks: Tensor) -> Tensor:
        """Logits (B, chunk, n_moe_layer, n_expert) of windows (B, window) and chunks (B, chunk)."""
        drop = self.dropout
        x = drop(self.embedding[windows] + self.window)
        for layer in self.encoder:
            x = x + drop(layer["self"](x))
            x = x + drop(layer["feed"](x))
        memory = drop(normed(x, self.memory_norm))
        x = drop(self.embedding[chunks] + self.chunk)
        for layer in self.decoder:
            x = x + drop(layer["self"](x, causal=True))
            x = x + drop(layer["cross"](x, memory))
            x = x + drop(layer["feed"](x))
        return self.heads(drop(normed(x, self.output_norm)))

    def arrays(self) -> dict[str, npt.NDArray[np.float16]]:
        """What the file holds."""
        return {name: p.detach().numpy().astype(np.float16) for name, p in self.named_parameters()}


class Samples:
    """The requests of a trace end to end, with the beginning's token before and behind each of them.

    tokens (n,); paths (n, n_moe_layer, n_expert) bool; known (n, n_moe_layer): where a layer was computed. Requests
    with unknown tokens are left out; ValueError when none remains.
    """

    def __init__(self, trace: Trace, window: int, chunk: int) -> None:
        self.window = window
        self.chunk = chunk
        places = [np.flatnonzero(trace.sequence_of == sequence) for sequence in trace.sequences()]
        places = [
            place
            for place in places
            if ((trace.tokens[place] >= 0) & (trace.tokens[place] < trace.shape.n_vocab)).all()
        ]
        if not places:
            raise ValueError("the trace must have requests whose tokens are all known, but has none; record it again")
        lengths = np.array([len(place) for place in places])
        self.ends = np.cumsum(lengths + window + chunk) - chunk
        self.starts = self.ends - lengths
        here = np.concatenate([np.arange(start, end) for start, end in zip(self.starts, self.ends, strict=True)])
        there = np.concatenate(places)
        n = self.ends[-1] + chunk
        n_layer = len(trace.shape.layers)
        n_expert = trace.shape.n_expert
        tokens = np.full(n, trace.shape.n_vocab, np.int64)
        tokens[here] = trace.tokens[there]
        ids = trace.expert_ids[:, there].transpose(1, 0, 2).astype(np.int64)
        paths = np.zeros((n, n_layer, n_expert + 1), np.bool_)
        paths[here[:, None, None], np.arange(n_layer)[:, None], np.where(ids < 0, n_expert, ids)] = True
        known = np.zeros((n, n_layer), np.bool_)
        known[here] = ids[:, :, 0] >= 0
        self.tokens, self.known = torch.from_numpy(tokens), torch.from_numpy(known)
        self.paths = torch.from_numpy(np.ascontiguousarray(paths[:, :, :n_expert]))

    def popularity(self) -> Tensor:
        """(n_moe_layer, n_expert): share of the tokens that used an expert."""
        return self.paths.sum(0) / self.known.sum(0).clamp(min=1)[:, None]

    def first_guess(self, n_embd: int) -> tuple[Tensor, Tensor]:
        """embedding (n_vocab + 1, n_embd) and heads (n_embd, n_moe_layer, n_expert) whose product says, as well as
        n_embd numbers can, how a token id's log-odds of using an expert differ from those of all tokens."""
        seen, index = self.tokens.unique(return_inverse=True)  # the last one is the beginning's token
        size = len(seen), *self.paths.shape[1:]
        uses = torch.zeros(size).index_add_(0, index, self.paths.float())
        times = torch.zeros(size[:2]).index_add_(0, index, self.known.float())[:, :, None]
        popularity = self.popularity()
        share = (uses + PRIOR_TOKENS * popularity) / (times + PRIOR_TOKENS)
        excess = (torch.logit(share, eps=MIN_SHARE) - torch.logit(popularity, eps=MIN_SHARE)).flatten(1)
        u, s, v = torch.svd_lowrank(excess, q=min(n_embd, *excess.shape), niter=4)
        spread = (u[:-1] * s).pow(2).mean().sqrt()
        embedding = torch.zeros(int(seen[-1]) + 1, n_embd)
        embedding[seen, : len(s)] = u * s / spread
        heads = torch.zeros(n_embd, *size[1:])
        heads[: len(s)] = (v * spread).T.reshape(-1, *size[1:])
        return embedding, heads

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[tuple[Tensor, ...]]:
        """windows, chunks, paths and known of `size` chunks at a time, each request cut at places of its own."""
        cuts = [
            np.arange(start - int(rng.integers(self.chunk)), end, self.chunk).clip(min=start)
            for start, end in zip(self.starts, self.ends, strict=True)
        ]
        firsts = torch.from_numpy(rng.permutation(np.concatenate(cuts)))[:, None]
        for batch in firsts.split(size):
            here = batch + torch.arange(self.chunk)
            before = batch - self.window + torch.arange(self.window)
            yield self.tokens[before], self.tokens[here], self.paths[here], self.known[here]

    def n_batches(self, size: int) -> int:
        """At most, per epoch."""
        return sum(-(-int(n) // self.chunk) + 1 for n in self.ends - self.starts) // size + 1


def loss_of(logits: Tensor, paths: Tensor, known: Tensor) -> Tensor:
    """Binary cross-entropy over the layers that were computed (formula 3), the mean over experts."""
    return functional.binary_cross_entropy_with_logits(logits[known], paths[known].float())


def train(trace: Trace, options: Options | None = None) -> Weights:
    """Arrays of a trained predictor, by name. Deterministic by seed and number of threads."""
    options = options or Options()
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    samples = Samples(trace, options.window, options.chunk)
    model = PathModel(*samples.first_guess(options.n_embd), samples.popularity(), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * samples.n_batches(options.batch))
    model.train()
    for _ in range(options.epochs):
        for windows, chunks, paths, known in samples.batches(options.batch, rng):
            optimizer.zero_grad()
            loss_of(model(windows, chunks), paths, known).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return Weights(dict(model.eval().arrays()))
