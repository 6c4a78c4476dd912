"""Computes a predictor's FETCHRATE at a distance (ProMoE, section 4.1): the share of
prefetches that arrive in time.

A predicted expert counts only if an LRU cache lacks it when the prediction is made,
because predicting a cached expert gains nothing. The rate counts bytes, not whole
experts. If half of an expert has arrived when its layer is routed, this expert counts
as half in time, because only the other half must still be fetched. A layer waits while
its missing experts are fetched. Prefetches therefore use the link only while layers are
being computed. The nearest layer's experts are fetched first. The first MoE layer is
left out, because no layer precedes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from moegguf.controller.shape import MoeShape
from moegguf.trace.simulate import SimOptions
from predictors.study.accuracy import ratio


class FetchCount:
    """Counts of one predictor at one distance. Nothing else uses the simulated link."""

    def __init__(self, shape: MoeShape, link: SimOptions) -> None:
        self._expert_us = (
            shape.expert_bytes / link.link_bytes_per_s + link.link_latency_s
        ) * 1e6
        self._layer_us = link.layer_pass_us + link.layer_compute_us
        # {(row, expert): remaining transfer time, in microseconds}.
        self._left_us: dict[tuple[int, int], float] = {}
        self._n_absent = 0
        self._n_fetched = 0.0

    @property
    def rate(self) -> float | None:
        """FETCHRATE; None if the cache held every predicted expert."""
        return ratio(self._n_fetched, self._n_absent)

    def begin_pass(self) -> None:
        """Discards the requests of the last pass."""
        self._left_us.clear()

    def predict(self, row: int, absent: Iterable[int]) -> None:
        """Requests experts of a layer. `absent` lists the predicted experts that the
        cache lacks.

        Does nothing for row 0, the first MoE layer.
        """
        if row > 0:
            self._left_us |= {(row, expert): self._expert_us for expert in absent}

    def route(self, row: int) -> None:
        """Counts the layer's requested experts, and adds up the share of each that has
        arrived. Drops these requests."""
        mine = [key for key in self._left_us if key[0] == row]
        self._n_absent += len(mine)
        self._n_fetched += sum(
            1 - self._left_us.pop(key) / self._expert_us for key in mine
        )

    def compute(self) -> None:
        """Fetches requested experts during the compute time of one layer, the nearest
        layer's first."""
        free_us = self._layer_us
        for key in sorted(self._left_us):
            fetched_us = min(free_us, self._left_us[key])
            self._left_us[key] -= fetched_us
            free_us -= fetched_us
