"""FETCHRATE is measured: by hand for a table that knows every token, and another one for every distance and link."""

from functools import partial

import numpy as np
import pytest
from oracles import hand_made

from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.predictors.counts import token_table
from moegguf.controller.shape import MoeShape
from moegguf.trace.simulate import SimOptions
from moegguf.trace.trace import Trace
from predictors.study.fetching import fetch_rate
from predictors.train.fit import count_tokens

SHAPE = MoeShape(n_layer=4, n_expert=16, n_expert_used=2, layers=(0, 1, 2, 3), n_vocab=64, expert_bytes=1000)
EXPERT_US = 1000.0


def moving(n_tokens: int = 8) -> Trace:
    """Each token uses two experts of each layer that no token before it has used."""
    return hand_made(SHAPE, [[[[2 * t, 2 * t + 1]] * 4 for t in range(n_tokens)]], prefill=1)


def table(trace: Trace) -> Predictor:
    return token_table(trace.shape, count_tokens(trace))


def link(layer_us: float) -> SimOptions:
    return SimOptions(link_bytes_per_s=1000 / EXPERT_US * 1e6, layer_pass_us=layer_us)


def measured(layer_us: float, distance: int, n_slots: int = 16) -> float:
    trace = moving()
    found = fetch_rate(trace, table(trace), n_slots, link(layer_us), distance)
    assert found is not None
    return found


def test_a_layer_that_takes_as_long_as_its_experts_has_all_of_them_in_time_but_the_first_layer_s() -> None:
    assert measured(2 * EXPERT_US, 1) == pytest.approx(3 / 4)
    assert measured(40 * EXPERT_US, 1) == pytest.approx(3 / 4)


def test_half_the_time_is_enough_for_one_of_two_and_none_for_none() -> None:
    assert 0.3 <= measured(EXPERT_US, 1) <= 3 / 8 + 0.01
    assert measured(1.0, 1) < 0.05


def test_a_farther_prediction_comes_in_time_where_a_nearer_one_does_not() -> None:
    assert measured(EXPERT_US * 1.5, 4) > measured(EXPERT_US * 1.5, 1)


def test_what_is_in_the_cache_does_not_count_and_nothing_predicted_is_no_rate() -> None:
    trace = hand_made(SHAPE, [[[[0, 1]] * 4 for _ in range(8)]], prefill=1)
    assert fetch_rate(trace, table(trace), 16, link(EXPERT_US), 1) is None
    assert fetch_rate(trace, NoPrediction(SHAPE), 16, link(EXPERT_US), 1) is None
    assert partial(measured, EXPERT_US)(1) == measured(EXPERT_US, 1), "the simulator is exact"
    assert np.isfinite(measured(EXPERT_US, 2))
