"""MoE-Infinity's eviction (section 4.7, algorithm 1): least probable reuse first, deep layers before early ones."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.collection import EamcPair
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.predictors.eamc import OWN_SHARE, Learner, PredictEam
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

# Not given in the paper. Small enough that an expert used by no matched request never outranks one that was used.
EPSILON = 1e-6


class SparsityAware(Learner):
    """score = (pEAM[il, e] / n_token + epsilon) * (1 - il / L), over all layers.

    pEAM are the aggregated counts of past requests that resemble the pass in progress and n_token their sum in that
    row, independent of the predictor in use. L layers have experts and il counts these from 0. Early layers are
    favoured because little can be prefetched for them (section 4.6). Without any counts all scores are 0: least recent
    use.
    """

    name: ClassVar[str] = "sparsity"

    def __init__(self, shape: MoeShape, eamcs: EamcPair | None = None, own_share: float = 0.0) -> None:
        self.predict_eam = PredictEam(shape, eamcs, own_share=own_share)
        self._decay = np.zeros((shape.n_layer, 1), np.float32)
        self._decay[list(shape.layers), 0] = 1 - np.arange(len(shape.layers)) / len(shape.layers)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert), updated at every routing event."""
        self.predict_eam.update(history)
        probabilities = self.predict_eam.table()
        if not probabilities.any():
            return probabilities
        probabilities += np.float32(EPSILON)
        probabilities *= self._decay
        return probabilities


class OwnSparsityAware(SparsityAware):
    """The same, with half of each probability from the request in progress: a variant of ours, not the paper's."""

    name: ClassVar[str] = "sparsity-own"

    def __init__(self, shape: MoeShape, eamcs: EamcPair | None = None) -> None:
        super().__init__(shape, eamcs, own_share=OWN_SHARE)
