"""PredictEAM of MoE-Infinity (section 4.5): expert probabilities from past requests that resemble the pass in progress.

Takes requests from a `History`, adds them to the collections, matches the pass in progress and aggregates the matches.
The predictor and the eviction policy each have one of their own.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from moegguf.controller.collection import CAPACITY, EamcPair
from moegguf.controller.history import Counts, History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, Phase

N_MATCHES = 8
OWN_SHARE = 0.5  # of the variants that also count the request in progress; the paper's have 0

_TINY = np.float32(1e-30)
_NO_MATCHES: npt.NDArray[np.intp] = np.zeros(0, np.intp)


@runtime_checkable
class Learner(Protocol):
    """A predictor or policy that learns an EAM collection to be saved."""

    @property
    def eamcs(self) -> EamcPair:
        """The collections, of the requests that have ended."""

    def learned(self, history: History) -> EamcPair:
        """The collections, with the requests in progress (those of the history) added. They end with this."""


class PredictEam:
    """The aggregated EAM of the pass in progress: matched rEAMs summed cell by cell, rows normalised to a sum of 1.

    Of several requests in a pass, the iEAM of all together is matched, and an entry is added for each that ends.

    The sum is unweighted, as in the paper: an entry counts by its tokens. `own_share` is not the paper's: that part of
    a row's probability comes from the request's own rEAM so far, of the same phase, because "expert reuse is limited to
    request-level EAMs" (section 4.4) and this one is the closest. `eamcs` may already have entries, and is owned by
    this object from then on.
    """

    def __init__(
        self, shape: MoeShape, eamcs: EamcPair | None = None, n_matches: int = N_MATCHES, own_share: float = 0.0
    ) -> None:
        self.eamcs = eamcs or EamcPair.empty(*shape.table, CAPACITY)
        self.n_matches = n_matches
        self.own_share = own_share
        self._eamc = self.eamcs.prefill
        self._ream: Counts = np.zeros(shape.table, np.float32)
        self._matches: npt.NDArray[np.intp] | None = _NO_MATCHES

    def update(self, history: History) -> None:
        """Adds the last routing event of the history, and the rEAMs of the requests that ended with it."""
        self._learn(history)
        self._select_phase(history, history.phase)
        if history.new_pass:
            self._eamc.begin_pass()
        self._eamc.add_query_row(history.il, history.iteration[history.il])
        self._matches = None

    def begin_pass(self, history: History, phase: Phase) -> None:
        """A pass of this phase begins: without matches, only the requests' own rEAMs count."""
        self._learn(history)
        self._select_phase(history, phase)
        self._matches = _NO_MATCHES

    def matches(self) -> npt.NDArray[np.intp]:
        """Indices of the entries aggregated."""
        if self._matches is None:
            self._matches = self._eamc.match(self.n_matches)
        return self._matches

    def row(self, il: int) -> Float32s:
        """(n_expert,): probabilities of layer `il`; all 0 without any counts."""
        return self._blend(self._eamc.total_row(self.matches(), il), self._ream[il])

    def table(self) -> Float32s:
        """(n_layer, n_expert): `row` of every layer, computed ones included (reuse by the next token)."""
        return self._blend(self._eamc.total(self.matches()), self._ream)

    def _learn(self, history: History) -> None:
        for ream in history.finished:
            self.eamcs.add(*ream)

    def _select_phase(self, history: History, phase: Phase) -> None:
        self._eamc = self.eamcs.of(phase)
        self._ream = history.prefill if phase == Phase.PREFILL else history.decode

    def _blend(self, matched: Counts, own: Counts) -> Float32s:
        share_matched, share_own = np.float32(1 - self.own_share), np.float32(self.own_share)
        blend: Float32s = np.multiply(matched, share_matched / _tokens(matched), dtype=np.float32)
        blend += own * (share_own / _tokens(own))
        # where only one of them has counts, it gets the whole weight
        blend /= np.maximum(np.add.reduce(blend, -1, keepdims=True), _TINY)
        return blend


def _tokens(counts: Counts) -> Counts:
    """Sums of the rows, at least 1."""
    return np.maximum(np.add.reduce(counts, -1, keepdims=True), np.float32(1))
