"""Measures predictors on a recorded trace. Each has a control: a copy of the predictor,
measured on a copy of the trace whose routing was shuffled within each request."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.native.events import Announcement, Bools, RoutingEvent
from moegguf.trace.simulate import SimOptions
from moegguf.trace.trace import Trace
from predictors.study.accuracy import PADDING, Ids, Mask, PredictorScore
from predictors.study.arrange import separated, shuffled
from predictors.study.judge import DISTANCES, Judge


def batch_accuracy(true: Bools, predicted: Bools) -> float:
    """Returns ExpertFlow's batch-level accuracy: the number of experts that were both
    used and predicted, divided by the number that were used or predicted.

    true, predicted: (..., n_layer, n_expert). Each matrix is the OR over the routing
    paths of a batch's tokens. The result is the mean over the leading axes, in [0, 1].
    A matrix without any used or predicted expert counts as 1.

    The formula is missing from the available text, so this is an interpretation. The
    paper's table 1 rules out element-wise agreement: with 8 tokens on 128 experts, an
    empty prediction would reach 93 %, but the table reports 3 to 6 % for the baselines.
    The share of used experts that were predicted is an unlikely interpretation. A
    prediction of all experts would reach 100 %, and the paper's previous-token baseline
    would do worse than chance in 8 of its 9 settings with WMT16. Intersection over
    union counts both errors that the paper names (section 3.2.2): mis-prefetched and
    missed experts.
    """
    either = np.count_nonzero(true | predicted, axis=(-2, -1))
    both = np.count_nonzero(true & predicted, axis=(-2, -1))
    return float(np.mean(np.where(either > 0, both / np.maximum(either, 1), 1.0)))


BATCH_SEQUENCES = 8  # smallest batch size in ExpertFlow's table 1


@dataclass(frozen=True)
class ScoreTable:
    """Figures for several predictors over one trace, each with a control.

    A control is a copy of the predictor, measured on a copy of the trace in which each
    request's decode routing was shuffled. A predictor that has learned only which
    experts a request uses often is no better than its control.
    """

    distances: tuple[int, ...]
    n_expert_used: int
    tokens: int  # number of measured passes, which are the decode passes of one token
    scores: tuple[PredictorScore, ...]
    controls: tuple[PredictorScore, ...]

    def control_of(self, name: str) -> PredictorScore | None:
        """Returns the control for the predictor with this name, or None if it has no
        control."""
        return next(
            (control for control in self.controls if control.name == name), None
        )


def score(
    trace: Trace,
    predictors: Sequence[Predictor],
    distances: Sequence[int] = DISTANCES,
    *,
    link: SimOptions | None = None,
    batch_sequences: int = BATCH_SEQUENCES,
) -> ScoreTable:
    """Runs predictors over the events of the trace and measures them; definitions are
    in `predictors.study.accuracy`.

    For the batch-level accuracy (ExpertFlow, section 5.2), requests are put into
    batches of batch_sequences in order of appearance. At each decode step, the used
    experts of the batch's tokens are joined, and so are the predicted experts.
    `batch_accuracy` compares the two sets if all tokens have predictions. A pass with
    several requests is measured as one pass per request. Exceptions raised by a
    predictor are not caught.
    """
    trace = separated(trace)
    controls = copy.deepcopy(list(predictors))

    def tables(of: Trace, measured: Sequence[Predictor]) -> tuple[PredictorScore, ...]:
        judges = [
            _BatchJudge(predictor, distances, batch_sequences, link)
            for predictor in measured
        ]
        _replay(of, judges)
        return _tables(judges)

    return ScoreTable(
        distances=tuple(sorted({distance for distance in distances if distance > 0})),
        n_expert_used=trace.shape.n_expert_used,
        tokens=int(
            np.count_nonzero((trace.pass_phase == 1) & (np.diff(trace.pass_start) == 1))
        ),
        scores=tables(trace, predictors),
        controls=tables(shuffled(trace, 0), controls),
    )


def _replay(trace: Trace, judges: Sequence[Judge]) -> None:
    for event in trace.events():
        for judge in judges:
            if isinstance(event, Announcement):
                judge.announce(event)
            else:
                judge.observe(event)


def _tables(judges: Sequence[_BatchJudge]) -> tuple[PredictorScore, ...]:
    """Returns one score for each judge. Appends a number to a name that occurred
    before."""
    seen: Counter[str] = Counter()
    tables = []
    for judge in judges:
        table = judge.table()
        seen[table.name] += 1
        if seen[table.name] > 1:
            table = replace(table, name=f"{table.name} {seen[table.name]}")
        tables.append(table)
    return tuple(tables)


class _Step:
    """The used and the predicted experts of a whole batch at one decode step, for all
    MoE layers except the first."""

    def __init__(self, n_distances: int, n_rows: int, n_columns: int) -> None:
        self.true: Mask = np.zeros((n_rows, n_columns), np.bool_)
        self.predicted: Mask = np.zeros((n_distances, n_rows, n_columns), np.bool_)
        self.n_predicted: Ids = np.zeros(n_distances, np.int64)


class _BatchJudge(Judge):
    """A judge that also computes ExpertFlow's batch-level accuracy. Holds the routing
    paths of only one batch of requests at a time."""

    def __init__(
        self,
        predictor: Predictor,
        distances: Sequence[int],
        batch_sequences: int,
        link: SimOptions | None,
    ) -> None:
        super().__init__(predictor, distances, link=link)
        self._batch_sequences = batch_sequences
        self._batch: set[int] = set()
        self._closed: set[int] = set()
        self._steps: dict[int, _Step] = {}
        self._step_of: Counter[int] = Counter()
        self._last_pass = -1
        self._sums = np.zeros(len(self.distances))
        self._n_steps = np.zeros(len(self.distances), np.int64)

    def table(self) -> PredictorScore:
        """Returns the score of `Judge` with `batch_accuracy` added."""
        self._close_batch()
        sums = zip(
            self.distances, self._sums.tolist(), self._n_steps.tolist(), strict=True
        )
        accuracy = {
            distance: total / steps if steps else None
            for distance, total, steps in sums
        }
        return replace(super().table(), batch_accuracy=accuracy)

    def on_comparison(
        self, event: RoutingEvent, row: int, predicted: Ids, used: Ids
    ) -> None:
        """Adds the experts used and predicted for a layer to the current decode step of
        the request's batch. The first MoE layer is left out."""
        if event.pass_ != self._last_pass:
            self._last_pass = event.pass_
            self._step_of[event.sequence] += 1
            self._add_to_batch(event.sequence)
        if row == 0 or event.sequence in self._closed:
            return
        number = self._step_of[event.sequence]
        n_rows = self.shape.n_moe_layer - 1
        step = self._steps.get(number)
        if step is None:
            step = self._steps[number] = _Step(
                len(self.distances), n_rows, self.shape.n_expert + PADDING
            )
        step.true[row - 1, used] = True
        step.predicted[
            np.arange(len(predicted))[:, np.newaxis], row - 1, predicted[:, : len(used)]
        ] = True
        step.n_predicted += predicted[:, 0] >= 0

    def _add_to_batch(self, sequence: int) -> None:
        if sequence in self._batch or sequence in self._closed:
            return
        if len(self._batch) == self._batch_sequences:
            self._close_batch()
        self._batch.add(sequence)

    def _close_batch(self) -> None:
        """Ends the batch, and adds the accuracy of its complete steps to the sums. In a
        complete step, all requests of a full batch decoded and all layers except the
        first were predicted."""
        complete = self._batch_sequences * (self.shape.n_moe_layer - 1)
        for step in self._steps.values():
            for column in (
                np.flatnonzero(step.n_predicted == complete) if complete else ()
            ):
                predicted = step.predicted[column, :, :-PADDING]
                self._sums[column] += batch_accuracy(step.true[:, :-PADDING], predicted)
                self._n_steps[column] += 1
        self._closed |= self._batch
        self._batch.clear()
        self._steps.clear()
