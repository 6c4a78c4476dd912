"""MoE-Infinity's predictor (section 4.5): requests that routed alike so far tell which experts come next."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.collection import EamcPair
from moegguf.controller.history import History
from moegguf.controller.predict_eam import N_MATCHES, OWN_SHARE, PredictEam
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, RoutingEvent


class EamcPredictor(Predictor):
    """Likelihoods from the collection of past requests' EAMs, matched on the rows of this pass seen so far.

    Needs no training: a request's rEAM joins the collection when the request ends, that is when the next one begins or
    at `finish`. `eamcs`, `n_matches` and `own_share` are PredictEam's. Reaches every later layer.
    """

    name: ClassVar[str] = "eamc"

    def __init__(
        self,
        shape: MoeShape,
        eamcs: EamcPair | None = None,
        n_matches: int = N_MATCHES,
        own_share: float = OWN_SHARE,
    ) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self._seen = PredictEam(shape, eamcs, n_matches, own_share)
        self._history = History(shape)
        self._row = -1  # of the layer observed last, among those with experts

    @property
    def eamcs(self) -> EamcPair:
        """The collections, to be saved; call `finish` first for the request in progress to be in them."""
        return self._seen.eamcs

    def announce(self, announcement: Announcement) -> None:
        if announcement.sequence != self._history.sequence:
            self.finish()
        self._seen.expect(self._history, announcement.phase)
        self._row = -1

    def observe(self, event: RoutingEvent) -> None:
        event = event._replace(expert_ids=event.expert_ids[event.expert_ids >= 0])
        if event.il not in self.shape.row_of or event.expert_ids.max(initial=0) >= self.shape.n_expert:
            return
        self._history.update(event)
        self._seen.follow(self._history)
        self._row = self.shape.row_of[event.il]

    def predict(self, il: int, distance: int) -> Float32s | None:
        if il not in self.shape.row_of:
            return None
        shares = self._seen.row(il)
        if not shares.any():
            return None
        shares *= self.shape.n_expert_used  # they add up to 1, but a token uses n_expert_used
        return np.minimum(shares, 1, out=shares)

    def peam(self) -> Float32s:
        """(n_layer, n_expert): the pEAM: probabilities times the layer proximity 1 - (i - l) / L, to order prefetches.

        L layers have experts, l is the one observed last and i a later one; rows up to l keep their probabilities.
        """
        proximity = np.zeros((self.shape.n_layer, 1), np.float32)
        ahead = np.arange(len(self.shape.layers)) - self._row
        proximity[list(self.shape.layers), 0] = 1 - np.maximum(ahead, 0) / len(self.shape.layers)
        return self._seen.table() * proximity

    def finish(self) -> None:
        """Ends the request in progress: its rEAMs join the collections."""
        self.eamcs.add(self._history.prefill, self._history.decode)
        self._history = History(self.shape)
