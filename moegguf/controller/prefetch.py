"""Turns forecasts into prefetch requests: the most probable experts of the nearest layers, within bytes per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moegguf.controller.forecast import Forecast
from moegguf.controller.shape import MoeShape

Residency = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PrefetchOptions:
    """Limits of prefetching.

    window: MoE layers ahead. budget_bytes: maximum requested per token; None: the bytes of half the experts a token
    uses. least_probability: experts below it are not prefetched. watchdog: prefetching is switched off when it does not
    save time; False keeps it on.
    """

    window: int = 2
    budget_bytes: int | None = None
    least_probability: float = 0.2
    watchdog: bool = True


class Prefetcher:
    """Chooses experts to prefetch (ProMoE, section 4: as many per layer as a token activates).

    Only absent experts count against the budget. An expert is requested once in a pass.
    """

    def __init__(self, shape: MoeShape, options: PrefetchOptions) -> None:
        self.options = options
        self._shape = shape
        cycle_bytes = shape.n_expert_used * len(shape.layers) * shape.expert_bytes
        budget_bytes = cycle_bytes // 2 if options.budget_bytes is None else options.budget_bytes
        self._budget_experts = budget_bytes // shape.expert_bytes
        self._remaining_experts = self._budget_experts
        self._requested: npt.NDArray[np.bool_] = np.zeros(shape.table, bool)

    def begin_pass(self) -> None:
        """Resets the budget and the set of requested experts."""
        self._remaining_experts = self._budget_experts
        self._requested[:] = False

    def requests(
        self, forecast: Forecast, residency: Callable[[], Residency]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(layers, experts) to prefetch now, int32, nearest layer first. `residency` is called only when needed."""
        layers: list[int] = []
        experts: list[int] = []
        known = forecast.known() if self._remaining_experts > 0 else []
        resident = residency() if known else None
        for il in known:
            assert resident is not None
            probabilities = forecast.probabilities()[il]
            best = np.argsort(-probabilities, kind="stable")[: self._shape.n_expert_used]
            chosen = best[
                (probabilities[best] >= self.options.least_probability)
                & (resident[il, best] == 0)
                & ~self._requested[il, best]
            ][: self._remaining_experts]
            self._requested[il, chosen] = True
            self._remaining_experts -= len(chosen)
            layers += [il] * len(chosen)
            experts += chosen.tolist()
        return np.array(layers, np.int32), np.array(experts, np.int32)
