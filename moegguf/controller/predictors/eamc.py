"""Predicts, as MoE-Infinity does (section 4.5), from the experts of the past requests
that most resemble the pass in progress."""

from __future__ import annotations

from moegguf.controller.collection import Eamc
from moegguf.controller.history import History
from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.native.predictor import NativePredictor, integers

N_MATCHES = 8  # the store can add up at most 64 matching entries


class EamcPredictor(StorePredictor):
    """Predicts from the entries of the EAM collection that most resemble the routing of
    this pass so far. An entry is the rEAM of a past request: for each expert, the
    number of tokens that used it. Every later layer can be predicted.

    The predictor needs no training. A request's rEAM is added to the collection when
    the request ends, or when `learned` is called. The store finds the N_MATCHES
    nearest rEAMs and adds up their counts, as in the paper, so rEAMs with more tokens
    have more weight. The paper also multiplies by the layer proximity 1 - (i - l) / L,
    where l is the current layer, i is the predicted one, and L is the number of layers.
    Here this factor only changes the order of prefetches, if
    `PrefetchOptions.by_proximity` is True.

    The collection `eamc` may already have entries. Once this predictor exists, nothing
    else may change the collection.
    """

    def __init__(self, shape: MoeShape, eamc: Eamc | None = None) -> None:
        super().__init__("eamc", shape, shape.n_moe_layer)
        self.eamc = eamc or Eamc(*shape.table)

    def native(self) -> NativePredictor:
        """Returns the predictor's name, and the collection as arrays for the store."""
        n_matches = {"n_matches": integers(N_MATCHES)}
        return NativePredictor(self.name, self.eamc.arrays() | n_matches)

    def learn(self, history: History) -> None:
        """Adds the rEAMs of the requests that ended with the history's last event to
        the collection."""
        for ream in history.finished:
            self.eamc.add(ream)

    def learned(self, history: History) -> Eamc:
        """Ends the history's requests in progress and adds them to the collection.
        Returns the collection."""
        for ream in history.end_all():
            self.eamc.add(ream)
        return self.eamc
