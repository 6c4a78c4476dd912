"""FETCHRATE is measured: by hand for a table that knows every token, and another one for every distance and link."""

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


def test_a_layer_that_takes_as_long_as_its_experts_has_all_of_them_in_time() -> None:
    assert measured(2.2 * EXPERT_US, 1) == 1
    assert measured(40 * EXPERT_US, 1) == 1


def test_half_the_time_is_enough_for_one_of_two_and_none_for_none() -> None:
    assert measured(1.1 * EXPERT_US, 1) == 0.5
    assert measured(0.1 * EXPERT_US, 1) == 0


def test_a_farther_prediction_comes_in_time_where_a_nearer_one_does_not() -> None:
    # The layers between have what they always use; only the last one needs other experts for each token.
    trace = hand_made(SHAPE, [[[[0, 1]] * 3 + [[2 * t, 2 * t + 1]] for t in range(8)]], prefill=1)
    near, far = (fetch_rate(trace, table(trace), 16, link(0.8 * EXPERT_US), distance) for distance in (1, 3))
    assert near == 0 and far is not None and far > 0.5


def test_what_is_in_the_cache_does_not_count_and_nothing_predicted_is_no_rate() -> None:
    few, many = (hand_made(SHAPE, [[[[0, 1]] * 4 for _ in range(n)]], prefill=1) for n in (2, 8))
    rates = [fetch_rate(trace, table(trace), 16, link(1.1 * EXPERT_US), 1) for trace in (few, many)]
    assert rates == [0.5, 0.5], "only the first pass finds anything absent"
    assert fetch_rate(few, NoPrediction(SHAPE), 16, link(EXPERT_US), 1) is None
    assert measured(EXPERT_US, 1) == measured(EXPERT_US, 1), "the simulator is exact"
