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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.random import Generator, default_rng

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
    accuracy,
    binary_cross_entropy,
    fit,
    no_report,
)
from moegguf.learning.gradients import (
    Floats,
    Integers,
    Node,
    einsum,
    relu,
    rms_norm,
    rows_of,
    softmax,
)
from moegguf.learning.splitting import VALIDATION_SHARE, held_out
from moegguf.native.events import Bools
from moegguf.trace.trace import Trace

POSITION_GAIN = 0.2
# The last matrix of a block is small at the start, so that the block changes the first
# guess only a little.
GAINS = {"up": 2**0.5, "out": 0.1, "down": 0.1}
POSITIONS = ("window", "chunk")
# Shares are limited to the range from MIN_SHARE to 1 - MIN_SHARE before a logit is
# computed.
MIN_SHARE = 1e-3
# Popularity counts as much as this many tokens in a token id's statistics.
PRIOR_TOKENS = 1.0
N_POWER = 4  # power iterations for the largest singular values
# Attention score of positions that a token must not attend to.
MASKED = np.float32(-1e9)


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


def array_sizes(
    options: Options, n_tokens: int, n_moe_layer: int, n_expert: int
) -> dict[str, tuple[int, ...]]:
    """Returns the size of each of the network's arrays. The embedding has a row for
    each of `n_tokens` token ids."""
    n_embd = options.n_embd
    n_head = options.n_head
    n_ff = options.n_ff
    n_embd_head = n_embd // n_head
    matrix = n_embd, n_head, n_embd_head
    up = n_embd, n_ff
    down = n_ff, n_embd
    norm = (n_embd,)
    attention = {
        "norm": norm,
        "q": matrix,
        "k": matrix,
        "v": matrix,
        "out": (n_head, n_embd_head, n_embd),
    }
    feed = {"norm": norm, "up": up, "down": down}
    encoder = {"self": attention, "feed": feed}
    decoder = {"self": attention, "cross": attention, "feed": feed}
    blocks = {}
    for i in range(options.n_encoder):
        blocks[f"encoder.{i}"] = encoder
    for i in range(options.n_decoder):
        blocks[f"decoder.{i}"] = decoder
    return {
        "embedding": (n_tokens, n_embd),
        "window": (options.window, n_embd),
        "chunk": (options.chunk, n_embd),
        "memory_norm": norm,
        "output_norm": norm,
        "heads.weight": (n_embd, n_moe_layer, n_expert),
        "heads.bias": (n_moe_layer, n_expert),
        **{
            f"{block}.{part}.{name}": size
            for block, parts in blocks.items()
            for part, arrays in parts.items()
            for name, size in arrays.items()
        },
    }


def first_array(
    name: str, size: tuple[int, ...], options: Options, rng: Generator
) -> Floats:
    """Returns an array from which the training starts. The gain of a norm is 1. Other
    arrays are random and normal. A matrix's output has about GAINS times the standard
    deviation of its input."""
    if name.endswith("norm"):
        return np.ones(size)
    kind = name.rpartition(".")[2]
    if kind in POSITIONS:
        spread = POSITION_GAIN
    else:
        n_in = options.n_embd
        if kind == "down":
            n_in = options.n_ff
        spread = GAINS.get(kind, 1.0) / np.sqrt(n_in)
    return spread * rng.standard_normal(size)


class PathModel:
    """The network, with `arrays` as its parameters. They have the names and shapes that
    the predictor reads. While training, the embedding has rows only for padding and the
    token ids in the samples."""

    def __init__(
        self, arrays: Mapping[str, Floats], options: Options, rng: Generator
    ) -> None:
        self.parameters = {
            name: Node(array.astype(np.float32), learns=True)
            for name, array in arrays.items()
        }
        self._options = options
        self._rng = rng

    def logits(self, windows: Integers, chunks: Integers, training: bool) -> Node:
        """Returns logits (n, n_token, n_moe_layer, n_expert) for n samples: `windows`
        (n, window), and the first tokens of their `chunks` (n, n_token)."""
        options = self._options
        share = 0.0
        if training:
            share = options.dropout

        def drop(x: Node) -> Node:
            return dropped(x, share, self._rng)

        parameters = self.parameters
        embedding = parameters["embedding"]
        tokens = rows_of(embedding, windows)
        x = drop(tokens + parameters["window"])
        for i in range(options.n_encoder):
            attended = self._attend(f"encoder.{i}.self", x)
            x += drop(attended)
            fed = self._feed_forward(f"encoder.{i}.feed", x)
            x += drop(fed)
        memory = drop(self._norm("memory_norm", x))
        n_token = chunks.shape[1]
        positions = rows_of(parameters["chunk"], np.arange(n_token))
        tokens = rows_of(embedding, chunks)
        x = drop(tokens + positions)
        for i in range(options.n_decoder):
            attended = self._attend(f"decoder.{i}.self", x, causal=True)
            x += drop(attended)
            attended = self._attend(f"decoder.{i}.cross", x, memory)
            x += drop(attended)
            fed = self._feed_forward(f"decoder.{i}.feed", x)
            x += drop(fed)
        x = drop(self._norm("output_norm", x))
        found = einsum("nti,ilo->ntlo", x, parameters["heads.weight"])
        return found + parameters["heads.bias"]

    def _norm(self, name: str, x: Node) -> Node:
        return rms_norm(x, NORM_EPS) * self.parameters[name]

    def _attend(
        self, name: str, x: Node, memory: Node | None = None, causal: bool = False
    ) -> Node:
        """Normalizes x (n, n_token, n_embd). Returns its attention over itself, or over
        `memory` (n, n_window, n_embd)."""
        x = self._norm(f"{name}.norm", x)
        memory = memory or x
        q = self._heads(f"{name}.q", x)
        k = self._heads(f"{name}.k", memory)
        v = self._heads(f"{name}.v", memory)
        n_embd_head = q.value.shape[-1]
        scale = np.array(n_embd_head**-0.5, np.float32)
        scaled = q * Node(scale)
        scores = einsum("nhtd,nhsd->nhts", scaled, k)
        if causal:
            n_token = x.value.shape[1]
            masked = np.full((n_token, n_token), MASKED)
            later = np.triu(masked, 1)
            scores += Node(later)
        shares = softmax(scores)
        mixed = einsum("nhts,nhsd->nhtd", shares, v)
        out = self.parameters[f"{name}.out"]
        return einsum("nhtd,hdi->nti", mixed, out)

    def _heads(self, name: str, x: Node) -> Node:
        """Returns x times a matrix, split by head: (n, n_head, n_token,
        n_embd_head)."""
        return einsum("nti,ihd->nhtd", x, self.parameters[name])

    def _feed_forward(self, name: str, x: Node) -> Node:
        x = self._norm(f"{name}.norm", x)
        up = self.parameters[f"{name}.up"]
        down = self.parameters[f"{name}.down"]
        hidden = relu(einsum("nti,if->ntf", x, up))
        return einsum("ntf,fi->nti", hidden, down)


def logit(share: Floats) -> Floats:
    """Returns the logit of `share`, after limiting `share` to the range from MIN_SHARE
    to 1 - MIN_SHARE."""
    share = np.clip(share, MIN_SHARE, 1 - MIN_SHARE)
    return np.log(share / (1 - share))


class Samples:
    """The tokens of all requests of a trace in one array. Padding (token id n_vocab)
    comes before and after each request. Requests with unknown tokens are left out.
    Raises OptionError if no request remains.

    spans: {request: (position of its first token in `tokens`, position after its last
    token)}

    seen (n_seen,): the distinct token ids that occur, ascending, including n_vocab for
    padding.

    tokens (n,): the tokens as indices into `seen`.

    paths (n, n_moe_layer, n_expert): True for the experts that a token used.

    known (n, n_moe_layer): True if the layer was computed for the token.
    """

    def __init__(self, trace: Trace, window: int, chunk: int) -> None:
        self.window = window
        self.chunk = chunk
        sequence_of = trace.sequence_of
        unknown = sequence_of[trace.tokens < 0].tolist()
        spans: dict[int, tuple[int, int]] = {}
        places = []
        end = -chunk
        for sequence in trace.sequences():
            if sequence in unknown:
                continue
            place = np.flatnonzero(sequence_of == sequence)
            places.append(place)
            start = end + chunk + window
            end = start + len(place)
            spans[sequence] = start, end
        if not spans:
            raise OptionError(
                "the trace must have requests whose tokens are all known, but has none; record it with `moegguf trace"
                " record`, or import files that hold token ids."
            )
        self.spans = spans
        here = self.tokens_of(spans)
        there = np.concatenate(places)
        n = end + chunk
        shape = trace.shape
        tokens = np.full(n, shape.n_vocab, np.int64)
        tokens[here] = trace.tokens[there]
        self.seen, self.tokens = np.unique(tokens, return_inverse=True)
        ids = trace.expert_ids[:, there]
        ids = ids.transpose(1, 0, 2)
        size = n, shape.n_moe_layer, shape.n_expert
        self.paths = np.zeros(size, np.bool_)
        self.paths[here] = multi_hot(ids, shape.n_expert)
        self.known = np.zeros(size[:2], np.bool_)
        self.known[here] = ids[:, :, 0] >= 0

    def tokens_of(self, sequences: Iterable[int]) -> Integers:
        """Returns the positions of these requests' tokens in `tokens`."""
        positions = [np.arange(*self.spans[sequence]) for sequence in sequences]
        return np.concatenate(positions)

    def popularity(self, places: Integers) -> Floats:
        """Returns (n_moe_layer, n_expert): the share of the tokens at `places` that
        used each expert. In each layer, only tokens for which the layer was computed
        are used."""
        n_uses = self.paths[places].sum(axis=0)
        n_known = self.known[places].sum(axis=0)
        n_tokens = np.maximum(n_known, 1)
        return n_uses / n_tokens[:, np.newaxis]

    def first_guess(
        self, places: Integers, n_embd: int, rng: Generator
    ) -> dict[str, Floats]:
        """Returns the embedding and the heads with which the training starts.

        Their product approximates a figure for each token id, layer and expert: the
        log-odds that the token id uses the expert, minus the log-odds of an average
        token. The heads' bias is the log-odds of an average token. Only
        tokens at the positions `places` are used.
        """
        n_seen = len(self.seen)
        size = self.paths.shape[1:]
        uses = np.zeros((n_seen, *size), np.float32)
        count = np.zeros((n_seen, size[0], 1), np.float32)
        for place in places:
            token = self.tokens[place]
            uses[token] += self.paths[place]
            count[token, :, 0] += self.known[place]
        popularity = self.popularity(places)
        popularity = popularity.astype(np.float32)
        share = uses + PRIOR_TOKENS * popularity
        share /= count + PRIOR_TOKENS
        bias = logit(popularity)
        excess = logit(share) - bias
        excess = excess.reshape(n_seen, -1)
        n = min(n_embd, *excess.shape)
        u, s, vt = largest_singular(excess, n, rng)
        rows = u * s
        mean_square = np.mean(rows**2)
        deviation = float(np.sqrt(mean_square))
        spread = max(deviation, MIN_SHARE)
        embedding = np.zeros((n_seen, n_embd), np.float32)
        embedding[:, :n] = rows / spread
        heads = np.zeros((n_embd, *size), np.float32)
        columns = vt * spread
        heads[:n] = columns.reshape(-1, *size)
        return {"embedding": embedding, "heads.weight": heads, "heads.bias": bias}

    def firsts(self, sequences: list[int], rng: Generator) -> Integers:
        """Returns the positions at which the chunks of these requests begin. Each
        request is cut into chunks at a random offset."""
        cuts = [np.zeros(0, np.int64)]
        for sequence in sequences:
            start, end = self.spans[sequence]
            n_skipped = int(rng.integers(self.chunk))
            first = start - n_skipped
            cut = np.arange(first, end, self.chunk)
            cuts.append(np.maximum(cut, start))
        return np.concatenate(cuts)


class PathTrainee(Trainee):
    """The network with the chunks of a trace. The requests in `validation` are used
    only to measure the accuracy after each epoch, not for training."""

    def __init__(
        self, samples: Samples, validation: list[int], options: Options, rng: Generator
    ) -> None:
        training = [
            sequence for sequence in samples.spans if sequence not in validation
        ]
        self._training = training
        places = samples.tokens_of(training)
        guess = samples.first_guess(places, options.n_embd, rng)
        n_moe_layer, n_expert = samples.paths.shape[1:]
        sizes = array_sizes(options, len(samples.seen), n_moe_layer, n_expert)
        arrays = {
            name: first_array(name, size, options, rng)
            for name, size in sizes.items()
            if name not in guess
        }
        model = PathModel(arrays | guess, options, rng)
        self.model = model
        self.nodes = list(model.parameters.values())
        self._samples = samples
        self._batch = options.batch
        own = default_rng(options.seed)
        self._validation = samples.firsts(validation, own)

    @property
    def n_batches(self) -> int:
        """An upper bound on the number of batches in an epoch."""
        samples = self._samples
        n_chunks = 0
        for sequence in self._training:
            start, end = samples.spans[sequence]
            n_chunks += 1 - (start - end) // samples.chunk
        return n_chunks // self._batch + 1

    def batches(self, rng: Generator) -> Iterator[Batch]:
        """Yields batches of chunks in random order."""
        firsts = self._samples.firsts(self._training, rng)
        firsts = rng.permutation(firsts)
        for logits, paths, known in self._computed(firsts, True):
            yield binary_cross_entropy(logits, paths, known)

    def _computed(
        self, firsts: Integers, training: bool
    ) -> Iterator[tuple[Node, Bools, Bools]]:
        """Yields (logits, experts used, known) for each batch of chunks. `known` is
        True where a layer was computed for a token."""
        samples = self._samples
        window = samples.window
        for start in range(0, len(firsts), self._batch):
            first = firsts[start : start + self._batch]
            first = first[:, np.newaxis]
            here = first + np.arange(samples.chunk)
            before = first - window + np.arange(window)
            windows = samples.tokens[before]
            chunks = samples.tokens[here]
            logits = self.model.logits(windows, chunks, training)
            yield logits, samples.paths[here], samples.known[here]

    def validate(self) -> float:
        """Returns the accuracy on the validation requests; 0 if there are none."""
        computed = self._computed(self._validation, False)
        return accuracy(
            (logits.value[known], paths[known]) for logits, paths, known in computed
        )


def train(trace: Trace, options: Options, report: Report = no_report) -> Weights:
    """Trains the network. Returns the network's arrays, and facts about the training.
    The arrays depend only on the trace, the options and the number of threads."""
    samples = Samples(trace, options.window, options.chunk)
    used = trace.select(samples.spans)
    validation = held_out(used, VALIDATION_SHARE, options.seed)
    rng = default_rng(options.seed)
    trainee = PathTrainee(samples, validation, options, rng)
    fitted = fit(trainee, options, report)
    arrays = {
        name: node.value.astype(np.float16)
        for name, node in trainee.model.parameters.items()
    }
    n_rows = trace.shape.n_vocab + 1
    size = n_rows, options.n_embd
    embedding = np.zeros(size, np.float16)
    embedding[samples.seen] = arrays["embedding"]
    arrays["embedding"] = embedding
    return Weights(arrays, asdict(options) | fitted.facts)


def largest_singular(
    matrix: Floats, n: int, rng: Generator
) -> tuple[Floats, Floats, Floats]:
    """Returns u, s and v^T of the singular value decomposition, approximately, for the
    n largest singular values. Uses power iteration."""
    n_columns = matrix.shape[1]
    size = n_columns, n
    drawn = rng.standard_normal(size)
    drawn = drawn.astype(matrix.dtype)
    found = matrix @ drawn
    for _ in range(N_POWER):
        basis, _ = np.linalg.qr(found)
        along_columns = matrix.T @ basis
        found = matrix @ along_columns
    basis, _ = np.linalg.qr(found)
    small = basis.T @ matrix
    u, s, vt = np.linalg.svd(small, full_matrices=False)
    return basis @ u, s, vt
