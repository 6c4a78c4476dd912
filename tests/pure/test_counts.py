"""Predictors that count: DuoServe-MoE's equations by hand, and ProMoE's table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles import counted, hand_made
from traces import random_trace

from moegguf.controller.predictors.counts import MAX_COUNT, Affinity, Popularity, TokenTable
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
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


def test_an_expert_never_seen_is_followed_by_what_is_popular() -> None:
    trace = replace(PAIRS, expert_ids=PAIRS.expert_ids.copy())
    trace.expert_ids[0][trace.expert_ids[0] == 2] = 1
    popularity = count_popularity(trace)
    assert count_affinity(trace, popularity)[0, 2] == pytest.approx(popularity[1])


def test_statistics_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="must have the shape"):
        Affinity.from_weights(THREE, COUNTED["affinity"](random_trace()))


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
