"""FETCHRATE of a predictor at a distance (ProMoE, section 4.1): the share of what it names that comes in time.

An expert counts when its prediction is made and an LRU cache lacks it. Bytes count, not whole experts: where half of an
expert is there as its layer is routed, that is half in time, since a chunk that came need not come again. What the
layer still lacks is fetched while the layer waits, so that prefetches have the link only while layers compute. The
nearest layer is fetched first. What is in the cache counts neither way, so a predictor that names what is there gains
nothing by it. The first layer, which none precedes, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from moegguf.controller.shape import MoeShape
from moegguf.trace.simulate import SimOptions
from predictors.study.accuracy import ratio


class FetchCount:
    """Counts of one predictor at one distance, over a link that it has for itself."""

    def __init__(self, shape: MoeShape, link: SimOptions) -> None:
        self._expert_us = (shape.expert_bytes / link.link_bytes_per_s + link.link_latency_s) * 1e6
        self._layer_us = link.layer_pass_us + link.layer_compute_us
        self._left_us: dict[tuple[int, int], float] = {}  # {(row, expert): what is still to come}
        self._n_absent = 0
        self._n_fetched = 0.0

    @property
    def rate(self) -> float | None:
        """FETCHRATE; None where nothing absent was predicted."""
        return ratio(self._n_fetched, self._n_absent)

    def begin_pass(self) -> None:
        """Forgets the last pass."""
        self._left_us.clear()

    def predict(self, row: int, absent: Iterable[int]) -> None:
        """Requests experts of a layer that the cache lacks."""
        if row > 0:
            self._left_us |= {(row, expert): self._expert_us for expert in absent}

    def route(self, row: int) -> None:
        """Counts what came for a layer that is routed now, and forgets the rest of it."""
        mine = [key for key in self._left_us if key[0] == row]
        self._n_absent += len(mine)
        self._n_fetched += sum(1 - self._left_us.pop(key) / self._expert_us for key in mine)

    def compute(self) -> None:
        """Fetches while a layer computes."""
        free_us = self._layer_us
        for key in sorted(self._left_us):
            fetched_us = min(free_us, self._left_us[key])
            self._left_us[key] -= fetched_us
            free_us -= fetched_us
