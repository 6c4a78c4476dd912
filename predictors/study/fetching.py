"""FETCHRATE of a predictor at a distance (ProMoE, section 4.1): the share of predicted experts that arrives in time.

A predicted expert counts if an LRU cache lacks it when the prediction is made. A predictor gains nothing by naming
experts in the cache. The rate counts bytes, not whole experts. An expert is half in time if half of it has arrived when
its layer is routed, since only the other half is then fetched. A layer waits while its missing experts are fetched.
Prefetches therefore use the link only while layers compute. The nearest layer is fetched first. The first MoE layer is
left out, since no layer precedes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from moegguf.controller.shape import MoeShape
from moegguf.trace.simulate import SimOptions
from predictors.study.accuracy import ratio


class FetchCount:
    """Counts of one predictor at one distance, with a link that nothing else uses."""

    def __init__(self, shape: MoeShape, link: SimOptions) -> None:
        self._expert_us = (shape.expert_bytes / link.link_bytes_per_s + link.link_latency_s) * 1e6
        self._layer_us = link.layer_pass_us + link.layer_compute_us
        self._left_us: dict[tuple[int, int], float] = {}  # {(row, expert): transfer time that is left, in us}
        self._n_absent = 0
        self._n_fetched = 0.0

    @property
    def rate(self) -> float | None:
        """FETCHRATE, or None if no absent expert was predicted."""
        return ratio(self._n_fetched, self._n_absent)

    def begin_pass(self) -> None:
        """Forgets the last pass."""
        self._left_us.clear()

    def predict(self, row: int, absent: Iterable[int]) -> None:
        """Requests experts of a layer that the cache lacks."""
        if row > 0:
            self._left_us |= {(row, expert): self._expert_us for expert in absent}

    def route(self, row: int) -> None:
        """Counts the bytes that arrived for a layer, which is routed now, and drops its other requests."""
        mine = [key for key in self._left_us if key[0] == row]
        self._n_absent += len(mine)
        self._n_fetched += sum(1 - self._left_us.pop(key) / self._expert_us for key in mine)

    def compute(self) -> None:
        """Fetches the nearest requested experts for as long as a layer computes."""
        free_us = self._layer_us
        for key in sorted(self._left_us):
            fetched_us = min(free_us, self._left_us[key])
            self._left_us[key] -= fetched_us
            free_us -= fetched_us
