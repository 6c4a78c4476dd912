"""The prediction of MoE-Infinity (section 4.5): the activation of past requests that resemble the pass in progress."""

from __future__ import annotations

from moegguf.controller.collection import Eamc
from moegguf.controller.history import History
from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.native.predictor import NativePredictor, integers

N_MATCHES = 8
MOST_MATCHES = 64  # matches that the store adds up


class EamcPredictor(StorePredictor):
    """Probabilities from the collection of past requests' EAMs, matched on the rows of this pass seen so far.

    Needs no training: a request's rEAM is added to the collection when the request ends: when the next one begins, or
    at `learned`; the store matches. The at most `n_matches` nearest rEAMs are summed cell by cell, unweighted as in the
    paper: an entry counts by its tokens. `eamc` may already have entries, and is owned by this object from then on.
    The layer proximity 1 - (i - l) / L of the paper's pEAM orders prefetches and is no probability: it is
    `PrefetchOptions.by_proximity`. Reaches every later layer.
    """

    def __init__(self, shape: MoeShape, eamc: Eamc | None = None, n_matches: int = N_MATCHES) -> None:
        super().__init__("eamc", shape, len(shape.layers))
        self.eamc = eamc or Eamc(*shape.table)
        self.n_matches = min(n_matches, MOST_MATCHES)

    def native(self) -> NativePredictor:
        """The collection, in place."""
        return NativePredictor(self.name, self.eamc.arrays() | {"n_matches": integers(self.n_matches)})

    def learn(self, history: History) -> None:
        """Adds the rEAMs of the requests that ended with the history's last event."""
        for ream in history.finished:
            self.eamc.add(ream)

    def learned(self, history: History) -> Eamc:
        """Adds the history's requests in progress to the collection, and ends them. Returns the collection."""
        for ream in history.end_all():
            self.eamc.add(ream)
        return self.eamc
