"""Trains ExpertFlow's routing-path predictor (section 3.1.2) from a trace. The network
is the differentiable form of moegguf/controller/predictors/routing_path.py: from the
same arrays, both compute the same results except for rounding.

A sample is a chunk of a request and the window of tokens before the chunk. Each epoch
cuts the requests into chunks at a new random offset.

Training departs from the paper in three ways. A batch of 16 is 16 chunks, not 16
requests. Adam's weight decay is decoupled (AdamW), because coupled decay of 0.01 wipes
out the embeddings of rare tokens. Before the first step the network already predicts
the experts that each token id uses on average (`Samples.first_guess`), because 33,000
tokens are too few to learn this quickly.

Only padding and token ids in the samples get an embedding in training. The embedding of
every other token id is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.routing_path import NORM_EPS
from moegguf.controller.weights import Weights
from moegguf.errors import OptionError
from moegguf.learning.counts import multi_hot
from moegguf.learning.feed_forward import dropped
from moegguf.learning.fitting import (
    Batch,
    Report,
    Schedule,
    Trainee,
    binary_cross_entropy,
    fit,
    n_right,
    no_report,
)
from moegguf.learning.gradients import (
    Floats,
    Integers,
    Node,
    add,
    matmul,
    product,
    relu,
    reshape,
    rms_norm,
    rows_of,
    softmax,
    times,
    transpose,
)
from moegguf.learning.splitting import held_out
from moegguf.trace.trace import Trace

# Scale of the last matrix of a block at the start, so that the block changes the first
# guess only a little
BLOCK_GAIN = 0.1
POSITION_GAIN = 0.2
# Shares are limited to the range from MIN_SHARE to 1 - MIN_SHARE before a logit is
# computed.
MIN_SHARE = 1e-3
# Popularity counts as much as this many tokens in a token id's statistics.
PRIOR_TOKENS = 1.0
N_POWER = 4  # power iterations for the largest singular values
# Attention score of positions that a token must not attend to.
MASKED = np.float32(-1e9)
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Options(Schedule):
    """Sizes of the network and options of its training. The defaults of lr,
    weight_decay and batch are the paper's (section 5.2)."""

    epochs: int = 8
    batch: int = 16
    n_embd: int = 128
    n_head: int = 4
    n_ff: int = 256
    n_encoder: int = 1
    n_decoder: int = 2
    window: int = 64
    chunk: int = 16
    dropout: float = 0.2


class PathModel:
    """The network. Its parameters have the names of the arrays that the predictor
    reads. They also have the same shapes, except for the embedding, which has rows only
    for padding and the token ids in the samples."""

    def __init__(
        self,
        embedding: Floats,
        heads: Floats,
        popularity: Floats,
        options: Options,
        rng: np.random.Generator,
    ) -> None:
        self.options = options
        self._rng = rng
        n_embd = options.n_embd
        values = {
            "embedding": embedding,
            "window": POSITION_GAIN * rng.standard_normal((options.window, n_embd)),
            "chunk": POSITION_GAIN * rng.standard_normal((options.chunk, n_embd)),
            "memory_norm": np.ones(n_embd),
            "output_norm": np.ones(n_embd),
            "heads.weight": heads,
            "heads.bias": logit(popularity),
        }
        for i in range(options.n_encoder):
            values |= self._attention(f"encoder.{i}.self") | self._feed(
                f"encoder.{i}.feed"
            )
        for i in range(options.n_decoder):
            values |= self._attention(f"decoder.{i}.self") | self._attention(
                f"decoder.{i}.cross"
            )
            values |= self._feed(f"decoder.{i}.feed")
        self.parameters = {
            name: Node(value.astype(np.float32), learns=True)
            for name, value in values.items()
        }

    def _matrix(self, *sizes: int, fan_in: int, gain: float = 1.0) -> Floats:
        """Returns a random normal matrix. The standard deviation of its output is about
        `gain` times the standard deviation of an input of length `fan_in`."""
        return self._rng.standard_normal(sizes) * (gain / np.sqrt(fan_in))

    def _attention(self, name: str) -> dict[str, Floats]:
        n_embd = self.options.n_embd
        n_head = self.options.n_head
        size = n_embd, n_head, n_embd // n_head
        found = {f"{name}.{part}": self._matrix(*size, fan_in=n_embd) for part in "qkv"}
        out = self._matrix(*size[1:], n_embd, fan_in=n_embd, gain=BLOCK_GAIN)
        return found | {f"{name}.norm": np.ones(n_embd), f"{name}.out": out}

    def _feed(self, name: str) -> dict[str, Floats]:
        n_embd = self.options.n_embd
        n_ff = self.options.n_ff
        return {
            f"{name}.norm": np.ones(n_embd),
            f"{name}.up": self._matrix(n_embd, n_ff, fan_in=n_embd, gain=2**0.5),
            f"{name}.down": self._matrix(n_ff, n_embd, fan_in=n_ff, gain=BLOCK_GAIN),
        }

    def logits(self, windows: Integers, chunks: Integers, training: bool) -> Node:
        """Returns logits (n, chunk, n_moe_layer, n_expert) for n samples: `windows` (n,
        window) and `chunks` (n, chunk) of tokens."""

        def drop(x: Node) -> Node:
            if not training:
                return x
            return times(
                x, Node(dropped(x.value.shape, self.options.dropout, self._rng))
            )

        embedding = self.parameters["embedding"]
        x = drop(add(rows_of(embedding, windows), self.parameters["window"]))
        for i in range(self.options.n_encoder):
            x = add(x, drop(self._attend(f"encoder.{i}.self", x)))
            x = add(x, drop(self._feed_forward(f"encoder.{i}.feed", x)))
        memory = drop(self._norm("memory_norm", x))
        x = drop(add(rows_of(embedding, chunks), self.parameters["chunk"]))
        for i in range(self.options.n_decoder):
            x = add(x, drop(self._attend(f"decoder.{i}.self", x, causal=True)))
            x = add(x, drop(self._attend(f"decoder.{i}.cross", x, memory)))
            x = add(x, drop(self._feed_forward(f"decoder.{i}.feed", x)))
        weight = self.parameters["heads.weight"]
        n_embd, *size = weight.value.shape
        found = product(drop(self._norm("output_norm", x)), reshape(weight, n_embd, -1))
        return add(reshape(found, *chunks.shape, *size), self.parameters["heads.bias"])

    def _norm(self, name: str, x: Node) -> Node:
        return times(rms_norm(x, NORM_EPS), self.parameters[name])

    def _attend(
        self, name: str, x: Node, memory: Node | None = None, causal: bool = False
    ) -> Node:
        """Normalizes x (n, n_token, n_embd). Returns its attention over itself, or over
        `memory` (n, n_window, n_embd)."""
        x = self._norm(f"{name}.norm", x)
        source = x if memory is None else memory
        q = self._heads(f"{name}.q", x)
        k = self._heads(f"{name}.k", source)
        v = self._heads(f"{name}.v", source)
        scale = Node(np.array(q.value.shape[-1] ** -0.5, np.float32))
        scores = matmul(times(q, scale), transpose(k, 0, 1, 3, 2))
        if causal:
            n_token = x.value.shape[1]
            scores = add(scores, Node(np.triu(np.full((n_token, n_token), MASKED), 1)))
        mixed = transpose(matmul(softmax(scores), v), 0, 2, 1, 3)
        out = self.parameters[f"{name}.out"]
        return product(
            reshape(mixed, *x.value.shape), reshape(out, -1, out.value.shape[-1])
        )

    def _heads(self, name: str, x: Node) -> Node:
        """Returns x times a matrix, split by head: (n, n_head, n_token,
        n_embd_head)."""
        weight = self.parameters[name]
        n_embd, n_head, n_embd_head = weight.value.shape
        found = product(x, reshape(weight, n_embd, -1))
        return transpose(
            reshape(found, *x.value.shape[:2], n_head, n_embd_head), 0, 2, 1, 3
        )

    def _feed_forward(self, name: str, x: Node) -> Node:
        hidden = relu(
            product(self._norm(f"{name}.norm", x), self.parameters[f"{name}.up"])
        )
        return product(hidden, self.parameters[f"{name}.down"])


def logit(share: Floats) -> Floats:
    """Returns the logit of `share`, after limiting `share` to the range from MIN_SHARE
    to 1 - MIN_SHARE."""
    share = np.clip(share, MIN_SHARE, 1 - MIN_SHARE)
    return np.log(share / (1 - share))


class Samples:
    """The tokens of all requests of a trace in one array. Padding (token id n_vocab)
    comes before and after each request. Requests with unknown tokens are left out.
    Raises OptionError if no request remains.

    seen (n_seen,): the distinct token ids that occur, ascending, including n_vocab for
    padding.

    tokens (n,): the tokens as indices into `seen`.

    paths (n, n_moe_layer, n_expert): True for the experts that a token used.

    known (n, n_moe_layer): True if the layer was computed for the token.
    """

    def __init__(self, trace: Trace, window: int, chunk: int) -> None:
        self.window = window
        self.chunk = chunk
        self.sequences = [
            sequence
            for sequence in trace.sequences()
            if (trace.tokens[trace.sequence_of == sequence] >= 0).all()
        ]  # fmt: skip
        if not self.sequences:
            raise OptionError(
                "the trace must have requests whose tokens are all known, but has none; record it again."
            )
        places = [
            np.flatnonzero(trace.sequence_of == sequence) for sequence in self.sequences
        ]
        lengths = np.array([len(place) for place in places])
        self.ends = np.cumsum(lengths + window + chunk) - chunk
        self.starts = self.ends - lengths
        here = np.concatenate(
            [
                np.arange(start, end)
                for start, end in zip(self.starts, self.ends, strict=True)
            ]
        )
        there = np.concatenate(places)
        n = self.ends[-1] + chunk
        shape = trace.shape
        tokens = np.full(n, shape.n_vocab, np.int64)
        tokens[here] = trace.tokens[there]
        self.seen, self.tokens = np.unique(tokens, return_inverse=True)
        ids = trace.expert_ids[:, there].transpose(1, 0, 2)
        self.paths = np.zeros((n, len(shape.layers), shape.n_expert), np.bool_)
        self.paths[here] = multi_hot(ids, shape.n_expert)
        self.known = np.zeros((n, len(shape.layers)), np.bool_)
        self.known[here] = ids[:, :, 0] >= 0

    def tokens_of(self, sequences: list[int]) -> Integers:
        """Returns the positions of these requests' tokens in `tokens`."""
        parts = [
            np.arange(start, end)
            for sequence, start, end in zip(
                self.sequences, self.starts, self.ends, strict=True
            )
            if sequence in sequences
        ]
        return np.concatenate(parts)

    def popularity(self, places: Integers) -> Floats:
        """Returns (n_moe_layer, n_expert): the share of the tokens at `places` that
        used each expert. In each layer, only tokens for which the layer was computed
        are used."""
        return (
            self.paths[places].sum(axis=0)
            / np.maximum(self.known[places].sum(axis=0), 1)[:, np.newaxis]
        )

    def first_guess(
        self, places: Integers, n_embd: int, rng: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """Returns an embedding (n_seen, n_embd) and heads (n_embd, n_moe_layer,
        n_expert), from which the training starts.

        Their product approximates a figure for each token id, layer and expert: the
        log-odds that the token id uses the expert, minus the log-odds of an average
        token. Only tokens at the positions `places` are used.
        """
        size = self.paths.shape[1:]
        uses = np.zeros((len(self.seen), *size), np.float32)
        count = np.zeros((len(self.seen), size[0], 1), np.float32)
        for place in places:
            uses[self.tokens[place]] += self.paths[place]
            count[self.tokens[place], :, 0] += self.known[place]
        popularity = self.popularity(places).astype(np.float32)
        share = (uses + PRIOR_TOKENS * popularity) / (count + PRIOR_TOKENS)
        excess = (logit(share) - logit(popularity)).reshape(len(self.seen), -1)
        u, s, vt = largest_singular(excess, min(n_embd, *excess.shape), rng)
        spread = max(float(np.sqrt(np.mean((u * s) ** 2))), MIN_SHARE)
        embedding = np.zeros((len(self.seen), n_embd), np.float32)
        embedding[:, : len(s)] = u * s / spread
        heads = np.zeros((n_embd, *size), np.float32)
        heads[: len(s)] = (vt * spread).reshape(-1, *size)
        return embedding, heads

    def firsts(self, sequences: list[int], rng: np.random.Generator) -> Integers:
        """Returns the positions at which the chunks of these requests begin. Each
        request is cut into chunks at a random offset."""
        cuts = [
            np.maximum(
                np.arange(start - int(rng.integers(self.chunk)), end, self.chunk), start
            )
            for sequence, start, end in zip(
                self.sequences, self.starts, self.ends, strict=True
            )
            if sequence in sequences
        ]
        return np.concatenate([np.zeros(0, np.int64), *cuts])


class PathTrainee(Trainee):
    """The network with the chunks of a trace. The requests in `validation` are used
    only to measure the accuracy after each epoch, not for training."""

    def __init__(
        self,
        samples: Samples,
        validation: list[int],
        options: Options,
        rng: np.random.Generator,
    ) -> None:
        self._training = [
            sequence for sequence in samples.sequences if sequence not in validation
        ]
        places = samples.tokens_of(self._training)
        guess = samples.first_guess(places, options.n_embd, rng)
        self.model = PathModel(*guess, samples.popularity(places), options, rng)
        self.parameters = self.model.parameters
        self._samples = samples
        self._batch = options.batch
        self._validation = samples.firsts(
            validation, np.random.default_rng(options.seed)
        )

    @property
    def n_batches(self) -> int:
        """An upper bound on the number of batches in an epoch."""
        samples = self._samples
        lengths = (samples.ends - samples.starts)[
            np.isin(samples.sequences, self._training)
        ]
        return int((-(-lengths // samples.chunk) + 1).sum()) // self._batch + 1

    def batches(self, rng: np.random.Generator) -> Iterator[Batch]:
        """Yields batches of chunks in random order."""
        for logits, paths, known in self._computed(
            rng.permutation(self._samples.firsts(self._training, rng)), True
        ):
            yield binary_cross_entropy(logits, paths, known)

    def _computed(
        self, firsts: Integers, training: bool
    ) -> Iterator[tuple[Node, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
        """Yields (logits, experts used, known) for each batch of chunks. `known` is
        True where a layer was computed for a token."""
        samples = self._samples
        for start in range(0, len(firsts), self._batch):
            first = firsts[start : start + self._batch, np.newaxis]
            here = first + np.arange(samples.chunk)
            before = first - samples.window + np.arange(samples.window)
            logits = self.model.logits(
                samples.tokens[before], samples.tokens[here], training
            )
            yield logits, samples.paths[here], samples.known[here]

    def validate(self) -> float:
        """Returns the accuracy on the validation requests; 0 if there are none."""
        right = total = 0
        for logits, paths, known in self._computed(self._validation, False):
            n, of = n_right(logits.value[known], paths[known])
            right += n
            total += of
        return right / max(1, total)


def train(
    trace: Trace, options: Options | None = None, report: Report = no_report
) -> Weights:
    """Trains the network. Returns the network's arrays, and facts about the training.
    The arrays depend only on the trace, the options and the number of threads."""
    options = options or Options()
    samples = Samples(trace, options.window, options.chunk)
    validation = held_out(
        trace.select(samples.sequences), VALIDATION_SHARE, options.seed
    )
    trainee = PathTrainee(
        samples, validation, options, np.random.default_rng(options.seed)
    )
    fitted = fit(trainee, options, report)
    arrays = {
        name: node.value.astype(np.float16) for name, node in trainee.parameters.items()
    }
    embedding = np.zeros((trace.shape.n_vocab + 1, options.n_embd), np.float16)
    embedding[samples.seen] = arrays["embedding"]
    facts = asdict(options) | {
        "validation": round(fitted.best, 4),
        "epochs_run": fitted.epochs,
    }
    return Weights(arrays | {"embedding": embedding}, facts)


def largest_singular(
    matrix: Floats, n: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """Returns u, s and v^T of the singular value decomposition, approximately, for the
    n largest singular values. Uses power iteration."""
    found = matrix @ rng.standard_normal((matrix.shape[1], n)).astype(matrix.dtype)
    for _ in range(N_POWER):
        basis, _ = np.linalg.qr(found)
        found = matrix @ (matrix.T @ basis)
    basis, _ = np.linalg.qr(found)
    u, s, vt = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ u, s, vt
