"""MoE-Infinity's algorithm 1: figure 6, and the terms of the score."""

import numpy as np
import pytest

from moegguf.controller.collection import Eamc, EamcPair
from moegguf.controller.history import History
from moegguf.controller.policies import EPSILON, Policy, SparsityAware
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, Phase, RoutingEvent

THREE = MoeShape(n_layer=3, n_expert=2, n_expert_used=1, layers=(0, 1, 2))
REQUEST = np.array([[[1, 2], [0, 3], [0, 3]]], np.float32)  # figure 6; E[i, j] there counts from 1


class NoForecast:
    il = 0

    def probabilities(self) -> Float32s:
        return np.zeros(THREE.table, np.float32)

    def known(self) -> list[int]:
        return []


def scores_after(
    policy: SparsityAware, history: History, il: int, e: int, sequence: int = 0, pass_: int = 0
) -> Float32s:
    history.update(RoutingEvent(pass_, 0, sequence, Phase.DECODE, 0, il, np.array([[e]], np.int32)))
    scores = policy.scores(history, NoForecast())
    return scores


def figure_6() -> SparsityAware:
    pair = EamcPair(Eamc(3, 2), Eamc.from_state(REQUEST))
    return SparsityAware(THREE, pair)


def victim(scores: Float32s, *resident: str) -> str:
    """Which of these experts, named as in the figure ("21" is E[2,1]), is evicted first."""
    return min(resident, key=lambda name: scores[int(name[0]) - 1, int(name[1]) - 1])


def test_figure_6_keeps_the_expert_that_the_request_keeps_using() -> None:
    policy, history = figure_6(), History(THREE)
    scores = scores_after(policy, history, 0, 0)  # E[1,1] has been chosen
    # LRU evicts E[3,1] for the prefetch of E[2,1] and misses E[2,2]; here E[2,2] stays.
    assert victim(scores, "11", "22", "31") == "31"
    scores = scores_after(policy, history, 1, 1)  # R2 chose E[2,2], a hit
    # The slot for E[3,2] is made by what the request does not use, not by E[2,2] (as statistical counts would).
    assert victim(scores, "11", "21", "22") == "21"


def test_the_score_is_algorithm_1() -> None:
    scores = scores_after(figure_6(), History(THREE), 0, 0)
    decay = np.array([[1], [2 / 3], [1 / 3]])
    probabilities = np.array([[1 / 3, 2 / 3], [0, 1], [0, 1]])
    np.testing.assert_allclose(scores, (probabilities + EPSILON) * decay, rtol=1e-5)


def test_of_experts_never_used_the_deepest_goes_first() -> None:
    scores = scores_after(figure_6(), History(THREE), 0, 0)
    assert victim(scores, "21", "31") == "31"


def test_without_counts_recency_decides() -> None:
    policy, history = SparsityAware(THREE), History(THREE)
    assert not scores_after(policy, history, 0, 1).any()


def test_a_finished_request_guides_the_next() -> None:
    policy, history = SparsityAware(THREE), History(THREE)
    for pass_ in range(3):
        for il in range(3):
            scores_after(policy, history, il, 1, pass_=pass_)
    scores = scores_after(policy, history, 0, 1, sequence=1, pass_=3)
    assert policy.eamcs.decode.n_entries == 1
    assert scores[2, 1] > scores[2, 0]


def test_layers_without_experts_have_no_score_and_depth_counts_those_with() -> None:
    shape = MoeShape(n_layer=4, n_expert=2, n_expert_used=1, layers=(1, 3))
    request = np.array([[[0, 0], [1, 0], [0, 0], [1, 0]]], np.float32)
    policy, history = SparsityAware(shape, EamcPair(Eamc(4, 2), Eamc.from_state(request))), History(shape)
    scores_after(policy, history, 1, 0)
    scores = scores_after(policy, history, 3, 0)
    assert scores[1, 0] == pytest.approx(1, rel=1e-4)
    assert scores[3, 0] == pytest.approx(0.5, rel=1e-4)
    assert not scores[[0, 2]].any()
    assert isinstance(policy, Policy)
