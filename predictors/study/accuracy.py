"""Counts right and wrong predictions per distance and target layer, and computes each
paper's figures from them.

A token used the experts R (|R| = n_expert_used) in MoE layer i. The prediction was made
k MoE layers earlier, or in the first MoE layer if i < k (ProMoE, section 4, footnote
1). The distance is therefore min(k, i). Definitions:
- ACCURACY_i(k) (ProMoE, section 4): the share of the n_expert_used most probable experts that are in R.
- top-k hit and at-least-one (DuoServe-MoE, table 3): all experts in R were predicted; at least one was.
- precision and recall of a prefetcher that requests the n most probable experts.
- FETCHRATE_i(k), which predictors/study/fetching.py computes, and GOODPRED_i(k) = ACCURACY_i(k) x FETCHRATE_i(k). An
expert with probability 0 is not predicted: its rank counts as wrong in ACCURACY and as
not requested in precision. Predictions that were due but not made are left out of these
figures; `coverage` is the share of due predictions made. Figures over all layers leave
out the first MoE layer, because no layer precedes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Bools, Int64s

# Used instead of an expert id: no prediction was made; no prediction was due.
NO_PREDICTION, NOT_DUE = -1, -2
# Number of extra items at the end of an array indexed by expert id, for NO_PREDICTION
# and NOT_DUE.
PADDING = 2
WRONG, RIGHT, ABSENT, N_KINDS = 2, 4, 1, 6

Ids = Int64s
Mask = Bools


@dataclass(frozen=True)
class Figures:
    """Figures of one predictor at one distance, computed over one layer or several
    layers together.

    A figure is None if its denominator is 0, for example because no prediction was
    made. Item n - 1 of a tuple is for a prefetcher that requests the n most probable
    experts, where n is at most 2 x n_expert_used.
    """

    due: int  # number of predictions that were due
    coverage: float  # share of the due predictions that were made
    accuracy: float | None
    top_k_hit: float | None
    at_least_one: float | None
    precision: tuple[float | None, ...]
    recall: tuple[float | None, ...]
    # Number of fetched experts, divided by the number of fetched experts that the token
    # used. Only experts that an LRU cache lacks are fetched.
    moved_per_useful: tuple[float | None, ...]


@dataclass(frozen=True)
class PredictorScore:
    """A predictor's figures."""

    name: str
    means: dict[int, Figures]  # {distance: figures over all layers but the first}
    layers: dict[int, dict[int, Figures]]  # {distance: {il: figures}}
    # The control fresh-gate: the router with its own input, at distance 0. Its accuracy
    # must be 1. None: not measured.
    fresh: Figures | None = None
    # ExpertFlow's measure: {distance: accuracy}; None: not computed
    batch_accuracy: dict[int, float | None] | None = None
    # {distance: FETCHRATE}; empty if no link is given
    fetch_rates: dict[int, float | None] = field(default_factory=dict)

    def good_pred(self, distance: int) -> float | None:
        """Returns GOODPRED (FETCHRATE x ACCURACY) at a distance; None if either factor
        is unknown."""
        rate = self.fetch_rates.get(distance)
        accuracy = self.means[distance].accuracy
        return None if rate is None or accuracy is None else rate * accuracy


class LayerLru:
    """An LRU cache that holds a fixed share of each layer's experts, but at least
    n_expert_used of them.

    absent (n_row, n_expert): True if the expert is not in the cache.
    """

    def __init__(self, shape: MoeShape, share: float) -> None:
        self.n_kept = min(
            shape.n_expert, max(shape.n_expert_used, round(share * shape.n_expert))
        )
        self._last: Ids = np.full((shape.n_moe_layer, shape.n_expert), -1, np.int64)
        self._clock = 0
        self.absent: Mask = np.ones((shape.n_moe_layer, shape.n_expert), np.bool_)

    def use(self, row: int, ids: Ids) -> None:
        """Records that a layer used the experts `ids` (n,), in this order."""
        last = self._last[row]
        last[ids] = np.arange(self._clock, self._clock + len(ids))
        self._clock += len(ids)
        oldest = np.partition(last, -self.n_kept)[-self.n_kept]
        np.less(last, max(int(oldest), 0), out=self.absent[row])


class Tally:
    """Counts of one predictor by distance and MoE layer.

    tokens (n_distance, n_row, 4): sums over the predictions that were made. The four
    columns count used experts, correctly predicted experts, predictions in which all
    experts were right, and predictions in which at least one was.

    ranks (n_distance, n_row, n_rank, 6): how often the prediction at a rank was of each
    kind. The kinds are NOT_DUE, NO_PREDICTION, and an expert (WRONG or RIGHT, plus
    ABSENT when the LRU cache lacked the expert).
    """

    def __init__(self, shape: MoeShape, distances: tuple[int, ...]) -> None:
        self.shape = shape
        self.distances = distances
        self.n_rank = min(shape.n_expert, 2 * shape.n_expert_used)
        n_row = shape.n_moe_layer
        self.tokens: Ids = np.zeros((len(distances), n_row, 4), np.int64)
        self.ranks: Ids = np.zeros(
            (len(distances), n_row, self.n_rank, N_KINDS), np.int64
        )
        self._flat_ranks = self.ranks.reshape(-1)
        cells = np.arange(self._flat_ranks.size).reshape(self.ranks.shape)[:, :, :, 0]
        self._cells: Ids = np.ascontiguousarray(cells.transpose(1, 0, 2))
        self._kind: Int64s = np.zeros(shape.n_expert + PADDING, np.int64)
        self._kind[NO_PREDICTION] = 1
        self._increments: dict[int, Ids] = {}

    def add(self, row: int, predicted: Ids, used: Ids, absent: Mask) -> None:
        """Counts predictions (n_distance, n_rank), the most probable first, of one
        token's experts in one layer.

        used (n_used,): the experts that the token used. absent (n_expert,): True where
        the LRU cache lacks the expert.
        """
        kind = self._kind
        n_used = len(used)
        experts = kind[:-PADDING]
        experts.fill(WRONG)
        experts[used] = RIGHT
        experts += absent
        kinds = kind[predicted]
        self._flat_ranks[self._cells[row] + kinds] += 1
        n_right = (kinds[:, :n_used] >= RIGHT).sum(axis=1)
        n_right[kinds[:, 0] < WRONG] = -1
        self.tokens[:, row] += self._increments_of(n_used)[n_right]

    def _increments_of(self, n_used: int) -> Ids:
        """Returns a table of increments for `tokens`. Row n is for n right experts (n
        from 0 to n_used).

        The last row is for a token without a prediction.
        """
        if n_used not in self._increments:
            rows = [
                (n_used, n_right, n_right == n_used, n_right > 0)
                for n_right in range(n_used + 1)
            ]
            self._increments[n_used] = np.array([*rows, (0, 0, 0, 0)], np.int64)
        return self._increments[n_used]

    def mean(self, column: int) -> Figures:
        """Returns the figures at one distance, computed over all MoE layers except the
        first. `column` is the position in `distances`.

        The first layer is included only at distance 0, or if the model has no other MoE
        layer.
        """
        first = 1 if self.distances[column] > 0 and self.shape.n_moe_layer > 1 else 0
        return self.figures(column, np.arange(first, self.shape.n_moe_layer))

    def by_layer(self, column: int) -> dict[int, Figures]:
        """Returns {il: figures} at one distance. `column` is the position in
        `distances`."""
        return {
            il: self.figures(column, np.array([row]))
            for row, il in enumerate(self.shape.layers)
        }

    def figures(self, column: int, rows: Ids) -> Figures:
        """Returns the figures at one distance, computed over the MoE layers `rows`
        together.

        `column` is the position in `distances`.
        """
        used, right, all_right, any_right = self.tokens[column, rows].T
        ranks = self.ranks[column, rows].sum(axis=0)
        due = int(ranks[0, 1:].sum())
        predicted = int(ranks[0, WRONG:].sum())
        n_requested = np.cumsum(ranks[:, WRONG:].sum(axis=1))
        n_right = np.cumsum(ranks[:, RIGHT:].sum(axis=1))
        n_moved = np.cumsum(ranks[:, WRONG + ABSENT] + ranks[:, RIGHT + ABSENT])
        n_useful = np.cumsum(ranks[:, RIGHT + ABSENT])
        n_used = int(used.sum())
        return Figures(
            due=due,
            coverage=predicted / due if due else 0.0,
            accuracy=ratio(right.sum(), n_used),
            top_k_hit=ratio(all_right.sum(), predicted),
            at_least_one=ratio(any_right.sum(), predicted),
            precision=ratios(n_right, n_requested),
            recall=ratios(n_right, np.full_like(n_right, n_used)),
            moved_per_useful=ratios(n_moved, n_useful),
        )


def ratio(part: float, whole: float) -> float | None:
    """Returns part / whole; None when whole is 0."""
    return float(part / whole) if whole else None


def ratios(parts: Ids, wholes: Ids) -> tuple[float | None, ...]:
    """Returns the `ratio` of each part to the whole at the same position."""
    return tuple(
        ratio(part, whole)
        for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True)
    )
