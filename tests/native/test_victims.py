"""The store's indexed eviction against a scan over all slots: the same slots, event for event, for every policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegguf.controller.shape import MoeShape
from moegguf.native.store import Lane, Store, StoreOptions
from moegguf.trace.simulate import layout_of

Float32s = npt.NDArray[np.float32]
Expert = tuple[int, int]
Rank = tuple[np.float32, int, int]
ZERO, ONE, LEAST = np.float32(0), np.float32(1), np.float32(1e-4)
# Halves are exact in any arithmetic.
SCANNED = ("lru", "lfu-decay", "next-use", "scores")  # policies that Scan knows
PARAMETERS: dict[str, dict[str, Any]] = {
    "next-use": {"half_lives_tokens": 1.0, "weights": 1.0, "distance_weight": 1.0},
    "lfu-decay": {"half_life_tokens": 1.0},
}


@dataclass
class Held:
    expert: Expert
    last_use: int


@dataclass
class Scan:
    """A store that finds its victims by looking at every slot."""

    shape: MoeShape
    n_usable: int
    policy: str
    scores: Float32s | None = None
    slots: list[Held | None] = field(init=False)
    pinned: set[int] = field(default_factory=set)
    moment: tuple[int, bool, bool] = (0, False, False)  # il, sweep, token
    resize_to: int = 0
    tick: int = 0
    evictions: int = 0

    def __post_init__(self) -> None:
        self.slots = [None] * self.n_usable
        self.set_policy(self.policy)

    def set_policy(self, name: str) -> None:
        self.policy = name
        self.average: Float32s = np.zeros(self.shape.table, np.float32)

    def ordered(self) -> bool:
        return self.scores is not None or (self.policy in PARAMETERS and self.moment[2])

    def score(self, expert: Expert) -> np.float32:
        if self.scores is not None:
            return self.scores[expert]
        if self.policy == "next-use":
            return ONE - ONE / max(self.average[expert], LEAST)
        return self.average[expert]

    def offset(self, il: int) -> np.float32:
        if self.scores is not None or self.policy != "next-use":
            return ZERO
        row, now, n = self.shape.row_of[il], self.shape.row_of[self.moment[0]], len(self.shape.layers)
        ahead = row - now
        return -(np.float32(ahead if ahead > 0 else ahead + n) / np.float32(n))

    def floors(self) -> dict[int, int]:
        layers, share = list(self.shape.layers), {}
        left = max(0, self.n_usable - self.shape.n_expert_used)
        if self.n_usable >= len(layers) * self.shape.n_expert_used:
            left = 0
        for n, il in enumerate(layers):
            share[il] = left // (len(layers) - n)
            left -= share[il]
        return share

    def victim(self) -> int:
        free = [s for s in range(self.n_usable) if self.slots[s] is None]
        if free:
            return free[0]
        il_now, sweep, _ = self.moment
        floors, n_layer, ranks = self.floors(), self.shape.n_layer, dict[int, tuple[bool, Rank, int]]()
        for il in self.shape.layers:
            held = [(s, h) for s, h in enumerate(self.slots) if h is not None and h.expert[0] == il]
            evictable = [(s, h) for s, h in held if s not in self.pinned and s < self.n_usable]
            if not evictable:
                continue
            s, first = min(
                evictable, key=lambda p: (self.score(p[1].expert) if self.ordered() else ZERO, p[1].last_use)
            )
            distance = (il - il_now) % n_layer
            rank = (
                self.score(first.expert) + self.offset(il) if self.ordered() else ZERO,
                -(distance or n_layer) if sweep else 0,
                first.last_use,
            )
            ranks[il] = (len(held) <= floors[il], rank, s)
        return min(ranks.values())[2] if ranks else -1

    def take(self, expert: Expert, below: np.float32 | None = None) -> int:
        s = self.victim()
        if s < 0:
            return -1
        old = self.slots[s]
        if old is not None:
            if below is not None and not self.score(old.expert) + self.offset(old.expert[0]) < below:
                return -1
            self.evictions += 1
        self.tick += 1
        self.slots[s] = Held(expert, self.tick)
        return s

    def find(self, expert: Expert) -> int:
        return next((s for s, held in enumerate(self.slots) if held is not None and held.expert == expert), -1)

    def acquire(self, il: int, ids: npt.NDArray[np.int32]) -> list[list[int]]:
        self.pinned = set()
        self._resize()
        self.moment = (il, len(ids) > 1 and ids.size >= 4 * self.shape.n_expert, len(ids) == 1)
        distinct = list(dict.fromkeys(ids.ravel().tolist()))
        places = {e: self.find((il, e)) for e in distinct}
        for s in (s for s in places.values() if s >= 0):
            self.tick += 1
            self.slots[s].last_use = self.tick  # type: ignore[union-attr]
            self.pinned.add(s)
        for e in distinct:
            if places[e] < 0:
                places[e] = self.take((il, e))
                self.pinned.add(places[e])
        kept = np.exp2(np.float32(-len(ids)))
        self.average[il] *= kept
        for e in ids.ravel():
            self.average[il, e] += (ONE - kept) / np.float32(len(ids))
        return [[places[e] for e in row] for row in ids.tolist()]

    def _resize(self) -> None:
        if self.resize_to:
            self.n_usable, self.resize_to = self.resize_to, 0
            for s in range(self.n_usable, len(self.slots)):
                self.evictions += self.slots[s] is not None
                self.slots[s] = None

    def prefetch(self, expert: Expert) -> None:
        if self.find(expert) < 0:
            self.take(expert, self.score(expert) + self.offset(expert[0]) if self.ordered() else None)

    def residency(self) -> npt.NDArray[np.uint8]:
        there = np.zeros(self.shape.table, np.uint8)
        for held in self.slots:
            if held is not None:
                there[held.expert] = 2
        return there


def route(rng: np.random.Generator, scan: Scan, shape: MoeShape, n_tokens: int) -> npt.NDArray[np.int32]:
    """Ids that fit in the slots; uneven, so that some experts stay."""
    most = scan.resize_to or scan.n_usable
    some = np.sort(rng.permutation(shape.n_expert)[:most])
    weights = 1 / (1 + np.arange(some.size))
    one = [rng.choice(some, shape.n_expert_used, replace=False, p=weights / weights.sum()) for _ in range(n_tokens)]
    return np.array(one, np.int32)


def disturb(rng: np.random.Generator, store: Store, scan: Scan, shape: MoeShape) -> None:
    """Now and then a prefetch, another table or policy, another size."""
    for _ in range(rng.integers(0, 3)):
        expert = int(rng.choice(shape.layers)), int(rng.integers(shape.n_expert))
        store.prefetch([expert[0]], [expert[1]])
        store.drain(1)
        scan.prefetch(expert)
    draw = rng.random()
    if draw < 0.1:
        scan.scores = rng.integers(0, 4, shape.table).astype(np.float32) if rng.random() < 0.6 else None
        store.set_scores(scan.scores)
    elif draw < 0.13:
        scan.set_policy(str(rng.choice(SCANNED)))
        store.set_policy(scan.policy, **PARAMETERS.get(scan.policy, {}))
    elif draw < 0.16:
        scan.resize_to = int(rng.integers(shape.n_expert_used, len(scan.slots) + 1))
        store.resize(scan.resize_to)


def compare(seed: int, policy: str, store: Store, lane: Lane, scan: Scan, shape: MoeShape, n_passes: int) -> None:
    rng = np.random.default_rng(seed)
    store.set_policy(policy, **PARAMETERS.get(policy, {}))
    for pass_ in range(n_passes):
        n_tokens = int(rng.choice([1, 1, 1, 1, 2, 4 * shape.n_expert]))
        for il in shape.layers:
            ids = route(rng, scan, shape, n_tokens)
            slots = lane.acquire(il, ids)
            assert slots.tolist() == scan.acquire(il, ids), (pass_, il)
            assert np.array_equal(store.residency(), scan.residency()), (pass_, il)
            disturb(rng, store, scan, shape)
    assert store.counters()["evictions"] == scan.evictions


@pytest.mark.parametrize("policy", SCANNED)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), n_layer=st.integers(1, 5), n_expert=st.integers(2, 9), data=st.data())
def test_the_same_slots_as_a_scan_over_all(
    policy: str, seed: int, n_layer: int, n_expert: int, data: st.DataObject
) -> None:
    layers = tuple(sorted(data.draw(st.sets(st.integers(0, n_layer - 1), min_size=1))))
    n_used = data.draw(st.integers(1, min(3, n_expert)))
    n_slots = data.draw(st.integers(n_used, max(n_used, len(layers) * n_expert - 1)))
    shape = MoeShape(n_layer, n_expert, n_used, layers, 8, 8, expert_bytes=3)
    if n_slots == len(layers) * n_expert:
        return  # resident: nothing is evicted
    store = Store(layout_of(shape), n_slots, StoreOptions(repack=False, fill=False, simulate=True, sweep=False))
    lane = store.open_lane()
    try:
        compare(seed, policy, store, lane, Scan(shape, n_slots, policy), shape, n_passes=12)
    finally:
        lane.close()
        store.close()
