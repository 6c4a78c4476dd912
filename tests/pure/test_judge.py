"""The judge of a predictor: the same figures event by event as over the trace."""

from __future__ import annotations

import numpy as np
from oracles import Oracle, Unpredictive, routers_of
from traces import SMALL, hidden_routers, random_trace, routed

from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.trace.trace import Trace
from predictors.study.accuracy import LinkModel
from predictors.study.controls import FreshGate
from predictors.study.judge import Judge
from predictors.study.scoring import score


def run(trace: Trace, judge: Judge) -> Judge:
    for event in trace.events():
        judge.announce(event) if isinstance(event, Announcement) else judge.observe(event)
    return judge


def test_a_control_runs_beside_a_predictor() -> None:
    trace = random_trace(with_inputs=True)
    control = FreshGate(trace.shape, routers_of(trace.shape, hidden_routers(trace.shape, 0)))
    table = run(trace, Judge(Oracle(trace, n_wrong=1), control=control)).table()
    assert table.fresh is not None and table.fresh.accuracy == 1
    assert table.means[1].accuracy == 0.5


def test_live_figures_are_those_of_the_trace() -> None:
    trace = random_trace(n_sequences=3)
    link = LinkModel(5e6, 10, 300)
    offline = score(trace, [Oracle(trace, n_wrong=1, reach=3)], link=link).scores[0]
    live = run(trace, Judge(Oracle(trace, n_wrong=1, reach=3))).table(link)
    assert live.means == offline.means and live.layers == offline.layers
    assert live.means[1].accuracy == 0.5
    assert live.fresh is None  # a predictor with a reach is not its own control


def test_invalid_events_are_neither_measured_nor_an_error() -> None:
    judge = Judge(Unpredictive(SMALL, np.ones(SMALL.n_expert, np.float32)))
    judge.observe(routed(0, 1, 2))  # a layer without experts
    judge.observe(routed(1, -1, -1))  # padding
    judge.observe(routed(1, 1, 99, pass_=1))  # an expert that does not exist
    judge.observe(routed(1, [1, 2], [3, 4], pass_=2))  # two tokens
    judge.observe(routed(5, 1, 2, pass_=2))  # the last layer computed for one of them
    judge.observe(routed(1, 1, 2, pass_=3, phase=Phase.PREFILL))
    assert judge.table().means[1].due == 0
    assert judge.tally.ranks[..., 1:].sum() == 0


def test_the_predictions_of_an_aborted_pass_are_not_counted() -> None:
    trace = random_trace(n_sequences=1, n_prefill=0, n_decode=3)
    events = [event for event in trace.events() if isinstance(event, RoutingEvent)]
    n = len(SMALL.layers)

    class InFirstPass(Oracle):
        def observe(self, event: RoutingEvent) -> None:
            """Follows no pass."""

    judge = Judge(InFirstPass(trace), [1])
    judge.predictor.announce(Announcement(0, Phase.DECODE, trace.tokens[:1]))
    judge.observe(events[0])  # predicts layer 2 of the first pass
    judge.observe(events[n + 1])  # layer 2 of the second, whose first layer was never observed
    assert judge.tally.ranks[..., 1:].sum() == 0
