"""MoE-Infinity's prediction (section 4.5): expert probabilities from past requests that resemble the pass in progress.

`PredictEam` takes requests from a `History`, adds them to the collections, matches the pass in progress and aggregates
the matches. The predictor and the eviction policy each have one of their own; the store matches for the predictor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.controller.collection import CAPACITY, EamcPair
from moegguf.controller.history import Counts, History
from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s
from moegguf.native.nearest import MOST
from moegguf.native.predictor import NativePredictor, integers

N_MATCHES = 8

_NO_MATCHES: npt.NDArray[np.intp] = np.zeros(0, np.intp)


class PredictEam:
    """The aggregated EAM of the pass in progress: matched rEAMs summed cell by cell, rows normalised to a sum of 1.

    Where a pass has several requests, the iEAM of all together is matched, and an entry is added for each that ends.

    The sum is unweighted, as in the paper: an entry counts by its tokens. `eamcs` may already have entries, and is
    owned by this object from then on.
    """

    def __init__(self, shape: MoeShape, eamcs: EamcPair | None = None, n_matches: int = N_MATCHES) -> None:
        self.eamcs = eamcs or EamcPair.empty(*shape.table, CAPACITY)
        self.n_matches = n_matches
        self._eamc = self.eamcs.prefill
        self._matches: npt.NDArray[np.intp] | None = _NO_MATCHES

    def update(self, history: History) -> None:
        """Adds the last routing event of the history, and the rEAMs of the requests that ended with it."""
        self.learn(history)
        self._eamc = self.eamcs.of(history.phase)
        if history.new_pass:
            self._eamc.begin_pass()
        self._eamc.add_query_row(history.il, history.iteration[history.il])
        self._matches = None

    def matches(self) -> npt.NDArray[np.intp]:
        """Indices of the entries aggregated."""
        if self._matches is None:
            self._matches = self._eamc.match(self.n_matches)
        return self._matches

    def table(self) -> Float32s:
        """(n_layer, n_expert): of every layer, computed ones included (reuse by the next token); 0 without counts."""
        return _shares(self._eamc.total(self.matches()))

    def learn(self, history: History) -> None:
        """Adds the rEAMs of the requests that ended with the history's last event."""
        for ream in history.finished:
            self.eamcs.add(*ream)


def _shares(counts: Counts) -> Float32s:
    """Each row divided by its sum; rows without counts stay 0."""
    totals = np.maximum(np.add.reduce(counts, -1, keepdims=True), np.float32(1))
    return np.divide(counts, totals, dtype=np.float32)


class Learner:
    """A predictor or policy that learns an EAM collection to be saved."""

    predict_eam: PredictEam

    @property
    def eamcs(self) -> EamcPair:
        """The prefill and decode collections, of the requests that have ended."""
        return self.predict_eam.eamcs

    def learned(self, history: History) -> EamcPair:
        """The collections, with the requests in progress (those of the history) added. They end with this."""
        for ream in history.end_all():
            self.eamcs.add(*ream)
        return self.eamcs


class EamcPredictor(Learner, StorePredictor):
    """Probabilities from the collection of past requests' EAMs, matched on the rows of this pass seen so far.

    Needs no training: a request's rEAM is added to the collection when the request ends: when the next one begins, or
    at `learned`; the store matches. `eamcs` and `n_matches` are PredictEam's. The layer proximity 1 - (i - l) / L of
    the paper's pEAM orders prefetches and is no probability: it is `PrefetchOptions.by_proximity`. Reaches every later
    layer.
    """

    def __init__(self, shape: MoeShape, eamcs: EamcPair | None = None, n_matches: int = N_MATCHES) -> None:
        super().__init__("eamc", shape, len(shape.layers))
        self.predict_eam = PredictEam(shape, eamcs, n_matches)

    def native(self) -> NativePredictor:
        """The collection of decoding, in place."""
        arrays = self.eamcs.decode.arrays()
        return NativePredictor(self.name, arrays | {"n_matches": integers(min(self.predict_eam.n_matches, MOST))})
