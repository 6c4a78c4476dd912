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
NO_LIMIT = 1 << 62  # of bytes per token


@dataclass(frozen=True)
class PrefetchOptions:
    """Limits of prefetching.

    window: MoE layers ahead. again: a layer is predicted anew as its distance shrinks, not once (`Forecast`).
    budget_bytes: maximum requested per token; None: the bytes of half the experts a token uses. least_probability:
    experts below it, and those of probability 0, are not prefetched. watchdog: prefetching is switched off when it does
    not save time; False keeps it on.

    Where the store predicts by itself, it knows what each probability was worth so far, and `waste_weight` takes the
    place of `least_probability`: what an expert fetched in vain costs, as a share of the stall that one fetched in time
    saves; 0: costs do not count. by_proximity: it fetches the largest probability times layer proximity first, of any
    layer (MoE-Infinity, section 4.5); else the nearest layer first, as what Python predicts always is.
    """

    window: int = 2
    again: bool = True
    budget_bytes: int | None = None
    least_probability: float = 0.2
    by_proximity: bool = False
    watchdog: bool = True
    waste_weight: float = 0.1


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
