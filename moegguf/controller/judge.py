"""Judges a predictor without acting on it: remembers what it said of later layers and compares when they come.

Live (`LiveJudge`, the measure-only mode) and over a trace (score.py) it is the same accounting. What is judged: decode
passes of one token. Predictors see everything else too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moegguf.controller.accuracy import NO_ANSWER, NOT_DUE, Ids, LayerLru, LinkModel, PredictorScore, Tally
from moegguf.controller.predictors.base import Predictor
from moegguf.native.events import Announcement, Float32s, Phase, RoutingEvent

DISTANCES = (1, 2, 4, 8)
BEFORE = -1  # the position before a pass's first MoE layer

T = TypeVar("T")


class _Plan(NamedTuple):
    """What to ask at a point of a pass: (il, distance) line by line, and pending[rows, columns] = answers[lines]."""

    questions: list[tuple[int, int]]
    rows: Ids
    columns: Ids
    lines: Ids


class Judge:
    """Figures of one predictor at several distances. Memory does not grow with what it hears.

    control: a predictor that is the router itself, asked at distance 0 about the gate just seen. It must be right every
    time: if not, what is judged is not what happened. A predictor with a reach of 0 is its own control.
    drive: it hands announcements and gates on to the predictor; False when somebody else does so just before calling.
    lru_share: the cache (a share of each layer's experts) that missing_moved_per_useful is reckoned with.
    """

    def __init__(
        self,
        predictor: Predictor,
        distances: Sequence[int] = DISTANCES,
        *,
        control: Predictor | None = None,
        lru_share: float = 0.25,
        drive: bool = True,
    ) -> None:
        self.predictor = predictor
        self.control = predictor if control is None and predictor.reach == 0 else control
        self._driven = [predictor] if drive else []
        if control is not None and control is not predictor:
            self._driven.append(control)
        self.distances = tuple(sorted({int(distance) for distance in distances if distance > 0}))
        shape = predictor.shape
        self.shape = shape
        self.tally, self.fresh = Tally(shape, self.distances), Tally(shape, (0,))
        self.failure: str | None = None
        self._lru = LayerLru(shape, lru_share)
        self._plan = self._plans()
        self._pending: Ids = np.full((len(shape.layers), len(self.distances), self.tally.n_rank), NOT_DUE)
        most = max(len(plan.questions) for plan in self._plan.values())
        self._likelihoods: Float32s = np.zeros((most, shape.n_expert), np.float32)
        self._lines: Ids = np.arange(most)[:, np.newaxis]
        self._pass: tuple[int, int] | None = None
        self._announced = self._single = False
        self._predictions = self._predict_ns = 0

    def announce(self, announcement: Announcement) -> None:
        """Tokens are about to be evaluated."""
        for predictor in self._driven:
            predictor.announce(announcement)
        self._pending.fill(NOT_DUE)
        self._announced = True
        if announcement.phase == Phase.DECODE and len(announcement.tokens) == 1:
            self._ask(BEFORE)

    def observe(self, event: RoutingEvent) -> None:
        """A layer's routing has become known: judges what was said of it, then asks about the layers behind it."""
        row = self.shape.row_of.get(event.il)
        if row is None:
            return
        self._begin_pass(event)
        used = event.expert_ids.ravel().astype(np.int64)
        valid = used.view(np.uint64) < self.shape.n_expert
        if not valid.all():
            used = used[valid]
        judged = self._single and len(used) > 0
        if judged:
            self.tally.add(row, self._pending[row], used, self._lru.away[row])
            self.judged(event, row, self._pending[row], used)
        if len(used):
            self._lru.use(row, used)
        for predictor in self._driven:
            predictor.observe(event)
        if judged:
            self._judge_control(row, used)
            self._ask(row)

    def table(self, link: LinkModel | None = None) -> PredictorScore:
        """The figures so far; FETCHRATE and GOODPRED only with a link."""
        columns = {distance: column for column, distance in enumerate(self.distances)}
        return PredictorScore(
            name=self.predictor.name,
            means={distance: self.tally.mean(column, link) for distance, column in columns.items()},
            layers={distance: self.tally.by_layer(column, link) for distance, column in columns.items()},
            fresh=self.fresh.mean(0, None) if self.fresh.tokens.any() else None,
            predict_us=self._predict_ns / 1e3 / self._predictions if self._predictions else None,
            failure=self.failure,
        )

    def judged(self, event: RoutingEvent, row: int, predicted: Ids, used: Ids) -> None:
        """Called with each comparison, the arguments are `Tally.add`'s; for those who count more than it does."""

    def _plans(self) -> dict[int, _Plan]:
        """What to ask after each row of the MoE layers, and before the first."""
        n_row = len(self.shape.layers)
        targets: dict[int, dict[int, list[int]]] = {row: {} for row in range(BEFORE, n_row)}
        for column, distance in enumerate(self.distances):
            targets[BEFORE].setdefault(0, []).append(column)
            for target in range(1, n_row):
                targets[max(0, target - distance)].setdefault(target, []).append(column)
        return {row: self._plan_after(row, columns) for row, columns in targets.items()}

    def _plan_after(self, row: int, targets: dict[int, list[int]]) -> _Plan:
        """The plan of one row: `targets` has the columns that each row behind it is asked about for."""
        cells = [(target, column, line) for line, target in enumerate(targets) for column in targets[target]]
        rows, columns, lines = np.array(cells, np.int64).reshape(-1, 3).T
        return _Plan([(self.shape.layers[target], target - row) for target in targets], rows, columns, lines)

    def _begin_pass(self, event: RoutingEvent) -> None:
        if (event.sequence, event.pass_) == self._pass:
            return
        self._pass = event.sequence, event.pass_
        if not self._announced:
            self._pending.fill(NOT_DUE)
        self._announced = False
        self._single = event.phase == Phase.DECODE and len(event.expert_ids) == 1

    def _judge_control(self, row: int, used: Ids) -> None:
        if self.control is None:
            return
        probabilities = self._likelihoods[:1]
        self._predict(self.control, self.shape.layers[row], 0, probabilities[0])
        ranks = self._ranked(probabilities)
        if ranks[0, 0] != NO_ANSWER:
            self.fresh.add(row, ranks, used, self._lru.away[row])

    def _ask(self, row: int) -> None:
        """Asks all that is to be asked after a row, and remembers it."""
        plan = self._plan[row]
        if not plan.questions:
            return
        probabilities = self._likelihoods[: len(plan.questions)]
        for line, (il, distance) in zip(probabilities, plan.questions, strict=True):
            begin = time.perf_counter_ns()
            if self._predict(self.predictor, il, distance, line):
                self._predict_ns += time.perf_counter_ns() - begin
                self._predictions += 1
        self._pending[plan.rows, plan.columns] = self._ranked(probabilities)[plan.lines]

    def _predict(self, predictor: Predictor, il: int, distance: int, line: Float32s) -> bool:
        """Puts the probabilities into `line` (n_expert,); zeros and False when there are none that make sense."""
        probabilities = predictor.predict(il, distance)
        if probabilities is None or probabilities.shape != line.shape or not math.isfinite(probabilities.sum()):
            line.fill(0)
            return False
        line[:] = probabilities
        return True

    def _ranked(self, probabilities: Float32s) -> Ids:
        """The experts (n, n_rank) of (n, n_expert) probabilities, the likeliest first; NO_ANSWER where it is 0."""
        ranks = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.tally.n_rank]
        ranks[probabilities[self._lines[: len(ranks)], ranks] <= 0] = NO_ANSWER
        return ranks


class LiveJudge(Judge):
    """A judge that listens to a running model: a predictor that raises ends its own judgement and nothing else.

    `failure` then says why; the figures until then remain. They may be asked for from any thread, between gates.
    """

    def __init__(self, predictor: Predictor, distances: Sequence[int] = DISTANCES, **options: Any) -> None:
        super().__init__(predictor, distances, **options)
        self._lock = Lock()

    def announce(self, announcement: Announcement) -> None:
        """As `Judge.announce`. Never raises."""
        with self._lock:
            self._try(super().announce, announcement)

    def observe(self, event: RoutingEvent) -> None:
        """As `Judge.observe`. Never raises."""
        with self._lock:
            self._try(super().observe, event)

    def table(self, link: LinkModel | None = None) -> PredictorScore:
        """As `Judge.table`."""
        with self._lock:
            return super().table(link)

    def _try(self, hear: Callable[[T], None], what: T) -> None:
        if self.failure is None:
            try:
                hear(what)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
