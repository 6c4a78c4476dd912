"""MoE-Infinity's predictor (section 4.5): experts of past requests with similar routing so far."""

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
    """Probabilities from the collection of past requests' EAMs, matched on the rows of this pass seen so far.

    Needs no training: a request's rEAM is added to the collection when the request ends: when the next one begins, or
    at `learned`. `eamcs`, `n_matches` and `own_share` are PredictEam's. The layer proximity 1 - (i - l) / L of the
    paper's pEAM orders prefetches and is no probability: it is `PrefetchOptions.by_proximity`. Reaches every later
    layer.
    """

    name: ClassVar[str] = "eamc"

    def __init__(
        self,
        shape: MoeShape,
        eamcs: EamcPair | None = None,
        n_matches: int = N_MATCHES,
        own_share: float = 0.0,
    ) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self._predict_eam = PredictEam(shape, eamcs, n_matches, own_share)
        self._history = History(shape)

    @property
    def eamcs(self) -> EamcPair:
        """The prefill and decode collections; `learned` adds the request in progress."""
        return self._predict_eam.eamcs

    def announce(self, announcement: Announcement) -> None:
        """Begins a pass, and ends the requests that `History` says."""
        self._history.expect(announcement)
        self._predict_eam.begin_pass(self._history, announcement.phase)

    def observe(self, event: RoutingEvent) -> None:
        """Adds the event to the iEAM and matches it; ids outside the shape are left out."""
        ids = event.expert_ids
        if event.il not in self.shape.row_of or ids.max(initial=0) >= self.shape.n_expert:
            return
        if ids.min(initial=0) < 0:
            event = event._replace(expert_ids=ids[ids >= 0], sequences=None, phases=None)
        self._history.update(event)
        self._predict_eam.update(self._history)

    def predict(self, il: int, distance: int) -> Float32s | None:
        """As `Predictor.predict`, at any distance; None when neither the collection nor this request has counts."""
        if il not in self.shape.row_of:
            return None
        probabilities = self._predict_eam.row(il)
        if not probabilities.any():
            return None
        probabilities *= self.shape.n_expert_used  # the row sums to 1, but a token uses n_expert_used
        return np.minimum(probabilities, 1, out=probabilities)

    def learned(self, history: History) -> EamcPair:
        """As `Learner.learned`."""
        for ream in history.end_all():
            self.eamcs.add(*ream)
        self._history = History(self.shape)
        return self.eamcs


class OwnEamcPredictor(EamcPredictor):
    """The same, with half of each probability from the request in progress: a variant of ours, not the paper's."""

    name: ClassVar[str] = "eamc-own"

    def __init__(self, shape: MoeShape, eamcs: EamcPair | None = None, n_matches: int = N_MATCHES) -> None:
        super().__init__(shape, eamcs, n_matches, OWN_SHARE)
