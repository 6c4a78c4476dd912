"""Predictors that count: DuoServe-MoE's equations, ProMoE's table and the last token by hand; shuffled controls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles import Counted, accuracy, counted, hand_made
from reference_predictors import Affinity, PreviousToken, TokenTable
from traces import random_trace, routed

from moegguf.controller.predictors.counts import MAX_COUNT, Popularity
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Announcement, Phase, RoutingEvent
from predictors.study.arrange import shuffled
from predictors.train.fit import COUNTED, count_affinity, count_popularity, count_tokens

THREE = MoeShape(n_layer=3, n_expert=3, n_expert_used=2, layers=(0, 2), n_embd=8, n_vocab=6)
FOUR = MoeShape(n_layer=3, n_expert=4, n_expert_used=2, layers=(1, 2), n_embd=8, n_vocab=6)

# Layer 0 chose {0, 1}, {0, 2}, {0, 1}; layer 2 {0, 1}, {1, 2} and was not computed for the last token.
PAIRS = hand_made(THREE, [[[[0, 1], [0, 1]], [[2, 0], [2, 1]], [[1, 0], [-1, -1]]]])
# Token 5 twice with experts {0, 1} then {0, 2} in layer 1; token 3 once with {2, 3}; one token unknown.
TOKENS = replace(
    hand_made(FOUR, [[[[0, 1], [3, 2]], [[0, 2], [3, 2]], [[2, 3], [-1, -1]], [[1, 2], [0, 1]]]]),
    tokens=np.array([5, 5, 3, -1], np.int32),
)


def test_popularity_and_affinity_are_shares_of_choices_and_of_pairs() -> None:
    popularity = count_popularity(PAIRS)
    assert popularity == pytest.approx(np.array([[3, 2, 1], [1, 2, 1]]) / [[6], [4]])
    # 0 was followed by {0, 1} and {1, 2}; 1 by {0, 1}; 2 by {1, 2}.
    expected = np.array([[1, 2, 1], [2, 2, 0], [0, 2, 2]]) / 4
    assert count_affinity(PAIRS, popularity)[0] == pytest.approx(expected)


def test_popularity_predicts_any_layer_with_experts_at_any_time() -> None:
    popularity = counted(Popularity, PAIRS)
    assert popularity.predict(0, 1) == pytest.approx([1, 2 / 3, 1 / 3])
    assert popularity.predict(2, 2) == pytest.approx([0.5, 1, 0.5])
    assert popularity.predict(1, 1) is popularity.predict(7, 1) is None


def test_affinity_averages_the_rows_of_the_experts_chosen() -> None:
    affinity = counted(Affinity, PAIRS)
    assert affinity.predict(2, 1) is None
    affinity.observe(routed(0, 1, 2))
    assert affinity.predict(2, 1) == pytest.approx([0.5, 1, 0.5])
    assert affinity.predict(2, 2) is affinity.predict(0, 1) is None


@pytest.mark.parametrize(
    "invalid",
    [routed(0, 1, 3), routed(0, -1, 2), routed(1, 0, 1), routed(2, 0, 1), routed(0), routed(0, [0, 1], [0, 1])],
)
def test_affinity_predicts_nothing_after_invalid_events_several_tokens_and_the_last_layer(
    invalid: RoutingEvent,
) -> None:
    affinity = counted(Affinity, PAIRS)
    affinity.observe(routed(0, 0, 1))
    affinity.observe(invalid)
    assert affinity.predict(2, 1) is None


def test_an_expert_never_seen_is_followed_by_what_is_popular() -> None:
    trace = replace(PAIRS, expert_ids=PAIRS.expert_ids.copy())
    trace.expert_ids[0][trace.expert_ids[0] == 2] = 1
    affinity = counted(Affinity, trace)
    affinity.observe(routed(0, 2, 2))
    assert affinity.predict(2, 1) == pytest.approx([0.5, 1, 0.5])


def test_statistics_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="must have the shape"):
        Affinity.from_weights(THREE, COUNTED["affinity"](random_trace()))


def test_the_last_token_of_a_layer_is_repeated_and_valid_ids_only() -> None:
    predictor = PreviousToken(FOUR)
    predictor.observe(routed(1, [0, 1], [2, 3]))
    assert predictor.predict(1, 2).tolist() == [0, 0, 1, 1]
    assert predictor.predict(2, 1) is predictor.predict(0, 1) is predictor.predict(99, 1) is None
    predictor.observe(routed(2, 3, 0))
    assert predictor.predict(2, 1).tolist() == [1, 0, 0, 1]
    predictor.observe(routed(1, 1, 2, sequence=1))
    for unknown in (routed(0, 1, 2), routed(7, 1, 2), routed(1)._replace(expert_ids=np.zeros((0, 2), np.int32))):
        predictor.observe(unknown)
        assert predictor.predict(1, 2).tolist() == [0, 1, 1, 0]
    predictor.observe(routed(1, -1, 3, 4, 1000))
    assert predictor.predict(1, 2).tolist() == [0, 0, 0, 1]


def announce(table: TokenTable, *tokens: int, phase: Phase = Phase.DECODE) -> None:
    table.announce(Announcement(0, phase, np.array(tokens, np.int32)))


def test_counts_of_a_token_and_one_average_visit() -> None:
    table = counted(TokenTable, TOKENS)
    announce(table, 5)
    # Layer 1 chose 2, 1, 2, 1 times of 3 visits with a known token: the average visit is 2/3, 1/3, 2/3, 1/3.
    assert table.predict(1, 1) == pytest.approx(np.array([2 + 2 / 3, 1 + 1 / 3, 1 + 2 / 3, 1 / 3]) / 3)
    assert table.predict(2, 2) == pytest.approx([0, 0, 1, 1])
    announce(table, 0)  # never seen: the layer's popularity
    assert table.predict(1, 1) == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1 / 3])


def test_no_prediction_without_one_decode_token_of_the_vocabulary() -> None:
    table = counted(TokenTable, TOKENS)
    assert table.predict(1, 1) is None
    for tokens, phase in (([5], Phase.PREFILL), ([5, 3], Phase.DECODE), ([6], Phase.DECODE)):
        announce(table, *tokens, phase=phase)
        assert table.predict(1, 1) is None
    announce(table, 5)
    assert table.predict(0, 1) is None  # a layer without experts
    table.observe(routed(1, 0, 1, first_token=-1))  # another pass than the one announced
    assert table.predict(2, 1) is None


def test_a_table_is_bounded_and_its_counts_never_overflow() -> None:
    assert count_tokens(TOKENS).arrays["tokens"].tolist() == [3, 5]
    assert count_tokens(TOKENS, most_tokens=1).arrays["tokens"].tolist() == [3]
    ids = np.tile(np.array([0, 1], np.int16), (2, MAX_COUNT + 2, 1))
    many = replace(TOKENS, tokens=np.ones(MAX_COUNT + 2, np.int32), expert_ids=ids)
    assert count_tokens(many).arrays["counts"][0, 0].tolist() == [MAX_COUNT, MAX_COUNT, 0, 0]


@pytest.mark.parametrize("tokens", [[1, 1], [-1, 2], [0, 6]])
def test_a_damaged_table_is_refused(tokens: list[int]) -> None:
    weights = count_tokens(TOKENS)
    with pytest.raises(ValueError, match="different token ids"):
        TokenTable.from_weights(FOUR, Weights({**weights.arrays, "tokens": np.array(tokens, np.int32)}))


@pytest.mark.parametrize(("kind", "gain"), [(Affinity, 0.03), (TokenTable, 0.1)])
def test_each_beats_its_shuffled_control_on_held_out_sequences(kind: type[Counted], gain: float) -> None:
    trace = random_trace(n_sequences=16, n_decode=40)
    seen, unseen = trace.select(range(12)), trace.select(range(12, 16))
    learned = accuracy(counted(kind, seen), unseen, 1)
    assert learned > accuracy(counted(kind, shuffled(seen, 0)), shuffled(unseen, 1), 1) + gain
    assert learned > accuracy(counted(Popularity, seen), unseen, 1) > 2 / 16 + 0.05
    assert accuracy(PreviousToken(trace.shape), unseen, 1) > 2 / 16
