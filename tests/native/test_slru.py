"""Segmented LRU in the store: what was used again outlives what was used once, within its share of the layer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel, Open, make_model
from traces import random_trace

from moegguf.controller.predictors.base import NoPrediction
from moegguf.errors import OptionError
from moegguf.native.store import NativePolicy, Store
from moegguf.trace.belady import Lookups, belady
from moegguf.trace.simulate import SimOptions, Simulation


@pytest.fixture
def one(tmp_path: Path) -> FakeModel:
    """One layer of 8 experts, one of which a token uses."""
    return make_model(tmp_path, n_layer=1, n_used=1)


def resident_after(
    one: FakeModel, open_store: Open, experts: Iterable[int], share: float, n_slots: int = 3
) -> set[int]:
    store, lane = open_store(one, n_slots)
    store.set_policy("slru", protected_share=share)
    for expert in experts:
        one.acquire(store, lane, 0, [[expert]])
    return resident(store)


def resident(store: Store) -> set[int]:
    return set(np.flatnonzero(store.residency()[0] == 2).tolist())


def test_used_again_outlives_used_once(one: FakeModel, open_store: Open) -> None:
    assert resident_after(one, open_store, [0, 0, 1, 2, 3], 0.8) == {0, 2, 3}
    assert resident_after(one, open_store, [0, 0, 1, 2, 3], 0.0) == {1, 2, 3}  # nothing is protected: LRU


def test_the_protected_segment_gives_up_its_least_recent_expert(one: FakeModel, open_store: Open) -> None:
    """With one of three protected, 1 takes the place of 0, which then goes before 2."""
    assert resident_after(one, open_store, [0, 0, 1, 1, 2, 3], 0.3) == {1, 2, 3}
    assert resident_after(one, open_store, [0, 0, 1, 1, 2, 3], 0.7) == {0, 1, 3}


def test_what_was_evicted_starts_on_probation(one: FakeModel, open_store: Open) -> None:
    story = [0, 0, 1, 1, 2, 3, 0, 4, 5]  # 0 is evicted for 3, comes back, and is not protected by its earlier uses
    assert resident_after(one, open_store, story, 0.3) == {1, 4, 5}


def test_a_share_outside_of_0_to_1_is_refused(one: FakeModel, open_store: Open) -> None:
    store, _ = open_store(one, 3)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(OptionError, match="protected share"):
            store.set_policy("slru", protected_share=share)


@pytest.mark.parametrize("n_slots", [9, 20, 40])
def test_it_replays_alike_each_time_and_stays_below_belady(n_slots: int) -> None:
    trace = random_trace(n_sequences=6, n_prefill=6, n_decode=40)
    shape = trace.shape
    first, again = (
        Simulation(trace, NativePolicy("slru"), NoPrediction(shape), n_slots, SimOptions()).run() for _ in range(2)
    )
    assert first == again
    assert 0 < first.hit_rate <= belady(Lookups.of(trace), n_slots).hit_rate
