"""Plain definitions of the store's predictors, for one sequence. Tests compare the
store with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.base import Predictor, StorePredictor
from moegguf.controller.predictors.eamc import N_MATCHES, EamcPredictor
from moegguf.controller.shape import MoeShape
from moegguf.gguf.routers import Gating, Router, Routers
from moegguf.learning.expert_mlp import states
from moegguf.learning.feed_forward import logits
from moegguf.learning.gradients import shares_of
from moegguf.learning.routing_path import Options, PathModel
from moegguf.native.events import Float32s, Int32s
from predictors.study.controls import probabilities

Arrays = dict[str, npt.NDArray[np.float32]]
Definition = Callable[["Sequence", int, int], Float32s | None]
"""Type of a predictor's definition.

The arguments are a sequence, the row (the index of a layer among the layers with
experts), and the distance in rows from the last routed layer. The result is a
probability for each expert, or None.
"""


class Sequence:
    """The tokens of one sequence and the experts that routers have chosen for it."""

    def __init__(self, define: Definition, chunk: int = 0) -> None:
        self.predict = lambda row, distance: define(self, row, distance)
        self._chunk = chunk
        self.tokens: list[int] = []
        self.n_pass_tokens = 0
        # The index of the first token in the routing path's chunk. None: there is no
        # chunk.
        self.chunk_start: int | None = None
        # The expert ids of the last token in each row (the index of a layer among the
        # layers with experts).
        self.last: dict[int, Int32s] = {}
        # The router's choice in each routed row of this pass; empty unless the pass has
        # one token.
        self.ids: dict[int, Int32s] = {}
        # The last router input and the router's row, if this pass has one token; else
        # None.
        self.input: tuple[int, Float32s] | None = None

    def announce(self, tokens: Int32s) -> None:
        """Begins a pass with these tokens."""
        if len(tokens) > 1:
            self.chunk_start = None
        elif (
            self.chunk_start is None
            or len(self.tokens) - self.chunk_start == self._chunk
        ):
            self.chunk_start = len(self.tokens)
        self.tokens += tokens.tolist()
        self.n_pass_tokens, self.ids, self.input = len(tokens), {}, None

    def observe(self, row: int, ids: Int32s, inputs: Float32s) -> None:
        """Records a routed layer. ids: (n_tokens, n_expert_used); inputs: (n_tokens,
        n_embd)."""
        self.last[row], self.input = ids[-1], None
        if self.n_pass_tokens == 1:
            self.ids[row], self.input = ids[0], (row, inputs[0])


def previous_token(predictor: StorePredictor) -> Definition:
    def predict(seen: Sequence, row: int, distance: int) -> Float32s | None:
        used = np.isin(np.arange(predictor.shape.n_expert), seen.last.get(row, ()))
        return used.astype(np.float32) if row in seen.last else None

    return predict


def token_table(predictor: StorePredictor) -> Definition:
    """Predicts, for each expert, the share of the token's occurrences that used it.

    One occurrence of an average token is added to the counts.
    """
    n_used, counts, entry_of = (
        predictor.shape.n_expert_used,
        predictor.arrays["counts"],
        predictor.arrays["entry_of"],
    )

    def predict(seen: Sequence, row: int, distance: int) -> Float32s | None:
        if seen.n_pass_tokens != 1:
            return None
        whole = counts[:, row].sum(axis=0)
        average = whole * (n_used / max(1, whole.sum()))
        entry = entry_of[seen.tokens[-1]]
        known = counts[entry, row] if entry >= 0 else np.zeros_like(average)
        return np.minimum((known + average) / (known.sum() / n_used + 1), 1)

    return predict


def affinity(predictor: StorePredictor) -> Definition:
    def predict(seen: Sequence, row: int, distance: int) -> Float32s | None:
        if distance != 1 or row - 1 not in seen.ids:
            return None
        # rows of the matrix add up to 1, but a token uses n_expert_used experts
        mean = predictor.arrays["affinity"][row - 1, seen.ids[row - 1]].mean(axis=0)
        return np.minimum(mean * predictor.shape.n_expert_used, 1)

    return predict


def skip(predictor: StorePredictor) -> Definition:
    """Applies the row's router, quantised as in the store, to the input of the last
    routed layer's router.

    The prediction is None if this input is unknown or the row has no stored router.
    """
    arrays, layers, n_used = (
        predictor.arrays,
        predictor.shape.layers,
        predictor.shape.n_expert_used,
    )
    gating, *groups = (
        int(arrays[name][0]) for name in ("gating", "n_group", "n_group_used")
    )

    def router(il: int) -> Router:
        matrix = arrays[f"{il}.weights"] * arrays[f"{il}.scale"][:, np.newaxis]
        return Router(n_used, matrix, arrays[f"{il}.bias"], arrays[f"{il}.choice_bias"])

    routers = Routers(
        Gating(gating),
        {il: router(il) for il in layers if f"{il}.weights" in arrays},
        *groups,
    )

    def predict(seen: Sequence, row: int, distance: int) -> Float32s | None:
        il = layers[row]
        if (
            seen.input is None
            or seen.input[0] != row - distance
            or il not in routers.routers
        ):
            return None
        return probabilities(routers, il, seen.input[1])

    return predict


def matrix_of(
    arrays: Mapping[str, npt.NDArray[Any]], name: str
) -> tuple[Float32s, Float32s]:
    """Returns a layer's matrix, quantised as in the store, and its bias."""
    scale = arrays[f"{name}.scale"][:, np.newaxis]
    return arrays[f"{name}.weights"] * scale, arrays[f"{name}.bias"]


def mlp(predictor: StorePredictor) -> Definition:
    layers = predictor.shape.layers

    def predict(seen: Sequence, row: int, distance: int) -> Float32s | None:
        if seen.input is None or seen.input[0] != row - distance:
            return None
        network = f"{layers[seen.input[0]]}.{layers[row]}"
        if f"{network}.out.weights" not in predictor.arrays:
            return None
        matrices = [
            matrix_of(predictor.arrays, f"{network}.{part}")
            for part in ("hidden", "out")
        ]
        x = seen.input[1][np.newaxis]
        shares = shares_of(logits(x, matrices)[0])
        return np.minimum(shares * predictor.shape.n_expert_used, 1)

    return predict


def expert_mlp(predictor: StorePredictor) -> Definition:
    arrays = predictor.arrays
    n_layers = len(arrays["sizes"]) - 1
    matrices = [matrix_of(arrays, f"layers.{i}") for i in range(n_layers)]

    def predict(seen: Sequence, row: int, distance: int) -> Float32s | None:
        if (
            distance != 1
            or row < 1
            or any(earlier not in seen.ids for earlier in range(row))
        ):
            return None
        ids = np.stack([seen.ids[earlier] for earlier in range(row)])[np.newaxis]
        x = states(arrays["popularity"], arrays["affinity"], ids, np.array([row]))
        return 1 / (1 + np.exp(-logits(x, matrices)[0]))

    return predict


def eamc(predictor: EamcPredictor) -> Definition:
    """Predicts from the sum of the N_MATCHES entries of the collection that are
    nearest to this pass.

    The sum is scaled to n_expert_used. Among equally near entries, entries with more
    tokens come first.
    """
    entries, layers = predictor.eamc.state, predictor.shape.layers

    def predict(seen: Sequence, row: int, distance: int) -> Float32s | None:
        query = np.zeros(predictor.shape.table)
        for earlier, ids in seen.ids.items():
            query[layers[earlier], ids] = 1
        seen_rows = entries[:, [layers[earlier] for earlier in seen.ids]].reshape(
            len(entries), -1
        )
        norms = np.linalg.norm(seen_rows, axis=1) * np.linalg.norm(query)
        cosines = np.divide(
            (entries * query).sum(axis=(1, 2)),
            norms,
            out=np.zeros(len(entries)),
            where=norms > 0,
        )
        nearest = np.lexsort((-entries.sum(axis=(1, 2)), -cosines.round(6)))[:N_MATCHES]
        total = entries[nearest[cosines[nearest] > 0], layers[row]].sum(axis=0)
        return (
            np.minimum(total * (predictor.shape.n_expert_used / total.sum()), 1)
            if total.any()
            else None
        )

    return predict


def routing_path(shape: MoeShape, arrays: Arrays) -> Definition:
    """Predicts from the tokens of the chunk and from the window of tokens before it.

    Padding fills a window that begins before the text.
    """
    n_window = len(arrays["window"])
    network = PathModel(arrays, Options(), np.random.default_rng())

    @cache
    def table(tokens: tuple[int, ...], chunk_start: int) -> Float32s:
        before = [*[shape.n_vocab] * n_window, *tokens]
        window = np.array(before[chunk_start : chunk_start + n_window])
        chunk = np.array(tokens[chunk_start:])
        found = network.logits(window[np.newaxis], chunk[np.newaxis], training=False)
        return 1 / (1 + np.exp(-found.value[0, -1]))

    def predict(seen: Sequence, row: int, distance: int) -> Float32s | None:
        return (
            None
            if seen.chunk_start is None
            else table(tuple(seen.tokens), seen.chunk_start)[row]
        )

    return predict


DEFINITIONS: dict[str, Callable[..., Definition]] = {
    "previous-token": previous_token, "token-id": token_table, "affinity": affinity, "skip": skip, "mlp": mlp,
    "expert-mlp": expert_mlp, "eamc": eamc,
}  # fmt: skip
"""Definitions by the name of a predictor.

The routing path is not among them, because its definition also needs its arrays in
float32.
"""


def defined(
    predictor: Predictor, arrays: Arrays | None = None
) -> Callable[[], Sequence]:
    """Returns a function that creates sequences with this predictor's definition.

    arrays: a routing path's network in float32; other predictors do not use it.
    """
    if predictor.name == "routing-path":
        assert arrays is not None
        define = routing_path(predictor.shape, arrays)
        return lambda: Sequence(define, len(arrays["chunk"]))
    define = DEFINITIONS[predictor.name](predictor)
    return lambda: Sequence(define)


def any_of(found: list[Float32s | None]) -> Float32s | None:
    """Returns, for each expert, the probability that any of several sequences uses it.
    Returns None without predictions.
    """
    known = [each for each in found if each is not None]
    return 1 - np.prod([1 - each for each in known], axis=0) if known else None
