"""Predictive locality-aware caching with correction: victims after short sequences of events."""

from __future__ import annotations

import numpy as np

from moegguf.controller.history import History
from moegguf.controller.policies.base import Policy
from moegguf.controller.policies.locality import Locality
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Phase, RoutingEvent

PAPER = MoeShape(n_layer=4, n_expert=4, n_expert_used=2, layers=(0, 1, 2, 3))  # the example of section 3.2.1


class FixedForecast:
    """A forecast with the given probabilities, of layers after `il`."""

    def __init__(self, shape: MoeShape, il: int, **probabilities: list[float]) -> None:
        self.il = il
        self._rows = {int(name[1:]): row for name, row in probabilities.items()}
        self._table = np.zeros(shape.table, np.float32)
        for layer, row in self._rows.items():
            self._table[layer] = row

    def probabilities(self) -> np.ndarray:
        return self._table

    def known(self) -> list[int]:
        return sorted(self._rows)


class PolicyRun:
    """A policy with its history; `order` lists experts (il, e) from the first victim to the last."""

    def __init__(self, shape: MoeShape) -> None:
        self.shape, self.history, self.policy = shape, History(shape), Locality(shape)
        self.scores = np.zeros(shape.table)

    def route(self, pass_: int, il: int, *experts: int, **forecast: list[float]) -> None:
        ids = np.array([experts], np.int32)
        self.history.update(RoutingEvent(pass_, 0, 0, 0, Phase.DECODE, 0, il, ids))
        scores = self.policy.scores(self.history, FixedForecast(self.shape, il, **forecast))
        assert scores is not None
        self.scores = scores

    def order(self, *experts: tuple[int, int]) -> list[tuple[int, int]]:
        return sorted(experts, key=lambda expert: self.scores[expert])


def test_it_is_a_policy() -> None:
    assert isinstance(Locality(PAPER), Policy)


def test_when_the_first_layer_completes_the_third_takes_its_slots() -> None:
    run, all_ = PolicyRun(PAPER), [1.0] * 4
    run.route(0, 0, 0, 1, 2, 3, l1=all_, l2=all_, l3=all_)
    cached = [(il, e) for il in (0, 1) for e in range(4)]
    assert {il for il, _ in run.order(*cached)[:4]} == {0}
    assert run.scores[1].min() > run.scores[2].max() > run.scores[3].max() > run.scores[0].max()


def test_mispredicted_experts_go_first_then_those_that_have_completed() -> None:
    run = PolicyRun(PAPER)
    run.route(0, 0, 0, 1, l1=[0.9, 0.8, 0.1, 0.1], l2=[0.1, 0.1, 0.9, 0.9])
    assert run.order((1, 0), (0, 0), (2, 3)) == [(0, 0), (2, 3), (1, 0)]
    run.route(0, 1, 0, 2, l2=[0.1, 0.1, 0.9, 0.9])
    assert run.order((1, 0), (2, 2), (1, 1), (0, 0))[0] == (1, 1)  # predicted, prefetched, not used
    assert run.order((1, 0), (2, 2), (0, 0))[-1] == (2, 2)


def test_a_misprediction_does_not_evict_a_hot_expert() -> None:
    run = PolicyRun(PAPER)
    for pass_ in range(4):
        run.route(pass_, 1, 0, 1)
    run.route(4, 0, 0, 1, l1=[0.9, 0.1, 0.1, 0.8])
    run.route(4, 1, 1, 2)
    assert run.order((1, 0), (1, 3)) == [(1, 3), (1, 0)]  # both predicted and not used
    assert run.order((0, 3), (1, 0)) == [(0, 3), (1, 0)]


def test_a_prediction_ends_with_its_pass() -> None:
    run = PolicyRun(PAPER)
    run.route(0, 0, 0, 1, l3=[0.9, 0.8, 0.0, 0.0])
    assert run.scores[3, 0] > run.scores[0, 0]
    run.route(1, 0, 0, 1)
    assert run.scores[3, 0] < run.scores[0, 0]


def test_an_earlier_prediction_stays_valid_until_it_is_replaced() -> None:
    run = PolicyRun(PAPER)
    run.route(0, 0, 0, 1, l2=[0.9, 0.8, 0.0, 0.0], l3=[0.9, 0.8, 0.0, 0.0])
    run.route(0, 1, 0, 1, l2=[0.0, 0.0, 0.9, 0.8])
    assert run.order((2, 0), (3, 0), (2, 2)) == [(2, 0), (3, 0), (2, 2)]


def test_among_equals_frequent_and_recent_use_decides() -> None:
    run = PolicyRun(PAPER)
    for pass_, experts in enumerate([(0, 1), (0, 1), (0, 2), (0, 2), (3, 2)]):
        run.route(pass_, 1, *experts)
    assert run.order((1, 0), (1, 1), (1, 2), (1, 3)) == [(1, 3), (1, 1), (1, 2), (1, 0)]
    for pass_ in range(5, 25):
        run.route(pass_, 1, 3, 2)
    assert run.order((1, 0), (1, 3))[0] == (1, 0)  # once frequent, long ago


def test_of_a_prompt_all_probable_experts_are_predicted() -> None:
    run = PolicyRun(PAPER)
    run.route(0, 0, 0, 1, l1=[0.9, 0.6, 0.7, 0.4])
    assert (run.scores[1, :3] > run.scores[1, 3]).all()


def test_a_layer_without_experts_keeps_the_scores() -> None:
    shape = MoeShape(n_layer=3, n_expert=4, n_expert_used=2, layers=(1, 2))
    history = History(shape)
    history.update(RoutingEvent(0, 0, 0, 0, Phase.DECODE, 0, 0, np.array([[0, 1]], np.int32)))
    assert Locality(shape).scores(history, FixedForecast(shape, 0)) is None


def test_scores_are_finite_for_any_probabilities() -> None:
    run = PolicyRun(PAPER)
    run.route(0, 0, 0, 1, l1=[0.0] * 4, l2=[1.0] * 4, l3=[0.5, 0.5, 0.0, 1.0])
    assert np.isfinite(run.scores).all()
    assert (run.scores >= 0).all()
    assert (run.scores[1] < run.scores[2]).all()  # no probable expert, none predicted
