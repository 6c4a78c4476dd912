"""MoE-Infinity's prediction (section 4.5): from the experts of past requests that resemble the pass in progress."""

from __future__ import annotations

from moegguf.controller.collection import Eamc
from moegguf.controller.history import History
from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.native.predictor import NativePredictor, integers

N_MATCHES = 8
MOST_MATCHES = 64  # the most matched entries that the store can add up


class EamcPredictor(StorePredictor):
    """Predicts from past requests' EAMs: from entries of the collection that resemble the layers of this pass seen so
    far.

    Needs no training. A request's rEAM is added to the collection when the request ends, or at `learned`. The store
    finds the `n_matches` nearest rEAMs and adds them without weights, as in the paper, so that rEAMs of more tokens
    count more. The caller hands `eamc`, which may have entries, over to this object. The paper multiplies by a layer
    proximity 1 - (i - l) / L, which only orders prefetches: see `PrefetchOptions.by_proximity`. Reaches every later
    layer.
    """

    def __init__(self, shape: MoeShape, eamc: Eamc | None = None, n_matches: int = N_MATCHES) -> None:
        super().__init__("eamc", shape, len(shape.layers))
        self.eamc = eamc or Eamc(*shape.table)
        self.n_matches = min(n_matches, MOST_MATCHES)

    def native(self) -> NativePredictor:
        """Returns the collection as arrays for the store."""
        return NativePredictor(self.name, self.eamc.arrays() | {"n_matches": integers(self.n_matches)})

    def learn(self, history: History) -> None:
        """Adds the rEAMs of requests that ended with the history's last event to the collection."""
        for ream in history.finished:
            self.eamc.add(ream)

    def learned(self, history: History) -> Eamc:
        """Ends the history's requests in progress and adds them to the collection. Returns the collection."""
        for ream in history.end_all():
            self.eamc.add(ream)
        return self.eamc
