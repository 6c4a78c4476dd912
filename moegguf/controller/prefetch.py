"""Turns forecasts into prefetch requests: the most probable experts of later layers,
within a budget of bytes for each pass."""

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
NO_LIMIT = 1 << 62  # a budget in bytes that is never reached


@dataclass(frozen=True)
class PrefetchOptions:
    """Limits of prefetching.

    If the store computes the predictor, it calibrates the probabilities, and uses
    `waste_weight` instead of `least_probability`. Only then does `by_proximity` have an
    effect (MoE-Infinity, section 4.5). With predictors in Python, the nearest layer
    always goes first.
    """

    # Number of layers with experts to predict ahead. In the store, predictors that need
    # no router inputs ignore this number and predict as far as they reach.
    window: int = 2
    # True: each layer is predicted again whenever a nearer layer is routed; False: only
    # once per pass (`Forecast`)
    again: bool = True
    # Maximum number of bytes prefetched in a pass; None: half of a token's expert bytes
    budget_bytes: int | None = None
    # Less probable experts, and experts with probability 0, are not prefetched.
    least_probability: float = 0.2
    # True: the expert with the largest product of probability and layer proximity goes
    # first; False: the nearest layer
    by_proximity: bool = False
    # True: a `Watchdog` switches prefetching off when it does not save enough time.
    watchdog: bool = True
    # Cost of a useless prefetch, as a share of the stall that a useful one saves.
    waste_weight: float = 0.1


def most_prefetches(shape: MoeShape, options: PrefetchOptions) -> int:
    """Returns the maximum number of experts that may be prefetched in a pass: the
    budget in bytes divided by the average size of an expert, rounded down."""
    cycle_bytes = shape.n_expert_used * shape.n_moe_layer * shape.expert_bytes
    budget_bytes = (
        cycle_bytes // 2 if options.budget_bytes is None else options.budget_bytes
    )
    return budget_bytes // shape.expert_bytes


class Prefetcher:
    """Chooses experts to prefetch. The candidates in each layer are the n_expert_used
    most probable experts, because a token uses n_expert_used experts (ProMoE, section
    4.3).

    Experts that already have a slot are not requested, and do not count against the
    budget. Each expert is requested at most once between two calls of `begin_pass`. The
    nearest layer goes first.
    """

    def __init__(self, shape: MoeShape, options: PrefetchOptions) -> None:
        self._shape = shape
        self._least_probability = options.least_probability
        self._budget_experts = most_prefetches(shape, options)
        self._requested: set[tuple[int, int]] = set()

    def begin_pass(self) -> None:
        """Resets the budget and forgets which experts were requested in the last
        pass."""
        self._requested.clear()

    def requests(
        self, forecast: Forecast, residency: Callable[[], Residency]
    ) -> list[tuple[int, int]]:
        """Returns the pairs (layer, expert) to prefetch now: probable experts that have
        no slot and were not requested earlier in this pass. Calls `residency` only if
        the budget and the forecast allow a prefetch."""
        n_left = self._budget_experts - len(self._requested)
        known = forecast.known()
        if n_left <= 0 or not known:
            return []
        resident = residency()
        wanted = list[tuple[int, int]]()
        for il in known:
            of_layer = forecast.probabilities()[il]
            best = np.argsort(-of_layer, kind="stable")[: self._shape.n_expert_used]
            probable = (of_layer[best] >= self._least_probability) & (
                of_layer[best] > 0
            )
            wanted += [
                (il, expert)
                for expert in best[probable & (resident[il, best] == 0)].tolist()
            ]
        wanted = [expert for expert in wanted if expert not in self._requested][:n_left]
        self._requested.update(wanted)
        return wanted
