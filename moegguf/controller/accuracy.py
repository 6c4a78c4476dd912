"""Predictions counted right and wrong, per distance and target layer, and the figures that each paper makes of them.

Definitions, for a token whose layer i used the experts R (|R| = n_expert_used), predicted k MoE layers earlier; where
i < k from the first MoE layer (ProMoE, section 4, footnote 1), so the distance is min(k, i):
- ACCURACY_i(k) (ProMoE, section 4): exactly n_expert_used experts are predicted; the share of them that is in R.
- top-k hit and at-least-one (DuoServe-MoE, table 3): all of R was predicted; some of R was.
- precision and recall of a prefetcher that asks for the n likeliest.
- FETCHRATE_i(k) and GOODPRED_i(k) = ACCURACY_i(k) x FETCHRATE_i(k): see `LinkModel.fetch_rate`.
An expert with probability 0 is not predicted: its place counts as wrong in ACCURACY and is not asked for in precision.
Figures count answers only; how often there was one is `coverage`. Nothing in a pass precedes its first MoE layer:
means over layers leave it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape

NO_ANSWER, NOT_DUE = -1, -2  # in place of expert ids
PADDING = 2  # columns that these two fall into when used as an index
WRONG, RIGHT, AWAY, N_KINDS = 2, 4, 1, 6

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LinkModel:
    """A modelled link and computer: bytes per second, latency of a transfer, compute time of one MoE layer for a token.

    The latency counts once for all that is fetched on one prediction.
    """

    bytes_per_s: float
    latency_us: float = 0.0
    layer_compute_us: float = 1000.0

    def fetch_rate(self, distance: int, n_experts: int, expert_bytes: int) -> float:
        """FETCHRATE (ProMoE, section 4): the share of n_experts predicted `distance` layers ahead that arrives in time.

        ProMoE defines it in words only. Here: lead time = distance x layer_compute_us; whole experts that arrive in
        it = floor((lead time - latency_us) / (expert_bytes / bytes_per_s)); their share of n_experts, at most 1. The
        link is taken as idle and none of the experts as resident: a busy link fetches less, a warm cache needs less.
        """
        expert_us = expert_bytes / self.bytes_per_s * 1e6
        whole = math.floor((distance * self.layer_compute_us - self.latency_us) / expert_us + 1e-9)
        return min(max(whole, 0), n_experts) / n_experts


@dataclass(frozen=True)
class Figures:
    """One predictor at one distance, for one layer or as the mean over layers; None where nothing was answered.

    asked: predictions wanted. Tuples are by n - 1, for a prefetcher that asks for the n likeliest, n up to
    2 x n_expert_used. moved_per_useful: bytes moved for one useful byte when everything asked for is fetched
    (1 / precision), missing_moved_per_useful: when only those are fetched that a least-recently-used cache lacks.
    """

    asked: int
    coverage: float
    accuracy: float | None
    top_k_hit: float | None
    at_least_one: float | None
    fetch_rate: float | None
    good_pred: float | None
    precision: tuple[float | None, ...]
    recall: tuple[float | None, ...]
    moved_per_useful: tuple[float | None, ...]
    missing_moved_per_useful: tuple[float | None, ...]


@dataclass(frozen=True)
class PredictorScore:
    """A predictor's figures.

    means: {distance: mean over layers}. layers: {distance: {il: figures}}. fresh: the fresh-gate control (distance 0:
    the gate's own input through the gate), None without one; its accuracy must be 1. batch_accuracy:
    ExpertFlow's, {distance: ...}, only from `score`. predict_us: mean time of one prediction. failure: what ended it.
    """

    name: str
    means: dict[int, Figures]
    layers: dict[int, dict[int, Figures]]
    fresh: Figures | None = None
    batch_accuracy: dict[int, float | None] | None = None
    predict_us: float | None = None
    failure: str | None = None


class LayerLru:
    """What a least-recently-used cache holds that keeps a share of each layer's experts, at least n_expert_used."""

    def __init__(self, shape: MoeShape, share: float) -> None:
        self.n_kept = min(shape.n_expert, max(shape.n_expert_used, round(share * shape.n_expert)))
        self._last: Ids = np.full((len(shape.layers), shape.n_expert), -1, np.int64)
        self._clock = 0
        self.away: Mask = np.ones((len(shape.layers), shape.n_expert), np.bool_)

    def use(self, row: int, ids: Ids) -> None:
        """The experts `ids` (n,) of a layer were used, in this order."""
        last = self._last[row]
        last[ids] = np.arange(self._clock, self._clock + len(ids))
        self._clock += len(ids)
        oldest = np.partition(last, -self.n_kept)[-self.n_kept]
        np.less(last, max(int(oldest), 0), out=self.away[row])


class Tally:
    """Counts of one predictor by distance and MoE layer.

    tokens (n_distance, n_row, 4): experts wanted and experts right where there was an answer, times all were right,
    times any was. ranks (n_distance, n_row, n_rank, 6): how often the prediction at a rank was NOT_DUE, NO_ANSWER, or
    an expert (WRONG or RIGHT, plus AWAY when a cache lacked it).
    """

    def __init__(self, shape: MoeShape, distances: tuple[int, ...]) -> None:
        self.shape, self.distances = shape, distances
        self.n_rank = min(shape.n_expert, 2 * shape.n_expert_used)
        n_row = len(shape.layers)
        self.tokens: Ids = np.zeros((len(distances), n_row, 4), np.int64)
        self.ranks: Ids = np.zeros((len(distances), n_row, self.n_rank, N_KINDS), np.int64)
        self._flat_ranks = self.ranks.reshape(-1)
        cells = np.arange(self._flat_ranks.size).reshape(self.ranks.shape)[:, :, :, 0]
        self._cells: Ids = np.ascontiguousarray(cells.transpose(1, 0, 2))
        self._kind: npt.NDArray[np.int64] = np.zeros(shape.n_expert + PADDING, np.int64)
        self._kind[NO_ANSWER] = 1
        self._outcomes: dict[int, Ids] = {}

    def add(self, row: int, predicted: Ids, used: Ids, away: Mask) -> None:
        """Judges predictions (n_distance, n_rank), the likeliest first, of one token's experts in one layer.

        used (n_used,) are those experts; away (n_expert,) those that a cache lacks.
        """
        kind, n_used = self._kind, len(used)
        experts = kind[:-PADDING]
        experts.fill(WRONG)
        experts[used] = RIGHT
        experts += away
        kinds = kind[predicted]
        self._flat_ranks[self._cells[row] + kinds] += 1
        n_right = (kinds[:, :n_used] >= RIGHT).sum(axis=1)
        n_right[kinds[:, 0] < WRONG] = -1
        self.tokens[:, row] += self._outcome(n_used)[n_right]

    def _outcome(self, n_used: int) -> Ids:
        """What `tokens` gains for 0, 1, ..., n_used right experts; last without an answer."""
        if n_used not in self._outcomes:
            gains = [(n_used, n_right, n_right == n_used, n_right > 0) for n_right in range(n_used + 1)]
            self._outcomes[n_used] = np.array([*gains, (0, 0, 0, 0)], np.int64)
        return self._outcomes[n_used]

    def mean(self, column: int, link: LinkModel | None) -> Figures:
        """Figures of one distance over all layers but the first."""
        first = 1 if self.distances[column] > 0 and len(self.shape.layers) > 1 else 0
        return self.figures(column, np.arange(first, len(self.shape.layers)), link)

    def by_layer(self, column: int, link: LinkModel | None) -> dict[int, Figures]:
        """{il: figures} of one distance."""
        return {il: self.figures(column, np.array([row]), link) for row, il in enumerate(self.shape.layers)}

    def figures(self, column: int, rows: Ids, link: LinkModel | None) -> Figures:
        """Figures of one distance (by its position in `distances`), pooled over these MoE layers."""
        wanted, right, all_right, any_right = self.tokens[column, rows].T
        ranks = self.ranks[column, rows].sum(axis=0)
        asked, answered = int(ranks[0, 1:].sum()), int(ranks[0, WRONG:].sum())
        fetched = self._fetch_rates(self.distances[column], rows, link)
        n_asked, n_right = np.cumsum(ranks[:, WRONG:].sum(axis=1)), np.cumsum(ranks[:, RIGHT:].sum(axis=1))
        n_moved = np.cumsum(ranks[:, WRONG + AWAY] + ranks[:, RIGHT + AWAY])
        n_useful = np.cumsum(ranks[:, RIGHT + AWAY])
        n_wanted = int(wanted.sum())
        return Figures(
            asked=asked,
            coverage=answered / asked if asked else 0.0,
            accuracy=ratio(right.sum(), n_wanted),
            top_k_hit=ratio(all_right.sum(), answered),
            at_least_one=ratio(any_right.sum(), answered),
            fetch_rate=None if fetched is None else ratio(wanted @ fetched, n_wanted),
            good_pred=None if fetched is None else ratio(right @ fetched, n_wanted),
            precision=ratios(n_right, n_asked),
            recall=ratios(n_right, np.full_like(n_right, n_wanted)),
            moved_per_useful=ratios(n_asked, n_right),
            missing_moved_per_useful=ratios(n_moved, n_useful),
        )

    def _fetch_rates(self, distance: int, rows: Ids, link: LinkModel | None) -> npt.NDArray[np.float64] | None:
        """FETCHRATE for each row. The first layer is predicted once the tokens are known, one layer ahead."""
        if link is None:
            return None
        shape = self.shape
        ahead = [min(distance, max(int(row), 1)) for row in rows]
        return np.array([link.fetch_rate(lead, shape.n_expert_used, shape.expert_bytes) for lead in ahead])


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None without a whole."""
    return float(part / whole) if whole else None


def ratios(parts: Ids, wholes: Ids) -> tuple[float | None, ...]:
    """`ratio`, pair by pair."""
    return tuple(ratio(part, whole) for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True))
