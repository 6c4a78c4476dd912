"""Popularity and affinity: DuoServe-MoE's equations 2 and 3 by hand, and a shuffled control."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import accuracy, counted
from traces import random_trace

from moegguf.controller.predictors.counts import Affinity, Popularity
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Phase, RoutingEvent
from moegguf.trace.trace import Trace, TraceHeader
from predictors.study.arrange import shuffled
from predictors.train.fit import COUNTED, count_affinity, count_popularity

SHAPE = MoeShape(n_layer=3, n_expert=3, n_expert_used=2, layers=(0, 2), n_embd=8, n_vocab=6)


def tiny_trace() -> Trace:
    """Layer 0 chose {0, 1}, {0, 2}, {0, 1}; layer 2 {0, 1}, {1, 2} and was not computed for the last token."""
    return Trace(
        SHAPE,
        TraceHeader(),
        pass_sequence=np.zeros(3, np.int32),
        pass_phase=np.ones(3, np.uint8),
        pass_first_token=np.full(3, -1, np.int32),
        pass_ns=np.zeros(3, np.int64),
        pass_start=np.arange(4, dtype=np.int64),
        tokens=np.full(3, -1, np.int32),
        expert_ids=np.array([[[0, 1], [2, 0], [1, 0]], [[0, 1], [2, 1], [-1, -1]]], np.int16),
    )


def routed(il: int, *ids: int) -> RoutingEvent:
    return RoutingEvent(0, 0, 0, 0, Phase.DECODE, -1, il, np.array([ids], np.int32))


def test_popularity_is_the_share_of_choices() -> None:
    assert count_popularity(tiny_trace()) == pytest.approx(np.array([[3, 2, 1], [1, 2, 1]]) / [[6], [4]])


def test_affinity_is_the_share_of_pairs() -> None:
    # 0 was followed by {0, 1} and {1, 2}; 1 by {0, 1}; 2 by {1, 2}.
    expected = np.array([[1, 2, 1], [2, 2, 0], [0, 2, 2]]) / 4
    assert count_affinity(tiny_trace(), count_popularity(tiny_trace()))[0] == pytest.approx(expected)


def test_popularity_predicts_any_layer_with_experts_at_any_time() -> None:
    popularity = counted(Popularity, tiny_trace())
    assert popularity.predict(0, 1) == pytest.approx([1, 2 / 3, 1 / 3])
    assert popularity.predict(2, 2) == pytest.approx([0.5, 1, 0.5])
    assert popularity.predict(1, 1) is None
    assert popularity.predict(7, 1) is None


def test_affinity_averages_the_rows_of_the_experts_chosen() -> None:
    affinity = counted(Affinity, tiny_trace())
    assert affinity.predict(2, 1) is None
    affinity.observe(routed(0, 1, 2))
    assert affinity.predict(2, 1) == pytest.approx([0.5, 1, 0.5])
    assert affinity.predict(2, 2) is None
    assert affinity.predict(0, 1) is None


@pytest.mark.parametrize("invalid", [routed(0, 1, 3), routed(0, -1, 2), routed(1, 0, 1), routed(2, 0, 1), routed(0)])
def test_no_prediction_after_invalid_events_and_the_last_layer(invalid: RoutingEvent) -> None:
    affinity = counted(Affinity, tiny_trace())
    affinity.observe(routed(0, 0, 1))
    affinity.observe(invalid)
    assert affinity.predict(2, 1) is None
    affinity.observe(invalid._replace(expert_ids=np.zeros((2, 2), np.int32)))
    assert affinity.predict(2, 1) is None


def test_an_expert_never_seen_is_followed_by_what_is_popular() -> None:
    trace = tiny_trace()
    trace.expert_ids[0][trace.expert_ids[0] == 2] = 1
    affinity = counted(Affinity, trace)
    affinity.observe(routed(0, 2, 2))
    assert affinity.predict(2, 1) == pytest.approx([0.5, 1, 0.5])


def test_statistics_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="must have the shape"):
        Affinity.from_weights(SHAPE, COUNTED["affinity"](random_trace()))


def test_they_beat_their_shuffled_controls_on_held_out_sequences() -> None:
    trace = random_trace(n_sequences=16, n_decode=40)
    seen, unseen = trace.select(range(12)), trace.select(range(12, 16))
    unseen_control = shuffled(unseen, 1)
    affinity = accuracy(counted(Affinity, seen), unseen, 1)
    popularity = accuracy(counted(Popularity, seen), unseen, 1)
    assert affinity > accuracy(counted(Affinity, shuffled(seen, 0)), unseen_control, 1) + 0.03
    assert affinity > popularity > 2 / 16 + 0.05
