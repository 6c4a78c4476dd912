"""Turns predictions into prefetches: the likeliest experts of the nearest layers, within bytes per token."""

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
    """How much to act on predictions.

    window: MoE layers ahead. budget_bytes: most bytes to request in one token; None: the bytes of half the experts a
    token uses. least_probability: experts below it are not prefetched. watchdog: prefetching must save
    time to stay on; without it, it is always on.
    """

    window: int = 2
    budget_bytes: int | None = None
    least_probability: float = 0.2
    watchdog: bool = True


class Prefetcher:
    """Chooses experts to fetch ahead (ProMoE, section 4: as many per layer as a token activates).

    Only absent experts count against the budget. An expert is requested once in a pass.
    """

    def __init__(self, shape: MoeShape, options: PrefetchOptions) -> None:
        self.options = options
        self._shape = shape
        cycle_bytes = shape.n_expert_used * len(shape.layers) * shape.expert_bytes
        budget_bytes = cycle_bytes // 2 if options.budget_bytes is None else options.budget_bytes
        self._budget_experts = budget_bytes // shape.expert_bytes
        self._left = self._budget_experts
        self._requested: npt.NDArray[np.bool_] = np.zeros(shape.table, bool)

    def begin_pass(self) -> None:
        """A new pass: its budget is whole, and nothing was requested."""
        self._left = self._budget_experts
        self._requested[:] = False

    def requests(
        self, forecast: Forecast, residency: Callable[[], Residency]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(layers, experts) to prefetch now, int32, the most urgent first. `residency` is called when it is needed."""
        layers: list[int] = []
        experts: list[int] = []
        known = forecast.known() if self._left > 0 else []
        resident = residency() if known else None
        for il in known:
            assert resident is not None
            probabilities = forecast.probabilities()[il]
            best = np.argsort(-probabilities, kind="stable")[: self._shape.n_expert_used]
            wanted = best[
                (probabilities[best] >= self.options.least_probability)
                & (resident[il, best] == 0)
                & ~self._requested[il, best]
            ][: self._left]
            self._requested[il, wanted] = True
            self._left -= len(wanted)
            layers += [il] * len(wanted)
            experts += wanted.tolist()
        return np.array(layers, np.int32), np.array(experts, np.int32)
