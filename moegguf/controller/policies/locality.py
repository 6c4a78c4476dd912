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
HEAT_KEPT = 0.95  # of an expert's heat, from one pass to the next
OWN_MERIT = 0.3  # heat of an expert that was used in the last twenty passes or so: no prediction brought it here


class Locality:
    """Keeps the predicted path of this pass, nearest layers first; what the path promised wrongly goes first.

    From the first victim to the last: 1. experts that were predicted for a layer of this pass and not used there
    (mis-prefetched), unless their heat says that they were here on their own merit; 2. experts that this pass does not
    need any more, or not at all: those of layers computed already, and those of later layers that are not predicted;
    3. predicted experts of layers still to come, the farthest first. An expert counts as predicted when it is among its
    layer's n_expert_used likeliest, or at least as likely as not.

    The paper names this order (3.2.2: mis-prefetched ones, then those that have completed) but not how equals are told
    apart, nor what "locality" means beyond its example (3.2.1: a cache of 8 takes the two nearest of four layers whole,
    and the third as the first completes); the formula, if there was one, is missing from the text we have. Here it
    is distance in layers among awaited experts, and heat among the others: uses, fading by HEAT_KEPT per pass, which
    joins frequency and recency. Nor can a policy know what was fetched ahead and what was here before. Hence the rule
    of merit: without it every wrong prediction throws out a hot expert. The first layer of a pass is never corrected:
    its gate is the first one heard.
    """

    name: ClassVar[str] = NAME

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self._heat: Float32s = np.zeros(shape.table, np.float32)
        self._predicted: npt.NDArray[np.bool_] = np.zeros(shape.table, np.bool_)
        self._mispredicted: npt.NDArray[np.bool_] = np.zeros(shape.table, np.bool_)
        self._awaited: Float32s = np.linspace(3, 2, shape.n_layer, endpoint=False, dtype=np.float32)[:, np.newaxis]
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert) from 0; valid until the next call. None for a layer that has no experts."""
        il = history.il
        if il not in self.shape.row_of:
            return None
        if history.new_pass:
            self._heat *= HEAT_KEPT
            self._predicted[:] = False
            self._mispredicted[:] = False
        used = history.iteration[il] > 0
        self._mispredicted[il] = self._predicted[il] & ~used & (self._heat[il] < OWN_MERIT)
        self._heat[il] += used
        self._predicted[: il + 1] = False
        self._look_ahead(forecast)
        return self._ranked()

    def _look_ahead(self, forecast: Forecast) -> None:
        """Takes over what is said about layers to come; what was said before of others stands."""
        known = [il for il in forecast.known() if il > forecast.il]
        if not known:
            return
        probabilities = forecast.probabilities()[known]
        k = min(self.shape.n_expert_used, self.shape.n_expert)
        kth = np.partition(probabilities, -k, axis=1)[:, -k, np.newaxis]
        self._predicted[known] = (probabilities >= np.minimum(kth, 0.5)) & (probabilities > 0)

    def _ranked(self) -> Float32s:
        """Mispredicted experts are in [0, 1), idle ones in [1, 2), awaited ones in (2, 3]."""
        scores = self._scores
        np.divide(self._heat, 1 + self._heat, out=scores)
        scores += ~self._mispredicted
        np.maximum(scores, self._predicted * self._awaited, out=scores)
        return scores
