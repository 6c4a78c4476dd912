"""Reuse statistics, on traces small enough to count by hand."""

import math

import numpy as np
import pytest
from oracles import hand_made
from traces import random_trace

from moegguf.controller.shape import MoeShape
from predictors.study.reuse import reuse

SHAPE = MoeShape(n_layer=2, n_expert=4, n_expert_used=1, layers=(0, 1))


def test_counts_are_tokens_by_request_layer_and_expert_and_leave_the_prompt_out() -> None:
    figures = reuse(
        hand_made(SHAPE, [[[[3], [3]], [[0], [1]], [[0], [2]]], [[[3], [3]], [[2], [2]], [[2], [2]]]], prefill=1)
    )
    assert figures.sequences == (0, 1) and figures.layers == (0, 1)
    assert figures.counts.tolist() == [[[2, 0, 0, 0], [0, 1, 1, 0]], [[0, 0, 2, 0], [0, 0, 2, 0]]]


def test_a_request_with_one_expert_is_as_skewed_as_can_be_and_all_together_are_even() -> None:
    figures = reuse(hand_made(SHAPE, [[[[e], [e]]] * 8 for e in range(4)]))
    assert (figures.within.covering, figures.within.entropy) == (0.25, 0)
    assert (figures.merged.covering, figures.merged.entropy) == (1, pytest.approx(1))
    assert figures.within.entropy < figures.same_size.entropy <= 1
    assert [figures.windows_same[n] for n in (1, 2, 4)] == [1, 1, 1]
    assert math.isnan(figures.windows_same[8])  # no token has as many before it
    assert [figures.windows_other[n] for n in (1, 2, 4)] == [0, 0, 0]
    assert figures.next_token.tolist() == [1, 1]


def test_distances_between_uses() -> None:
    # Expert 0 at tokens 0, 1, 4 and expert 1 at 2, 3: two first uses, gaps of 1, 1 and 3.
    figures = reuse(hand_made(SHAPE, [[[[e], [e]] for e in (0, 0, 1, 1, 0)]]))
    assert figures.reuse_distances[0] == pytest.approx(0.4)
    assert figures.reuse_distances[1] == pytest.approx(0.4)
    assert figures.reuse_distances[2] == 0
    assert figures.reuse_distances[4] == pytest.approx(0.2)
    assert sum(figures.reuse_distances.values()) == pytest.approx(1)
    assert figures.next_token.tolist() == [0.5, 0.5]
    assert figures.windows_same[2] == pytest.approx(1 / 3)  # of tokens 2, 3, 4 only token 3's is among the two before


def test_without_structure_requests_are_alike_and_with_it_they_are_not() -> None:
    noise = reuse(random_trace(n_sequences=8, n_decode=64, structure=0.0))
    text = reuse(random_trace(n_sequences=8, n_decode=64, structure=1.0))
    assert abs(noise.windows_same[4] - noise.windows_other[4]) < 0.03
    assert text.windows_same[4] > text.windows_other[4] + 0.1
    assert abs(noise.within.entropy - noise.same_size.entropy) < 0.02
    assert text.within.entropy < text.same_size.entropy - 0.05


def test_nothing_decoded_is_no_fault() -> None:
    figures = reuse(random_trace(n_sequences=1, n_decode=0))
    assert figures.counts.shape[0] == 0
    assert math.isnan(figures.within.entropy) and np.isnan(figures.next_token).all()
