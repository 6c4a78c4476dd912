"""Tests scores of predictors.

A predictor of known accuracy gets exactly the figures that the definitions imply. The
accuracy of a batch is formula 7 of ExpertFlow: the size of the intersection of
predicted and true experts, divided by the size of their union. Reuse is counted by
hand.
"""

import math

import numpy as np
import pytest
from oracles import Oracle, Unpredictive, hand_made, routers_of
from traces import SMALL, hidden_routers, random_trace, routed

from moegguf.controller.predictors.base import NoPrediction
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.trace.trace import Trace
from predictors.study.accuracy import Figures
from predictors.study.controls import FreshGate
from predictors.study.judge import Judge
from predictors.study.reuse import reuse
from predictors.study.scoring import batch_accuracy, score

SHAPE = MoeShape(
    n_layer=5, n_expert=8, n_expert_used=2, layers=(1, 2, 3, 4), expert_bytes=1000
)


def cyclic(n_sequences: int = 1) -> Trace:
    """Returns a trace in which token t of the six tokens of a sequence uses the experts t and t + 1 (mod
    8) in every layer.

    The first two tokens of a sequence are its prompt.
    """
    path = [[[t % 8, (t + 1) % 8]] * 4 for t in range(6)]
    return hand_made(SHAPE, [path] * n_sequences, prefill=2)


def only(trace: Trace, predictor: Oracle | Unpredictive, distance: int = 1) -> Figures:
    return score(trace, [predictor], [distance]).scores[0].means[distance]


@pytest.mark.parametrize("distance", [1, 2, 3, 8])
def test_perfect_predictor_scores_one_by_every_definition(distance: int) -> None:
    figures = only(cyclic(), Oracle(cyclic()), distance)
    assert figures.due == 4 * 3  # four decoded tokens, three layers after the first
    assert (
        figures.coverage
        == figures.accuracy
        == figures.top_k_hit
        == figures.at_least_one
        == 1
    )
    assert figures.precision[:2] == (1, 1) and figures.recall[:2] == (0.5, 1)


def test_half_right_predictor_scores_half_and_a_wrong_one_moves_no_useful_byte() -> (
    None
):
    half, wrong = (only(cyclic(), Oracle(cyclic(), n_wrong=n)) for n in (1, 2))
    assert (half.accuracy, half.top_k_hit, half.at_least_one) == (0.5, 0, 1)
    # The predictor always predicts two experts, even if more are requested.
    assert half.precision == (1, 0.5, 0.5, 0.5)
    assert half.recall == (0.5, 0.5, 0.5, 0.5)
    assert (wrong.accuracy, wrong.top_k_hit, wrong.at_least_one) == (0, 0, 0)
    assert wrong.moved_per_useful == (None,) * 4


@pytest.mark.parametrize(
    "answer",
    [None, np.full(8, np.nan, np.float32), np.zeros(8, np.float32), np.ones(3, "f4")],
)
def test_missing_prediction_lowers_only_the_coverage(answer: np.ndarray | None) -> None:
    figures = only(cyclic(), Unpredictive(SHAPE, answer))
    assert (figures.due, figures.coverage, figures.accuracy, figures.top_k_hit) == (
        12,
        0,
        None,
        None,
    )


def test_score_counts_distances_out_of_reach_as_missing() -> None:
    trace = cyclic()
    table = score(trace, [Oracle(trace, reach=2)], [3]).scores[0]
    # Layers 2 and 3 have no event three layers before them. They are predicted after
    # layer 1, at distances of one and two layers.
    assert {il: figures.coverage for il, figures in table.layers[3].items()} == {
        1: 1,
        2: 1,
        3: 1,
        4: 0,
    }
    assert table.means[3].coverage == pytest.approx(2 / 3)
    assert table.means[3].accuracy == 1
    # Layer 1 can only be predicted from tokens, so it is left out of the mean.
    table = score(trace, [Oracle(trace, first_layer=False)], [1]).scores[0]
    assert (
        table.layers[1][1].due,
        table.layers[1][1].coverage,
        table.means[1].coverage,
    ) == (4, 0, 1)


def test_score_with_a_cache_counts_only_absent_experts_as_moved() -> None:
    # Token t uses experts t and t + 1. With two resident experts in each layer, expert
    # t is still resident from token t
    # - 1.
    table = score(cyclic(), [Oracle(cyclic(), n_wrong=1)], [1]).scores[0].means[1]
    # The right expert of each prediction is t, which is resident. The wrong expert is
    # absent, so all moved bytes are useless.
    assert table.moved_per_useful[1] is None
    right = score(cyclic(), [Oracle(cyclic())], [1]).scores[0].means[1]
    assert right.moved_per_useful[1] == 1


def test_score_of_batches_unites_paths_and_the_control_is_shuffled() -> None:
    trace = cyclic(n_sequences=5)
    table = score(
        trace, [Oracle(trace), Oracle(trace, n_wrong=2)], [1, 2], batch_sequences=2
    )
    right, wrong = table.scores
    assert right.batch_accuracy == {1: 1, 2: 1}
    assert all(
        value is not None and value < 1 for value in wrong.batch_accuracy.values()
    )
    assert (right.name, wrong.name) == ("oracle", "oracle 2")
    trace = random_trace(n_sequences=3, n_prefill=0, n_decode=40)
    table = score(trace, [Oracle(trace)], [1])
    control = table.control_of("oracle")
    assert table.scores[0].means[1].accuracy == 1
    assert control is not None and control.means[1].due == table.scores[0].means[1].due
    assert control.means[1].accuracy is not None and control.means[1].accuracy < 0.5
    assert table.control_of("another") is None


def test_score_and_reuse_accept_no_prediction_and_an_empty_trace() -> None:
    trace = random_trace(n_sequences=1, n_prefill=4, n_decode=3)
    table = score(trace, [NoPrediction(trace.shape)])
    assert table.tokens == 3
    assert table.scores[0].means[4].coverage == 0
    empty = score(trace.select([]), [NoPrediction(trace.shape)])
    assert empty.scores[0].means[1].due == 0
    assert empty.tokens == 0
    figures = reuse(random_trace(n_sequences=1, n_decode=0))
    assert figures.counts.shape[0] == 0
    assert math.isnan(figures.within.entropy) and np.isnan(figures.next_token).all()


def matrix(*rows: str) -> np.ndarray:
    return np.array([[c == "x" for c in row] for row in rows])


@pytest.mark.parametrize(
    ("true", "predicted", "expected"),
    [
        # Three experts are right, one is missed, and one is predicted but not used.
        (matrix("xx..", "..xx"), matrix("x.x.", "..xx"), 3 / 5),
        (matrix("x...", ".x.."), matrix("....", "...."), 0),
        (matrix("x...", ".x.."), matrix("xxxx", "xxxx"), 2 / 8),
        (matrix("...."), matrix("...."), 1),
        (matrix("...."), matrix("x..."), 0),
        # Several are averaged.
        (
            np.stack([matrix("xx.."), matrix("..xx")]),
            np.stack([matrix("xx..")] * 2),
            0.5,
        ),
    ],
)
def test_batch_accuracy_is_intersection_over_union(
    true: np.ndarray, predicted: np.ndarray, expected: float
) -> None:
    assert batch_accuracy(true, predicted) == pytest.approx(expected)


def run(trace: Trace, judge: Judge) -> Judge:
    for event in trace.events():
        judge.announce(event) if isinstance(event, Announcement) else judge.observe(
            event
        )
    return judge


def test_judge_figures_equal_the_score_of_the_trace_and_include_a_control() -> None:
    trace = random_trace(n_sequences=3)
    offline = score(trace, [Oracle(trace, n_wrong=1, reach=3)]).scores[0]
    live = run(trace, Judge(Oracle(trace, n_wrong=1, reach=3))).table()
    assert live.means == offline.means and live.layers == offline.layers
    assert live.means[1].accuracy == 0.5
    # A predictor with reach > 0 is not measured at distance 0.
    assert live.fresh is None
    trace = random_trace(with_inputs=True)
    control = FreshGate(
        trace.shape, routers_of(trace.shape, hidden_routers(trace.shape, 0))
    )
    table = run(trace, Judge(control)).table()
    assert table.fresh is not None and table.fresh.accuracy == 1
    assert run(trace, Judge(Oracle(trace, n_wrong=1))).table().means[1].accuracy == 0.5


def test_judge_ignores_invalid_events_and_aborted_passes() -> None:
    judge = Judge(Unpredictive(SMALL, np.ones(SMALL.n_expert, np.float32)))
    judge.observe(routed(0, 1, 2))  # a layer without experts
    judge.observe(routed(1, -1, -1))  # padding
    judge.observe(routed(1, 1, 99, pass_=1))  # an expert that does not exist
    judge.observe(routed(1, [1, 2], [3, 4], pass_=2))  # two tokens
    # The last layer is computed for only one of the two tokens.
    judge.observe(routed(5, 1, 2, pass_=2))
    judge.observe(routed(1, 1, 2, pass_=3, phase=Phase.PREFILL))
    assert judge.table().means[1].due == 0
    assert judge.tally.ranks[..., 1:].sum() == 0
    trace = random_trace(n_sequences=1, n_prefill=0, n_decode=3)
    events = [event for event in trace.events() if isinstance(event, RoutingEvent)]
    n = len(SMALL.layers)

    class InFirstPass(Oracle):
        def observe(self, event: RoutingEvent) -> None:
            """Ignores the event."""

    judge = Judge(InFirstPass(trace), [1])
    judge.predictor.announce(Announcement(0, Phase.DECODE, trace.tokens[:1]))
    judge.observe(events[0])  # predicts layer 2 of the first pass
    # Routes layer 2 of the second pass, which nothing has predicted.
    judge.observe(events[n + 1])
    assert judge.tally.ranks[..., 1:].sum() == 0


TWO_LAYERS = MoeShape(n_layer=2, n_expert=4, n_expert_used=1, layers=(0, 1))


def test_reuse_of_one_expert_per_request_is_skewed_in_each_and_even_over_all() -> None:
    figures = reuse(hand_made(TWO_LAYERS, [[[[e], [e]]] * 8 for e in range(4)]))
    assert (figures.within.covering, figures.within.entropy) == (0.25, 0)
    assert (figures.merged.covering, figures.merged.entropy) == (1, pytest.approx(1))
    assert figures.within.entropy < figures.same_size.entropy <= 1
    assert [figures.windows_same[n] for n in (1, 2, 4)] == [1, 1, 1]
    assert math.isnan(figures.windows_same[8])  # no token has eight tokens before it
    assert [figures.windows_other[n] for n in (1, 2, 4)] == [0, 0, 0]
    assert figures.next_token.tolist() == [1, 1]


def test_reuse_counts_distances_between_uses_and_leaves_out_prompts() -> None:
    # Expert 0 is used at tokens 0, 1 and 4, expert 1 at tokens 2 and 3. These are two
    # first uses, and distances of 1, 1 and 3 tokens.
    figures = reuse(hand_made(TWO_LAYERS, [[[[e], [e]] for e in (0, 0, 1, 1, 0)]]))
    assert figures.reuse_distances[0] == pytest.approx(0.4)
    assert figures.reuse_distances[1] == pytest.approx(0.4)
    assert figures.reuse_distances[2] == 0
    assert figures.reuse_distances[4] == pytest.approx(0.2)
    assert sum(figures.reuse_distances.values()) == pytest.approx(1)
    assert figures.next_token.tolist() == [0.5, 0.5]
    # Token 3 is the only one of tokens 2, 3 and 4 that uses an expert of the two tokens
    # before it.
    assert figures.windows_same[2] == pytest.approx(1 / 3)
    figures = reuse(
        hand_made(
            TWO_LAYERS,
            [
                [[[3], [3]], [[0], [1]], [[0], [2]]],
                [[[3], [3]], [[2], [2]], [[2], [2]]],
            ],
            prefill=1,
        )
    )
    assert figures.sequences == (0, 1) and figures.layers == (0, 1)
    assert figures.counts.tolist() == [
        [[2, 0, 0, 0], [0, 1, 1, 0]],
        [[0, 0, 2, 0], [0, 0, 2, 0]],
    ]
