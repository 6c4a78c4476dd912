"""Turns forecasts into prefetch requests: the most probable experts of layers to come, within bytes per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape

if TYPE_CHECKING:
    from moegguf.controller.forecast import Forecast

Residency = npt.NDArray[np.uint8]
NO_LIMIT = 1 << 62  # bytes per token


@dataclass(frozen=True)
class PrefetchOptions:
    """Limits of prefetching.

    A store that predicts by itself calibrates its probabilities, and uses `waste_weight` in place of
    `least_probability`. Only such a store can fetch by proximity (MoE-Infinity, section 4.5). Predictions in Python
    always fetch the nearest layer first.
    """

    window: int = 2  # MoE layers ahead
    again: bool = True  # a layer is predicted anew as its distance shrinks (`Forecast`)
    budget_bytes: int | None = None  # most bytes requested per token; None: half the experts that a token uses
    least_probability: float = 0.2  # experts with a lower probability, or with 0, are not prefetched
    by_proximity: bool = False  # the largest probability times layer proximity goes first, in any layer
    watchdog: bool = True  # prefetching is switched off when it does not save time
    waste_weight: float = 0.1  # cost of a prefetch in vain, as a share of the stall that a useful one saves


def most_prefetches(shape: MoeShape, options: PrefetchOptions) -> int:
    """The budget of a token in experts."""
    cycle_bytes = shape.n_expert_used * len(shape.layers) * shape.expert_bytes
    budget_bytes = cycle_bytes // 2 if options.budget_bytes is None else options.budget_bytes
    return budget_bytes // shape.expert_bytes


class Prefetcher:
    """Chooses experts to prefetch, of a layer at most as many as a token uses (ProMoE, section 4.3).

    Only absent experts count against the budget. An expert is requested once in a pass, the nearest layer first.
    """

    def __init__(self, shape: MoeShape, options: PrefetchOptions) -> None:
        self._shape = shape
        self._least_probability = options.least_probability
        self._budget_experts = most_prefetches(shape, options)
        self._requested: set[tuple[int, int]] = set()

    def begin_pass(self) -> None:
        """Resets the budget and the set of requested experts."""
        self._requested.clear()

    def requests(self, forecast: Forecast, residency: Callable[[], Residency]) -> list[tuple[int, int]]:
        """(layer, expert) to prefetch now: probable, absent and not requested yet. `residency` is called only when
        needed."""
        n_left = self._budget_experts - len(self._requested)
        known = forecast.known()
        if n_left <= 0 or not known:
            return []
        resident = residency()
        wanted = list[tuple[int, int]]()
        for il in known:
            of_layer = forecast.probabilities()[il]
            best = np.argsort(-of_layer, kind="stable")[: self._shape.n_expert_used]
            probable = (of_layer[best] >= self._least_probability) & (of_layer[best] > 0)
            wanted += [(il, expert) for expert in best[probable & (resident[il, best] == 0)].tolist()]
        wanted = [expert for expert in wanted if expert not in self._requested][:n_left]
        self._requested.update(wanted)
        return wanted
