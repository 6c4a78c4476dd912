"""Measures a predictor: stores its predictions and compares them with the routing that
follows.

Only decode passes of one token are measured, but predictors receive the events of all
passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.native.events import Announcement, Float32s, Phase, RoutingEvent
from moegguf.trace.simulate import SimOptions
from predictors.study.accuracy import (
    NO_PREDICTION,
    NOT_DUE,
    Ids,
    LayerLru,
    PredictorScore,
    Tally,
)
from predictors.study.fetching import FetchCount

DISTANCES = (1, 2, 4, 8)
# `moved_per_useful` and FETCHRATE assume an LRU cache with this share of each layer's
# experts.
LRU_SHARE = 0.25
BEFORE = -1  # stands for the row before the first MoE layer of a pass


class _Plan(NamedTuple):
    """The predictions to make after the routing of one layer.

    The results are stored with pending[rows, columns] = predictions[lines].
    """

    # Layer and distance of each line of predictions: (il, distance).
    targets: list[tuple[int, int]]
    rows: Ids
    columns: Ids
    lines: Ids


class Judge:
    """Measures one predictor at several distances. The object's size does not grow with
    the number of events.

    A predictor with a reach of 0, such as the router itself, is also measured at
    distance 0, for the event just observed. If the router's accuracy is not 1, the
    events do not belong to the model.

    link: the link for FETCHRATE; None: FETCHRATE is not computed.
    """

    def __init__(
        self,
        predictor: Predictor,
        distances: Sequence[int] = DISTANCES,
        *,
        link: SimOptions | None = None,
    ) -> None:
        self.predictor = predictor
        self.distances = tuple(
            sorted({int(distance) for distance in distances if distance > 0})
        )
        shape = predictor.shape
        self.shape = shape
        self.tally = Tally(shape, self.distances)
        self.fresh = Tally(shape, (0,))
        self._lru = LayerLru(shape, LRU_SHARE)
        self._fetches = (
            [] if link is None else [FetchCount(shape, link) for _ in self.distances]
        )
        self._plans = self._make_plans()
        self._pending: Ids = np.full(
            (shape.n_moe_layer, len(self.distances), self.tally.n_rank), NOT_DUE
        )
        most = max(len(plan.targets) for plan in self._plans.values())
        self._probabilities: Float32s = np.zeros((most, shape.n_expert), np.float32)
        self._lines: Ids = np.arange(most)[:, np.newaxis]
        self._pass: tuple[int, int] | None = None
        self._announced = self._single = False

    def announce(self, announcement: Announcement) -> None:
        """Announces the next pass's tokens to the predictor. Predicts from them if the
        pass decodes one token."""
        self.predictor.announce(announcement)
        self._pending.fill(NOT_DUE)
        for fetches in self._fetches:
            fetches.begin_pass()
        self._announced = True
        if announcement.phase == Phase.DECODE and len(announcement.tokens) == 1:
            self._predict_from(BEFORE)

    def observe(self, event: RoutingEvent) -> None:
        """Sends the event to the predictor.

        In a measured pass, compares the layer's routing with the predictions for it,
        and then predicts later layers.
        """
        row = self.shape.row_of.get(event.il)
        if row is None:
            return
        self._begin_pass(event)
        used = event.expert_ids.ravel().astype(np.int64)
        valid = used.view(np.uint64) < self.shape.n_expert
        if not valid.all():
            used = used[valid]
        measured = self._single and len(used) > 0
        if measured:
            for fetches in self._fetches:
                fetches.route(row)
            self.tally.add(row, self._pending[row], used, self._lru.absent[row])
            self.on_comparison(event, row, self._pending[row], used)
        if len(used):
            self._lru.use(row, used)
        self.predictor.observe(event)
        if measured:
            if self.predictor.reach == 0:
                self._measure_control(row, used)
            self._predict_from(row)
            for fetches in self._fetches:
                fetches.compute()

    def table(self) -> PredictorScore:
        """Returns the figures so far."""
        columns = {distance: column for column, distance in enumerate(self.distances)}
        return PredictorScore(
            name=self.predictor.name,
            means={
                distance: self.tally.mean(column)
                for distance, column in columns.items()
            },
            layers={
                distance: self.tally.by_layer(column)
                for distance, column in columns.items()
            },
            fresh=self.fresh.mean(0) if self.fresh.tokens.any() else None,
            fetch_rates={
                distance: of.rate
                for distance, of in zip(self.distances, self._fetches, strict=False)
            },
        )

    def on_comparison(
        self, event: RoutingEvent, row: int, predicted: Ids, used: Ids
    ) -> None:
        """Does nothing. `observe` calls this method each time it compares predicted and
        used experts.

        A subclass may override it.
        """

    def _make_plans(self) -> dict[int, _Plan]:
        """Returns {row of a MoE layer: predictions to make after its routing}.

        The key BEFORE stands for the predictions to make before the first layer.
        """
        n_row = self.shape.n_moe_layer
        targets: dict[int, dict[int, list[int]]] = {
            row: {} for row in range(BEFORE, n_row)
        }
        for column, distance in enumerate(self.distances):
            targets[BEFORE].setdefault(0, []).append(column)
            for target in range(1, n_row):
                targets[max(0, target - distance)].setdefault(target, []).append(column)
        return {row: self._plan_after(row, columns) for row, columns in targets.items()}

    def _plan_after(self, row: int, targets: dict[int, list[int]]) -> _Plan:
        """Returns the plan of one row. targets: {later row to predict: its columns
        (positions in `distances`)}."""
        cells = [
            (target, column, line)
            for line, target in enumerate(targets)
            for column in targets[target]
        ]
        rows, columns, lines = np.array(cells, np.int64).reshape(-1, 3).T
        return _Plan(
            [(self.shape.layers[target], target - row) for target in targets],
            rows,
            columns,
            lines,
        )

    def _begin_pass(self, event: RoutingEvent) -> None:
        if (event.sequence, event.pass_) == self._pass:
            return
        self._pass = event.sequence, event.pass_
        if not self._announced:
            self._pending.fill(NOT_DUE)
        self._announced = False
        self._single = event.phase == Phase.DECODE and len(event.expert_ids) == 1

    def _measure_control(self, row: int, used: Ids) -> None:
        probabilities = self._probabilities[:1]
        self._predict(self.shape.layers[row], 0, probabilities[0])
        ranks = self._ranked(probabilities)
        if ranks[0, 0] != NO_PREDICTION:
            self.fresh.add(row, ranks, used, self._lru.absent[row])

    def _predict_from(self, row: int) -> None:
        """Makes and stores the predictions that are due after a row, and requests their
        experts on the link, if any."""
        plan = self._plans[row]
        if not plan.targets:
            return
        probabilities = self._probabilities[: len(plan.targets)]
        for line, (il, distance) in zip(probabilities, plan.targets, strict=True):
            self._predict(il, distance, line)
        self._pending[plan.rows, plan.columns] = self._ranked(probabilities)[plan.lines]
        for target, column in (
            zip(plan.rows.tolist(), plan.columns.tolist(), strict=True)
            if self._fetches
            else ()
        ):
            named = self._pending[target, column, : self.shape.n_expert_used]
            named = named[named >= 0]
            self._fetches[column].predict(
                target, named[self._lru.absent[target, named]].tolist()
            )

    def _predict(self, il: int, distance: int, line: Float32s) -> None:
        """Writes the predicted probabilities into `line` (n_expert,), or zeros if there
        is no valid prediction."""
        found = self.predictor.predict(il, distance)
        valid = (
            found is not None
            and found.shape == line.shape
            and math.isfinite(found.sum())
        )
        line[:] = found if valid else 0

    def _ranked(self, probabilities: Float32s) -> Ids:
        """Returns expert ids (n, n_rank), the most probable first. NO_PREDICTION
        replaces experts with probability 0.

        probabilities: (n, n_expert).
        """
        ranks = np.argsort(-probabilities, axis=1, kind="stable")[
            :, : self.tally.n_rank
        ]
        ranks[probabilities[self._lines[: len(ranks)], ranks] <= 0] = NO_PREDICTION
        return ranks
