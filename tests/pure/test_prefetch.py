"""What is asked for ahead: nearest layer first, within the budget, nothing twice and nothing that is there."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegguf.controller.forecast import Forecast
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import Prefetcher, PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

SHAPE = MoeShape(n_layer=5, n_expert=6, n_expert_used=2, layers=(1, 2, 3, 4), expert_bytes=100)


class Table(Predictor):
    """Says the same of a layer at every distance."""

    name: ClassVar[str] = "table"

    def __init__(self, table: Float32s) -> None:
        super().__init__(SHAPE, reach=9)
        self.table = table

    def predict(self, il: int, distance: int) -> Float32s | None:
        return self.table[il]


def probabilities(**rows: list[float]) -> Float32s:
    table = np.zeros(SHAPE.table, np.float32)
    for name, row in rows.items():
        table[int(name[1:])] = row
    return table


def ahead_of(table: Float32s, il: int | None = None, window: int = 4) -> Forecast:
    ahead, predictor = Forecast(SHAPE, window), Table(table)
    ahead.begin_pass(predictor)
    if il is not None:
        ahead.advance(predictor, il)
    return ahead


def wishes(prefetcher: Prefetcher, ahead: Forecast, there: Float32s | None = None) -> list[tuple[int, int]]:
    residency = np.zeros(SHAPE.table, np.uint8) if there is None else there.astype(np.uint8)
    layers, experts = prefetcher.requests(ahead, lambda: residency)
    assert layers.dtype == experts.dtype == np.int32
    return list(zip(layers.tolist(), experts.tolist(), strict=True))


SOME = probabilities(l1=[0, 0.9, 0.8, 0.7, 0, 0], l2=[0.3, 0, 0, 0, 0.6, 0], l3=[0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
AMPLE = PrefetchOptions(budget_bytes=10_000)


def test_the_nearest_layer_comes_first_and_in_it_the_likeliest_as_many_as_a_token_uses() -> None:
    assert wishes(Prefetcher(SHAPE, AMPLE), ahead_of(SOME)) == [(1, 1), (1, 2), (2, 4), (2, 0)]
    assert wishes(Prefetcher(SHAPE, AMPLE), ahead_of(SOME, il=1)) == [(2, 4), (2, 0)]


def test_what_is_less_likely_than_the_least_is_not_worth_it() -> None:
    picky = PrefetchOptions(budget_bytes=10_000, least_probability=0.5)
    assert wishes(Prefetcher(SHAPE, picky), ahead_of(SOME)) == [(1, 1), (1, 2), (2, 4)]


@pytest.mark.parametrize("state", [1, 2])
def test_what_is_there_or_on_its_way_costs_nothing(state: int) -> None:
    there = np.zeros(SHAPE.table, np.float32)
    there[1, 1] = there[2, 4] = state
    two = PrefetchOptions(budget_bytes=200)
    assert wishes(Prefetcher(SHAPE, two), ahead_of(SOME), there) == [(1, 2), (2, 0)]


def test_nothing_is_asked_for_twice_in_a_pass() -> None:
    prefetcher = Prefetcher(SHAPE, AMPLE)
    assert wishes(prefetcher, ahead_of(SOME))
    assert wishes(prefetcher, ahead_of(SOME)) == []
    prefetcher.begin_pass()
    assert wishes(prefetcher, ahead_of(SOME))[0] == (1, 1)


def test_the_budget_is_that_of_a_token() -> None:
    prefetcher = Prefetcher(SHAPE, PrefetchOptions(budget_bytes=399))
    assert len(wishes(prefetcher, ahead_of(SOME, window=1))) == 2
    assert len(wishes(prefetcher, ahead_of(SOME, il=1))) == 1
    prefetcher.begin_pass()
    assert len(wishes(prefetcher, ahead_of(SOME))) == 3


def test_by_default_half_of_what_a_token_uses() -> None:
    everything = np.ones(SHAPE.table, np.float32)
    assert len(wishes(Prefetcher(SHAPE, PrefetchOptions()), ahead_of(everything))) == 4


@pytest.mark.parametrize("budget_bytes", [0, 99, -1])
def test_without_a_budget_residency_is_not_even_looked_at(budget_bytes: int) -> None:
    prefetcher = Prefetcher(SHAPE, PrefetchOptions(budget_bytes=budget_bytes))
    layers, _ = prefetcher.requests(ahead_of(SOME), lambda: pytest.fail("asked for nothing"))
    assert layers.size == 0


@given(st.integers(0, 2**32 - 1), st.integers(0, 1500), st.floats(0, 1))
def test_the_rules_hold_whatever_is_predicted(seed: int, budget_bytes: int, least: float) -> None:
    rng = np.random.default_rng(seed)
    prefetcher = Prefetcher(SHAPE, PrefetchOptions(budget_bytes=budget_bytes, least_probability=least))
    for _ in range(2):
        prefetcher.begin_pass()
        asked: list[tuple[int, int]] = []
        for il in (None, 1, 2, 3):
            table, there = rng.random(SHAPE.table, np.float32), rng.integers(0, 3, SHAPE.table)
            now = wishes(prefetcher, ahead_of(table, il), there)
            assert [layer for layer, _ in now] == sorted(layer for layer, _ in now)
            assert all(layer > (il or 0) and table[layer, e] >= least and not there[layer, e] for layer, e in now)
            asked += now
        assert len(set(asked)) == len(asked) <= budget_bytes // SHAPE.expert_bytes
