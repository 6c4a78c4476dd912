"""Computes paired intervals of figures by bootstrap over requests: each draw uses the
same requests for all systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
N_DRAWS = 1000

Columns = npt.NDArray[np.float64]
# Computes (...) from columns (n_columns, ..., n_requests).
Statistic = Callable[[Columns], Columns]


@dataclass(frozen=True)
class Estimate:
    """A figure, and the two ends of its interval. For a figure without an interval,
    both ends equal the figure."""

    value: float
    low: float
    high: float

    @classmethod
    def plain(cls, value: float) -> Estimate:
        """Returns a figure without an interval."""
        return cls(value, value, value)


def paired_estimate(
    columns: Sequence[Sequence[float]], statistic: Statistic, seed: int = 0
) -> Estimate:
    """Returns a statistic of several columns over the same requests, with its interval.

    The interval consists of bootstrap percentiles at the confidence level LEVEL. With
    fewer than two requests, there is no interval. Raises ValueError if the columns have
    different numbers of requests.
    """
    if len({len(column) for column in columns}) != 1:
        raise ValueError(
            f"every column must have the same requests, but they have {[len(c) for c in columns]}"
        )
    values = np.array(columns, np.float64)
    value = float(statistic(values))
    n_requests = values.shape[1]
    if n_requests < 2:
        return Estimate.plain(value)
    drawn = np.random.default_rng(seed).integers(n_requests, size=(N_DRAWS, n_requests))
    low, high = np.quantile(
        statistic(values[:, drawn]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    ).tolist()
    return Estimate(value, low, high)


def median_ratio(columns: Columns) -> Columns:
    """Returns the median over requests of the first column divided by the second
    column. With more than two columns, returns the mean of these medians over the pairs
    of columns: the first two, the next two, and so on."""
    return np.asarray(np.median(columns[0::2] / columns[1::2], axis=-1).mean(axis=0))


def ratio_of_means(columns: Columns) -> Columns:
    """Returns the mean of the first column divided by the mean of the second."""
    first, second = columns.mean(axis=-1)
    return np.asarray(first / second)


def difference_of_means(columns: Columns) -> Columns:
    """Returns the mean of the first column minus the mean of the second."""
    first, second = columns.mean(axis=-1)
    return np.asarray(first - second)
