"""The store's predictors again, in numpy: what they are compared with, one layer at a time and in passes of any
sequences."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.controller.history import History
from moegguf.controller.predictors import counts, eamc, expert_mlp, router_inputs, routing_path
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.predictors.routing_path import NORM_EPS
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Announcement, Float32s, Int32s, Phase, RoutingEvent
from moegguf.native.matvec import QuantizedMatrix
from predictors.train.states import states


def single_choice(shape: MoeShape, event: RoutingEvent) -> Int32s | None:
    """The experts (n_expert_used,) of an event of one token; None for several tokens, or ids outside the shape."""
    if event.il not in shape.row_of or event.expert_ids.shape[0] != 1:
        return None
    ids = event.expert_ids[0]
    known = ids.size and ids.min() >= 0 and ids.max() < shape.n_expert
    return ids if known else None


class Affinity(counts.Affinity):
    def __init__(self, shape: MoeShape, affinity: Float32s) -> None:
        super().__init__(shape, affinity)
        self._next: int | None = None
        self._probabilities = np.zeros(shape.n_expert, np.float32)

    def observe(self, event: RoutingEvent) -> None:
        """Computes the prediction for the next layer; an event of several tokens clears it."""
        ids = single_choice(self.shape, event)
        self._next = None if ids is None else self.shape.layer_after(event.il, 1)
        if ids is not None and self._next is not None:
            # A's rows sum to 1, but a token uses n_expert_used experts
            rows = self.affinity[self.shape.row_of[event.il], ids]
            np.multiply(rows.mean(axis=0), self.shape.n_expert_used, out=self._probabilities)
            np.minimum(self._probabilities, 1.0, out=self._probabilities)

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None but at distance 1."""
        return self._probabilities if distance == 1 and il == self._next else None

    def fork(self) -> Affinity:
        """Shares the matrix."""
        return Affinity(self.shape, self.affinity)


class PreviousToken(counts.PreviousToken):
    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape)
        self._used: Float32s = np.zeros(shape.table, np.float32)
        self._seen: npt.NDArray[np.bool_] = np.zeros(shape.n_layer, np.bool_)

    def observe(self, event: RoutingEvent) -> None:
        """Stores the last token's experts; an event without tokens or of an unknown layer changes nothing."""
        if event.il not in self.shape.row_of or len(event.expert_ids) == 0:
            return
        last = event.expert_ids[-1]
        used = self._used[event.il]
        used[:] = 0
        used[last[(last >= 0) & (last < self.shape.n_expert)]] = 1
        self._seen[event.il] = True

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The same at any distance."""
        return self._used[il] if il in self.shape.row_of and self._seen[il] else None

    def fork(self) -> PreviousToken:
        """Shares nothing."""
        return PreviousToken(self.shape)


class TokenTable(counts.TokenTable):
    _token = -1

    def announce(self, announcement: Announcement) -> None:
        """Takes the token of a decode pass."""
        single = announcement.phase == Phase.DECODE and len(announcement.tokens) == 1
        token = int(announcement.tokens[0]) if single else -1
        self._token = token if 0 <= token < len(self._entry_of) else -1

    def observe(self, event: RoutingEvent) -> None:
        """Discards the token in a pass that is not its own."""
        if event.first_token != 0 or event.phase != Phase.DECODE:
            self._token = -1

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The same at any distance; None without a token."""
        row = self.shape.row_of.get(il)
        if row is None or self._token < 0:
            return None
        n_used = self.shape.n_expert_used
        average = self._average(row)
        entry = int(self._entry_of[self._token])
        if entry < 0:
            return np.minimum(average, 1.0)
        counts = self._counts[entry, row].astype(np.float32)
        return np.minimum((counts + average) / (float(counts.sum()) / n_used + 1.0), 1.0)

    def fork(self) -> TokenTable:
        """Shares the counts."""
        other = copy.copy(self)
        other._token = -1
        return other

    def _average(self, rows: int | slice) -> Float32s:
        """(..., n_expert): how often an average token uses an expert, of one layer or several."""
        popularity = self._popularity[rows]
        sums = np.maximum(popularity.sum(axis=-1, keepdims=True), 1.0)
        return np.asarray(popularity * (self.shape.n_expert_used / sums), np.float32)


class EamcPredictor(eamc.EamcPredictor):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._history = History(self.shape)

    def announce(self, announcement: Announcement) -> None:
        """Begins a pass, and ends the requests that `History` says."""
        self._history.expect(announcement)
        self.predict_eam.begin_pass(self._history, announcement.phase)

    def observe(self, event: RoutingEvent) -> None:
        """Adds the event to the iEAM and matches it; ids outside the shape are left out."""
        ids = event.expert_ids
        if event.il not in self.shape.row_of or ids.max(initial=0) >= self.shape.n_expert:
            return
        if ids.min(initial=0) < 0:
            event = event._replace(expert_ids=ids[ids >= 0], sequences=None, phases=None)
        self._history.update(event)
        self.predict_eam.update(self._history)

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The same at any distance; None when nothing that matches has counts."""
        if il not in self.shape.row_of:
            return None
        probabilities = self.predict_eam.row(il)
        if not probabilities.any():
            return None
        probabilities *= self.shape.n_expert_used  # the row sums to 1, but a token uses n_expert_used
        return np.minimum(probabilities, 1, out=probabilities)

    def learned(self, history: History) -> Any:
        """The same; the predictor's own history begins anew, too."""
        self._history = History(self.shape)
        return super().learned(history)


def multiplied(matrix: QuantizedMatrix, x: Float32s) -> Float32s:
    """W x + bias."""
    return (matrix.bytes.astype(np.float32) @ x) * matrix.scale + matrix.bias


class InputPredictor(Predictor):
    """Base of predictors from the router's input: keeps a copy of the last one, if it is one token's and finite.

    Passes of several tokens are left out: a prompt uses most experts anyway, and costs a vector per token.
    """

    def __init__(self, shape: MoeShape, *arguments: Any) -> None:
        super().__init__(shape, *arguments)
        self._input = np.zeros(shape.n_embd, np.float32)
        self._source: int | None = None  # the layer of that input

    def announce(self, announcement: Announcement) -> None:
        """Discards the input of the pass before."""
        self._source = None

    def observe(self, event: RoutingEvent) -> None:
        """Copies the event's input."""
        self._source = None
        inputs = event.inputs
        if inputs is None or inputs.shape != (1, self.shape.n_embd) or event.il not in self.shape.row_of:
            return
        np.copyto(self._input, inputs[0])
        if np.isfinite(np.dot(self._input, self._input)):
            self._source = event.il

    def _input_for(self, il: int, distance: int) -> Float32s | None:
        """The input kept, if its layer is `distance` MoE layers before `il`."""
        if self._source is None or self.shape.layer_after(self._source, distance) != il:
            return None
        return self._input


class Skip(InputPredictor, router_inputs.Skip):
    def predict(self, il: int, distance: int) -> Float32s | None:
        """The probabilities of the router of layer `il`."""
        return self._through_router(il, distance) if distance > 0 else None

    def fork(self) -> Skip:
        """Shares the routers."""
        return type(self)(self.shape, self.routers)

    def _through_router(self, il: int, distance: int) -> Float32s | None:
        vector = self._input_for(il, distance)
        if vector is None or il not in self.routers.routers:
            return None
        return self.routers.probabilities(il, vector)


class MlpPredictor(InputPredictor, router_inputs.MlpPredictor):
    def predict(self, il: int, distance: int) -> Float32s | None:
        """None for a pair without a network."""
        vector = self._input_for(il, distance)
        network = None if self._source is None else self._networks.get((self._source, il))
        if vector is None or network is None:
            return None
        hidden = np.maximum(multiplied(network.hidden, vector), 0)
        return probabilities(multiplied(network.out, hidden), self.shape.n_expert_used)

    def fork(self) -> MlpPredictor:
        """Shares the networks."""
        return MlpPredictor(self.shape, self._networks)


def probabilities(logits: Float32s, n_expert_used: int) -> Float32s:
    """softmax(logits) (n_expert,) times n_expert_used, at most 1: the expected choices of each expert."""
    exponentials = np.exp(logits - logits.max())
    exponentials *= n_expert_used / float(exponentials.sum())
    return np.minimum(exponentials, 1.0, out=exponentials)


class ExpertMlp(expert_mlp.ExpertMlp):
    def __init__(self, shape: MoeShape, *arguments: Any) -> None:
        super().__init__(shape, *arguments)
        self._ids = np.zeros((len(shape.layers), 1, shape.n_expert_used), np.int32)
        self._state = np.zeros((1, expert_mlp.state_size(shape)), np.float32)
        self._pass = -1
        self._rows_seen = 0

    def fork(self) -> ExpertMlp:
        """Shares the network and both statistics."""
        return ExpertMlp(self.shape, self._popularity, self._affinity, self._network)

    def observe(self, event: RoutingEvent) -> None:
        """Appends the layer's choice to the history of the pass."""
        if event.pass_ != self._pass:
            self._pass, self._rows_seen = event.pass_, 0
        ids = single_choice(self.shape, event)
        # After a missed layer, or one that uses fewer experts, there is no prediction until the next pass.
        if ids is None or len(ids) != self.shape.n_expert_used or self.shape.row_of[event.il] != self._rows_seen:
            self._rows_seen = -1
            return
        self._ids[self._rows_seen, 0] = ids
        self._rows_seen += 1

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None but at distance 1."""
        row = self.shape.row_of.get(il)
        if distance != 1 or row is None or row < 1 or row != self._rows_seen:
            return None
        x = states(self._popularity, self._affinity, self._ids, row, self._state)[0]
        for layer in self._network[:-1]:
            x = np.maximum(multiplied(layer, x), 0)
        x = multiplied(self._network[-1], x)
        return 0.5 + 0.5 * np.tanh(0.5 * x)  # sigmoid


Memory = list[tuple[Float32s, Float32s]]  # per decoder block, keys and values of the encoder's states


def normed(x: Float32s) -> Float32s:
    """T5's norm over rows of (n, n_embd); its gain is part of the matrix that follows."""
    return x / np.sqrt(np.einsum("ij,ij->i", x, x)[:, np.newaxis] / x.shape[1] + NORM_EPS)


def attend(q: Float32s, k: Float32s, v: Float32s, mask: Float32s | None = None) -> Float32s:
    """Softmax attention. q (B, n_head, n, n_embd_head), already scaled; k, v the same with m rows; mask (n, m)."""
    scores: Float32s = q @ k.swapaxes(-1, -2)
    if mask is not None:
        scores += mask
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ v


def heads(attention: routing_path.Attention, x: Float32s, n_batch: int) -> Float32s:
    """(n_batch * n, parts * n_head * n_embd_head) as (parts, n_batch, n_head, n, n_embd_head)."""
    split = x.reshape(n_batch, -1, x.shape[1] // attention.out.shape[0], attention.n_head, attention.n_embd_head)
    return split.transpose(2, 0, 3, 1, 4)


def project(attention: routing_path.Attention, mixed: Float32s) -> Float32s:
    """Heads (B, n_head, n, n_embd_head) joined and projected: (B * n, n_embd)."""
    return mixed.transpose(0, 2, 1, 3).reshape(-1, attention.out.shape[0]) @ attention.out


def fed(feed: routing_path.FeedForward, x: Float32s) -> Float32s:
    """Two matrices with a ReLU between them."""
    return np.maximum(normed(x) @ feed.up, 0) @ feed.down


class PathNetwork(routing_path.PathNetwork):
    def encode(self, windows: Int32s) -> Memory:
        """Keys and values of the encoder's states, for windows (B, window): the tokens before each chunk."""
        n_batch = len(windows)
        x = (self.embedding[windows] + self.window_positions).reshape(-1, self.embedding.shape[1])
        for attention, feed in self.encoder:
            q, k, v = heads(attention, normed(x) @ attention.projection, n_batch)
            x = x + project(attention, attend(q, k, v))
            x = x + fed(feed, x)
        states = normed(x)
        return [self._keys_and_values(cross, states, n_batch) for _, cross, _ in self.decoder]

    @staticmethod
    def _keys_and_values(cross: routing_path.Attention, states: Float32s, n_batch: int) -> tuple[Float32s, Float32s]:
        k, v = np.ascontiguousarray(heads(cross, states @ cross.memory, n_batch))
        return k, v

    def empty_cache(self, n_batch: int) -> list[Float32s]:
        """An empty cache of the decoder for one chunk: per block (2, n_batch, n_head, chunk, n_embd_head)."""
        return [
            np.empty((2, n_batch, attention.n_head, self.chunk, attention.n_embd_head), np.float32)
            for attention, _, _ in self.decoder
        ]

    def decode(self, tokens: Int32s, first: int, memory: Memory, cache: list[Float32s]) -> Float32s:
        """Logits (B * n, n_moe_layer * n_expert) of tokens (B, n) at position `first` of their chunks; fills cache."""
        n_batch, n_tokens = tokens.shape
        end = first + n_tokens
        causal = np.triu(np.full((self.chunk, self.chunk), -np.inf, np.float32), k=1)
        mask = causal[first:end, :end] if n_tokens > 1 else None
        x = (self.embedding[tokens] + self.chunk_positions[first:end]).reshape(-1, self.embedding.shape[1])
        for (attention, cross, feed), (keys, values), cached in zip(self.decoder, memory, cache, strict=True):
            q, *new = heads(attention, normed(x) @ attention.projection, n_batch)
            cached[0][:, :, first:end], cached[1][:, :, first:end] = new
            x = x + project(attention, attend(q, cached[0][:, :, :end], cached[1][:, :, :end], mask))
            (q,) = heads(cross, normed(x) @ cross.projection, n_batch)
            x = x + project(cross, attend(q, keys, values))
            x = x + fed(feed, x)
        return normed(x) @ self.heads + self.bias


class RoutingPath(routing_path.RoutingPath):
    def __init__(self, shape: MoeShape, network: PathNetwork) -> None:
        super().__init__(shape, network)
        self.network: PathNetwork = network
        self._cache = network.empty_cache(1)
        self._recent: Int32s = np.empty(network.window, np.int32)
        self._sequence = -1
        self._table: Float32s | None = None
        self._reset()

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> RoutingPath:
        """Raises ValueError as `PathNetwork` does."""
        return cls(shape, PathNetwork(shape, weights))

    def release(self) -> None:
        """It goes on predicting."""

    def fork(self) -> RoutingPath:
        """Shares the network."""
        return RoutingPath(self.shape, self.network)

    def announce(self, announcement: Announcement) -> None:
        """Predicts: one decoder step for one token."""
        tokens = announcement.tokens
        self._table = None
        if announcement.sequence != self._sequence:
            self._sequence = announcement.sequence
            self._reset()
        if len(tokens) == 0:
            return
        if tokens.min() < 0 or tokens.max() >= self.shape.n_vocab:
            self._reset()
            return
        if len(tokens) == 1:
            self._table = self._step(tokens)
        else:
            self._position = self.network.chunk  # the next token begins a chunk; prompts are not predicted
        self._recent = np.concatenate([self._recent, tokens])[-self.network.window :]

    def observe(self, event: RoutingEvent) -> None:
        """A pass not announced discards the prediction."""
        if self._table is None or event.first_token < 0 or event.sequence != self._sequence:
            self._table = None
        elif event.il == self.shape.layers[-1] and self._position == self.network.chunk:
            self._begin_chunk()

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The same at any distance; None for a pass that was not announced."""
        row = self.shape.row_of.get(il)
        return None if self._table is None or row is None else self._table[row]

    def _reset(self) -> None:
        self._recent[:] = self.shape.n_vocab
        self._position = self.network.chunk

    def _begin_chunk(self) -> None:
        self._memory = self.network.encode(self._recent[np.newaxis])
        self._position = 0

    def _step(self, tokens: Int32s) -> Float32s:
        if self._position == self.network.chunk:
            self._begin_chunk()
        logits = self.network.decode(tokens[np.newaxis], self._position, self._memory, self._cache)
        self._position += 1
        return (1 / (1 + np.exp(-logits))).reshape(len(self.shape.layers), self.shape.n_expert)
