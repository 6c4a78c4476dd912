"""ExpertFlow's predictive locality-aware expert caching with real-time correction (sections 3.2.1 and 3.2.2)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

NAME = "locality"
HEAT_DECAY = 0.95  # factor of an expert's heat per pass
HOT = 0.3  # heat of an expert that was used in the last twenty passes or so, predicted or not


class Locality:
    """Keeps the experts predicted for this pass, nearest layers first; evicts mispredicted ones first.

    From the first victim to the last: 1. experts that were predicted for a layer of this pass and not used there
    (mis-prefetched), unless they are hot; 2. experts that this pass no longer needs: those of layers computed already,
    and those of later layers that are not predicted; 3. predicted experts of layers to come, the farthest first. An
    expert counts as predicted when it is among its layer's n_expert_used most probable, or at least as likely as not.

    The paper names this order (3.2.2: mis-prefetched ones, then those that have completed) but not the order among
    equals, nor what "locality" means beyond its example (3.2.1: a cache of 8 takes the two nearest of four layers
    whole, and the third as the first completes); the formula, if there was one, is missing from the text available.
    Here it is distance in layers among predicted experts, and heat among the others: uses, decaying by HEAT_DECAY per
    pass, which combines frequency and recency. A policy cannot distinguish a prefetched expert from one that was
    resident before, hence the exception for hot experts: without it every misprediction evicts one. The first layer of
    a pass is never corrected: no routing event precedes it.
    """

    name: ClassVar[str] = NAME

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self._heat: Float32s = np.zeros(shape.table, np.float32)
        self._predicted: npt.NDArray[np.bool_] = np.zeros(shape.table, np.bool_)
        self._mispredicted: npt.NDArray[np.bool_] = np.zeros(shape.table, np.bool_)
        self._proximity: Float32s = np.linspace(3, 2, shape.n_layer, endpoint=False, dtype=np.float32)[:, np.newaxis]
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert) from 0; valid until the next call. None for a layer that has no experts."""
        il = history.il
        if il not in self.shape.row_of:
            return None
        if history.new_pass:
            self._heat *= HEAT_DECAY
            self._predicted[:] = False
            self._mispredicted[:] = False
        used = history.iteration[il] > 0
        self._mispredicted[il] = self._predicted[il] & ~used & (self._heat[il] < HOT)
        self._heat[il] += used
        self._predicted[: il + 1] = False
        self._update_predicted(forecast)
        return self._ranked()

    def _update_predicted(self, forecast: Forecast) -> None:
        """Takes the forecast of layers to come; earlier predictions of other layers stay valid."""
        known = [il for il in forecast.known() if il > forecast.il]
        if not known:
            return
        probabilities = forecast.probabilities()[known]
        k = min(self.shape.n_expert_used, self.shape.n_expert)
        kth = np.partition(probabilities, -k, axis=1)[:, -k, np.newaxis]
        self._predicted[known] = (probabilities >= np.minimum(kth, 0.5)) & (probabilities > 0)

    def _ranked(self) -> Float32s:
        """Mispredicted experts are in [0, 1), those not predicted in [1, 2), predicted ones in (2, 3]."""
        scores = self._scores
        np.divide(self._heat, 1 + self._heat, out=scores)
        scores += ~self._mispredicted
        np.maximum(scores, self._predicted * self._proximity, out=scores)
        return scores
