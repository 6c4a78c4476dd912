"""Tests ProMoE's FETCHRATE against hand-computed values.

The cases vary the distance of predictions and the time of a layer. They include cached
experts and wrong predictions.
"""

import pytest
from oracles import Oracle, hand_made

from moegguf.controller.shape import MoeShape
from moegguf.trace.simulate import SimOptions
from moegguf.trace.trace import Trace
from predictors.study.scoring import score

SHAPE = MoeShape(
    n_layer=4, n_expert=16, n_expert_used=2, layers=(0, 1, 2, 3), expert_bytes=1000
)
EXPERT_US = 1000.0


def moving() -> Trace:
    """Returns a trace in which each of 8 tokens uses two experts of each layer that no
    earlier token used."""
    return hand_made(SHAPE, [[[[2 * t, 2 * t + 1]] * 4 for t in range(8)]], prefill=1)


def rates(
    trace: Trace, layer_us: float, *distances: int, n_wrong: int = 0
) -> dict[int, float | None]:
    link = SimOptions(link_bytes_per_s=1000 / EXPERT_US * 1e6, layer_pass_us=layer_us)
    return (
        score(trace, [Oracle(trace, n_wrong)], distances, link=link)
        .scores[0]
        .fetch_rates
    )


@pytest.mark.parametrize(
    ("layer_us", "rate"), [(4000, 1), (2000, 1), (1000, 0.5), (250, 0.125), (0, 0)]
)
def test_fetch_rate_one_layer_ahead_is_limited_by_the_time_of_a_layer(
    layer_us: float, rate: float
) -> None:
    assert rates(moving(), layer_us, 1) == {1: rate}


def test_fetch_rate_on_a_saturated_link_is_equal_for_all_distances() -> None:
    found = rates(moving(), 1000, 1, 2, 3)
    assert found[1] == found[2] == found[3] == 0.5


def test_fetch_rate_of_a_farther_prediction_can_be_higher() -> None:
    # Layers 0 to 2 always use the same experts. Only the last layer uses different
    # experts for each token.
    trace = hand_made(
        SHAPE, [[[[0, 1]] * 3 + [[2 * t, 2 * t + 1]] for t in range(8)]], prefill=1
    )
    found = rates(trace, 800, 1, 3)
    assert found[1] == pytest.approx(0.4) and found[3] == 1


def test_fetch_rate_ignores_cached_experts_and_counts_wrong_predictions() -> None:
    always = hand_made(SHAPE, [[[[0, 1]] * 4 for _ in range(8)]], prefill=1)
    assert rates(always, 1000, 1) == {1: None}
    assert rates(always, 500, 1, n_wrong=1) == {1: 0.5}, (
        "one of two is there, and the other one is fetched in vain"
    )


def test_good_pred_is_accuracy_times_fetch_rate_and_none_without_a_link() -> None:
    trace = moving()
    link = SimOptions(link_bytes_per_s=1e6, layer_pass_us=1000)
    found = score(trace, [Oracle(trace, n_wrong=1)], [1], link=link).scores[0]
    assert found.means[1].accuracy == 0.5 and found.fetch_rates[1] is not None
    assert found.good_pred(1) == 0.5 * found.fetch_rates[1]
    assert score(trace, [Oracle(trace)], [1]).scores[0].good_pred(1) is None
