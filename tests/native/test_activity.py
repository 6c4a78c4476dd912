"""How often each expert was looked up and loaded: what live maps are drawn from."""

from __future__ import annotations

from fake_model import FakeModel, Open


def test_activity_counts_look_ups_and_slots_per_expert(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 8)
    for experts in ([0, 1], [0, 2], [0, 1]):
        fake.token(store, lane, experts)
    uses, loads = store.activity()
    counters = store.counters()
    assert uses.shape == loads.shape == store.shape
    assert uses[0].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]
    assert uses.sum() == counters["lookups"]
    assert loads.sum() == counters["misses"]


def test_an_expert_that_was_evicted_and_came_back_counts_as_two_loads(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 2)
    for expert in (0, 1, 2, 0):
        fake.acquire(store, lane, 0, [[expert]])
    assert store.activity()[1][0].tolist()[:3] == [2, 1, 1]


def test_watching_can_be_turned_on_and_off(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 32)
    store.watch(True)
    fake.token(store, lane, [1, 5])
    store.watch(False)
    assert store.activity()[0].sum() == store.counters()["lookups"] == 8
