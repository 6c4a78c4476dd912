"""Prefetch requests: nearest layer first, within the budget, no expert twice and no resident one."""

import numpy as np
import pytest
from fake_store import ScriptedPredictor
from hypothesis import given
from hypothesis import strategies as st

from moegguf.controller.forecast import Forecast
from moegguf.controller.prefetch import Prefetcher, PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

SHAPE = MoeShape(n_layer=5, n_expert=6, n_expert_used=2, layers=(1, 2, 3, 4), expert_bytes=100)


def probabilities(**rows: list[float]) -> Float32s:
    table = np.zeros(SHAPE.table, np.float32)
    for name, row in rows.items():
        table[int(name[1:])] = row
    return table


def forecast_of(table: Float32s, il: int | None = None, window: int = 4) -> Forecast:
    forecast, predictor = Forecast(SHAPE, window), ScriptedPredictor(lambda il: table[il], shape=SHAPE, reach=9)
    forecast.begin_pass(predictor)
    if il is not None:
        forecast.advance(predictor, il)
    return forecast


def requests_of(prefetcher: Prefetcher, forecast: Forecast, resident: Float32s | None = None) -> list[tuple[int, int]]:
    residency = np.zeros(SHAPE.table, np.uint8) if resident is None else resident.astype(np.uint8)
    layers, experts = prefetcher.requests(forecast, lambda: residency)
    assert layers.dtype == experts.dtype == np.int32
    return list(zip(layers.tolist(), experts.tolist(), strict=True))


SOME = probabilities(l1=[0, 0.9, 0.8, 0.7, 0, 0], l2=[0.3, 0, 0, 0, 0.6, 0], l3=[0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
AMPLE = PrefetchOptions(budget_bytes=10_000)


def test_the_nearest_layer_comes_first_and_in_it_the_likeliest_as_many_as_a_token_uses() -> None:
    assert requests_of(Prefetcher(SHAPE, AMPLE), forecast_of(SOME)) == [(1, 1), (1, 2), (2, 4), (2, 0)]
    assert requests_of(Prefetcher(SHAPE, AMPLE), forecast_of(SOME, il=1)) == [(2, 4), (2, 0)]


def test_by_proximity_a_probable_expert_of_a_far_layer_comes_before_an_improbable_one_of_the_nearest() -> None:
    table = probabilities(l2=[0.2, 0.9, 0, 0, 0, 0], l3=[0, 0, 0.9, 0, 0, 0], l4=[0, 0, 0, 0.9, 0.5, 0])
    ordered = PrefetchOptions(budget_bytes=10_000, least_probability=0, by_proximity=True)
    # times 1, 3/4, 2/4 and 1/4 for layers 1 to 4 after layer 1, the first of four
    assert requests_of(Prefetcher(SHAPE, ordered), forecast_of(table, il=1)) == [(2, 1), (3, 2), (4, 3), (2, 0), (4, 4)]
    two = PrefetchOptions(budget_bytes=200, least_probability=0, by_proximity=True)
    assert requests_of(Prefetcher(SHAPE, two), forecast_of(table, il=1)) == [(2, 1), (3, 2)]


def test_by_proximity_what_is_still_absent_is_requested_again_in_its_new_order() -> None:
    table = probabilities(l2=[0, 0.9, 0, 0, 0, 0], l3=[0, 0, 0.5, 0, 0, 0], l4=[0, 0, 0, 0.9, 0, 0])
    prefetcher = Prefetcher(SHAPE, PrefetchOptions(budget_bytes=10_000, least_probability=0, by_proximity=True))
    assert requests_of(prefetcher, forecast_of(table, il=1)) == [(2, 1), (3, 2), (4, 3)]
    assert requests_of(prefetcher, forecast_of(table, il=2)) == [(4, 3), (3, 2)]
    resident = np.zeros(SHAPE.table, np.float32)
    resident[4, 3] = 1
    table[3, 0] = 0.7
    assert requests_of(prefetcher, forecast_of(table, il=2), resident) == [(3, 0), (3, 2)]


def test_an_expert_of_probability_0_is_never_prefetched() -> None:
    all_ = PrefetchOptions(budget_bytes=10_000, least_probability=0)
    assert requests_of(Prefetcher(SHAPE, all_), forecast_of(probabilities(l1=[0, 0, 0.1, 0, 0, 0]))) == [(1, 2)]


def test_the_budget_is_that_of_a_token() -> None:
    prefetcher = Prefetcher(SHAPE, PrefetchOptions(budget_bytes=399))
    assert len(requests_of(prefetcher, forecast_of(SOME, window=1))) == 2
    assert len(requests_of(prefetcher, forecast_of(SOME, il=1))) == 1
    prefetcher.begin_pass()
    assert len(requests_of(prefetcher, forecast_of(SOME))) == 3


def test_by_default_half_of_what_a_token_uses() -> None:
    everything = np.ones(SHAPE.table, np.float32)
    assert len(requests_of(Prefetcher(SHAPE, PrefetchOptions()), forecast_of(everything))) == 4


@pytest.mark.parametrize("budget_bytes", [0, 99, -1])
def test_without_a_budget_residency_is_not_read(budget_bytes: int) -> None:
    prefetcher = Prefetcher(SHAPE, PrefetchOptions(budget_bytes=budget_bytes))
    layers, _ = prefetcher.requests(forecast_of(SOME), lambda: pytest.fail("requested for nothing"))
    assert layers.size == 0


@given(st.integers(0, 2**32 - 1), st.integers(0, 1500), st.floats(0, 1))
def test_the_rules_hold_whatever_is_predicted(seed: int, budget_bytes: int, least: float) -> None:
    rng = np.random.default_rng(seed)
    prefetcher = Prefetcher(SHAPE, PrefetchOptions(budget_bytes=budget_bytes, least_probability=least))
    for _ in range(2):
        prefetcher.begin_pass()
        requested: list[tuple[int, int]] = []
        for il in (None, 1, 2, 3):
            table, resident = rng.random(SHAPE.table, np.float32), rng.integers(0, 3, SHAPE.table)
            now = requests_of(prefetcher, forecast_of(table, il), resident)
            assert [layer for layer, _ in now] == sorted(layer for layer, _ in now)
            assert all(layer > (il or 0) and table[layer, e] >= least and not resident[layer, e] for layer, e in now)
            requested += now
        assert len(set(requested)) == len(requested) <= budget_bytes // SHAPE.expert_bytes
