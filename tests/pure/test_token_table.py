"""The token-id table: hand-made counts, tokens never seen, and a shuffled control."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles import accuracy, counted
from traces import random_trace

from moegguf.controller.predictors.counts import MAX_COUNT, TokenTable
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.trace.trace import Trace, TraceHeader
from predictors.study.arrange import shuffled
from predictors.train.fit import count_tokens

SHAPE = MoeShape(n_layer=3, n_expert=4, n_expert_used=2, layers=(1, 2), n_embd=8, n_vocab=6)


def tiny_trace() -> Trace:
    """Token 5 twice with experts {0, 1} then {0, 2} in layer 1; token 3 once with {2, 3}; one token unknown."""
    ids = np.array([[[0, 1], [0, 2], [2, 3], [1, 2]], [[3, 2], [3, 2], [-1, -1], [0, 1]]], np.int16)
    return Trace(
        SHAPE,
        TraceHeader(),
        pass_sequence=np.zeros(4, np.int32),
        pass_phase=np.ones(4, np.uint8),
        pass_first_token=np.zeros(4, np.int32),
        pass_ns=np.zeros(4, np.int64),
        pass_start=np.arange(5, dtype=np.int64),
        tokens=np.array([5, 5, 3, -1], np.int32),
        expert_ids=ids,
    )


def announce(table: TokenTable, *tokens: int, phase: Phase = Phase.DECODE) -> None:
    table.announce(Announcement(0, 0, phase, np.array(tokens, np.int32)))


def routed(il: int, *ids: int, first_token: int = 0) -> RoutingEvent:
    return RoutingEvent(0, 0, 0, 0, Phase.DECODE, first_token, il, np.array([ids], np.int32))


def test_counts_of_a_token_and_one_average_visit() -> None:
    table = counted(TokenTable, tiny_trace())
    announce(table, 5)
    # Layer 1 chose 2, 1, 2, 1 times of 3 visits with a known token: the average visit is 2/3, 1/3, 2/3, 1/3.
    probabilities = table.predict(1, 1)
    assert probabilities is not None
    assert probabilities == pytest.approx(np.array([2 + 2 / 3, 1 + 1 / 3, 1 + 2 / 3, 1 / 3]) / 3)
    last = table.predict(2, 2)
    assert last is not None and last.tolist() == [0, 0, 1, 1]


def test_a_token_never_seen_means_the_layers_popularity() -> None:
    table = counted(TokenTable, tiny_trace())
    announce(table, 0)
    probabilities = table.predict(1, 1)
    assert probabilities == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1 / 3])


def test_no_prediction_without_one_decode_token_of_the_vocabulary() -> None:
    table = counted(TokenTable, tiny_trace())
    assert table.predict(1, 1) is None
    announce(table, 5, phase=Phase.PREFILL)
    assert table.predict(1, 1) is None
    announce(table, 5, 3)
    assert table.predict(1, 1) is None
    announce(table, 6)
    assert table.predict(1, 1) is None
    announce(table, 5)
    assert table.predict(0, 1) is None  # a layer without experts
    table.observe(routed(1, 0, 1, first_token=-1))  # another pass than the one announced
    assert table.predict(2, 1) is None


def test_a_table_is_bounded_and_its_counts_never_overflow() -> None:
    trace = tiny_trace()
    assert count_tokens(trace).arrays["tokens"].tolist() == [3, 5]
    assert count_tokens(trace, most_tokens=1).arrays["tokens"].tolist() == [3]
    many = replace(
        trace,
        tokens=np.ones(MAX_COUNT + 2, np.int32),
        expert_ids=np.tile(np.array([0, 1], np.int16), (2, MAX_COUNT + 2, 1)),
    )
    assert count_tokens(many).arrays["counts"][0, 0].tolist() == [MAX_COUNT, MAX_COUNT, 0, 0]


@pytest.mark.parametrize("tokens", [[1, 1], [-1, 2], [0, 6]])
def test_a_damaged_table_is_refused(tokens: list[int]) -> None:
    weights = count_tokens(tiny_trace())
    damaged = Weights({**weights.arrays, "tokens": np.array(tokens, np.int32)})
    with pytest.raises(ValueError, match="different token ids"):
        TokenTable.from_weights(SHAPE, damaged)


def test_it_beats_a_shuffled_control_on_held_out_sequences() -> None:
    trace = random_trace(n_sequences=16, n_decode=40)
    seen, unseen = trace.select(range(12)), trace.select(range(12, 16))
    learned = accuracy(counted(TokenTable, seen), unseen, 1)
    control = accuracy(counted(TokenTable, shuffled(seen, 0)), shuffled(unseen, 1), 1)
    assert learned > control + 0.1
