"""Predictive locality-aware caching with correction: which experts the store gives up, at which routing event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from moegguf.controller.policies.base import LOCALITY
from moegguf.controller.shape import MoeShape
from moegguf.native.store import Lane, Store, StoreOptions
from moegguf.trace.simulate import layout_of

PAPER = MoeShape(n_layer=4, n_expert=4, n_expert_used=2, layers=(0, 1, 2, 3))  # the example of section 3.2.1
Expert = tuple[int, int]


class Pool:
    """A simulated store that evicts by the policy, and what a controller would do to it."""

    def __init__(self, n_slots: int) -> None:
        self.store = Store(
            layout_of(PAPER), n_slots, StoreOptions(repack=False, fill=False, simulate=True, sweep=False)
        )
        self.store.set_policy(LOCALITY.name, **LOCALITY.parameters)
        self.lane = Lane(self.store)

    def route(self, il: int, *experts: int) -> set[Expert]:
        """The router of layer `il` chooses these; returns the experts that lost their slots for them."""
        before = self.there()
        self.lane.acquire(il, [list(experts)])
        return before - self.there()

    def predict(self, **layers: Sequence[int]) -> None:
        """l1=(0, 2): the experts 0 and 2 of layer 1 are predicted."""
        statuses = np.zeros(PAPER.table, np.float32)
        for name, experts in layers.items():
            statuses[int(name[1:]), list(experts)] = 1
        self.store.set_forecast(statuses, [int(name[1:]) for name in layers])

    def prefetch(self, *experts: Expert) -> None:
        il, ids = zip(*experts, strict=True)
        self.store.prefetch(np.array(il, np.int32), np.array(ids, np.int32))
        self.store.drain()

    def there(self) -> set[Expert]:
        return {(int(il), int(expert)) for il, expert in np.argwhere(self.store.residency() == 2)}

    def close(self) -> None:
        self.lane.close()
        self.store.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


def test_a_mispredicted_expert_goes_first_at_the_routing_event_that_shows_it(pool: Pool) -> None:
    pool.route(0, 0, 1)
    pool.predict(l1=(0, 1), l2=(0, 1), l3=(0, 1))
    pool.prefetch((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
    assert len(pool.there()) == 8
    assert pool.route(1, 0, 2) == {(1, 1)}  # predicted and not chosen: before completed ones and those to come


def test_then_those_that_have_completed_go_and_of_the_predicted_the_farthest(pool: Pool) -> None:
    pool.route(0, 0, 1)
    pool.predict(l1=(0, 1), l2=(0, 1), l3=(0, 1))
    pool.prefetch((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
    assert pool.route(1, 2, 3) == {(1, 0), (1, 1)}
    assert pool.route(2, 2, 3) == {(2, 0), (2, 1)}
    assert pool.route(3, 2, 0) == {(3, 1)}
    pool.predict(l0=(0, 1), l1=(2, 3), l2=(2, 3), l3=(2, 0))  # the next token
    assert pool.route(0, 2, 3) <= {(0, 0), (0, 1), (3, 0), (3, 2)}


def test_a_misprediction_does_not_evict_a_hot_expert(pool: Pool) -> None:
    for _ in range(8):
        for il in range(4):
            pool.route(il, 0, 1)
    pool.predict(l1=(0, 1, 3))
    pool.prefetch((1, 3))
    assert pool.route(1, 1, 2) == {(1, 3)}  # 0 and 3 were predicted and not chosen
    assert (1, 0) in pool.there()


def test_without_predictions_it_is_decayed_frequency(pool: Pool) -> None:
    for _ in range(6):
        for il in range(4):
            pool.route(il, 0, 1)
    for il in range(4):
        pool.route(il, 2, 3)  # once each
    for il in range(4):
        pool.route(il, 0, 1)
    assert pool.there() == {(il, expert) for il in range(4) for expert in (0, 1)}
