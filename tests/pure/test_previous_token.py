"""Temporal locality: the experts of the last token at a layer."""

from __future__ import annotations

import numpy as np
import pytest
from traces import random_trace

from moegguf.controller.predictors.counts import PreviousToken
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Phase, RoutingEvent

SHAPE = MoeShape(n_layer=3, n_expert=4, n_expert_used=2, layers=(1, 2))


def routed(il: int, *tokens: tuple[int, ...], sequence: int = 0) -> RoutingEvent:
    return RoutingEvent(
        0,
        0,
        0,
        sequence,
        Phase.DECODE,
        0,
        il,
        np.array(tokens, np.int32).reshape(len(tokens), len(tokens[0]) if tokens else 2),
    )


def test_it_repeats_the_last_token_of_the_layer() -> None:
    predictor = PreviousToken(SHAPE)
    predictor.observe(routed(1, (0, 1), (2, 3)))
    predictor.observe(routed(2, (3, 0)))
    assert predictor.predict(1, 2).tolist() == [0, 0, 1, 1]
    assert predictor.predict(2, 1).tolist() == [1, 0, 0, 1]
    predictor.observe(routed(1, (1, 2), sequence=1))
    assert predictor.predict(1, 2).tolist() == [0, 1, 1, 0]


def test_no_prediction_for_a_layer_not_observed_or_without_experts() -> None:
    predictor = PreviousToken(SHAPE)
    predictor.observe(routed(1, (0, 1)))
    assert predictor.predict(2, 1) is None
    assert predictor.predict(0, 1) is None
    assert predictor.predict(99, 1) is None


@pytest.mark.parametrize("invalid", [routed(0, (1, 2)), routed(7, (1, 2)), routed(1)])
def test_an_event_without_valid_ids_changes_nothing(invalid: RoutingEvent) -> None:
    predictor = PreviousToken(SHAPE)
    predictor.observe(routed(1, (0, 1)))
    predictor.observe(invalid)
    assert predictor.predict(1, 2).tolist() == [1, 1, 0, 0]


def test_ids_out_of_range_are_left_out() -> None:
    predictor = PreviousToken(SHAPE)
    predictor.observe(routed(1, (-1, 3, 4, 1000)))
    assert predictor.predict(1, 2).tolist() == [0, 0, 0, 1]


def test_it_beats_chance_where_neighbouring_tokens_share_experts() -> None:
    trace = random_trace()
    predictor, right, total = PreviousToken(trace.shape), 0.0, 0
    for event in trace.events():
        if isinstance(event, Announcement):
            continue
        probabilities = predictor.predict(event.il, 1)
        if event.phase == Phase.DECODE and probabilities is not None:
            right += probabilities[event.expert_ids[0]].sum()
            total += event.expert_ids.shape[1]
        predictor.observe(event)
    assert right / total > 2 * trace.shape.n_expert_used / trace.shape.n_expert
