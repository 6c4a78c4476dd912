#!/usr/bin/env python3
"""What an eviction costs with many slots, for every policy of the store, and how fast a trace is replayed.

python tools/eviction_bench.py
python tools/eviction_bench.py --slots 40000 --layers 94 --experts 512

Transfers are simulated and free. "miss, free slot" is the store's time per miss while the pool fills, "miss, eviction"
the same once it is full; the difference is the eviction, with what it takes to keep experts in order. For "scores", the
row of the layer is written anew at every routing event, and "scores, all" writes the whole table.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from moegguf.controller.shape import MoeShape
from moegguf.native.store import Store, StoreOptions, native_policies
from moegguf.trace.simulate import layout_of

OPTIONS = StoreOptions(repack=False, fill=False, simulate=True, sweep=False)
SCORES, ALL = "scores", "scores, all"


@dataclass
class Bench:
    """Random routing events of one token, layer after layer."""

    shape: MoeShape
    n_slots: int
    n_events: int
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def _ids(self) -> np.ndarray:
        return self._rng.permutation(self.shape.n_expert)[: self.shape.n_expert_used].astype(np.int32)

    def _set_policy(self, store: Store, policy: str) -> None:
        if policy not in (SCORES, ALL):
            store.set_policy(policy)

    def eviction(self, policy: str) -> tuple[float, float]:
        """(µs per miss while the pool fills, µs per miss once every miss evicts)."""
        store = Store(layout_of(self.shape), self.n_slots, OPTIONS)
        self._set_policy(store, policy)
        scores = self._rng.random(self.shape.table, np.float32)
        filling = self._run(store, policy, scores, full=False)
        for n in range(4 * self.shape.n_layer):
            store.context.acquire(n % self.shape.n_layer, self._ids())
        full = self._run(store, policy, scores, full=True)
        store.close()
        return filling, full

    def _run(self, store: Store, policy: str, scores: np.ndarray, *, full: bool) -> float:
        """µs per miss, the median over passes: other programs on the machine disturb some of them."""
        times: list[float] = []
        while len(times) * self.shape.n_layer < self.n_events if full else self._fits(store):
            before = store.counters()
            for il in range(self.shape.n_layer):
                if policy in (SCORES, ALL):
                    part = slice(None) if policy == ALL else il
                    scores[part] = self._rng.random(scores[part].shape, np.float32)
                    store.set_scores(scores)
                store.context.acquire(il, self._ids())
            after = store.counters()
            times.append((after["hook_ns"] - before["hook_ns"]) / 1000 / max(1, after["misses"] - before["misses"]))
        return float(np.median(times))

    def _fits(self, store: Store) -> bool:
        """Whether another pass finds free slots for all of its misses."""
        return store.counters()["slots_used"] + self.shape.n_layer * self.shape.n_expert_used <= self.n_slots

    def replay(self, policy: str, n_lookups: int = 1_000_000) -> float:
        """Seconds for a million lookups of routing events in bulk."""
        shape = self.shape
        n = n_lookups // shape.n_expert_used
        store = Store(layout_of(shape), self.n_slots, OPTIONS)
        self._set_policy(store, policy)
        il = np.arange(n, dtype=np.int32) % shape.n_layer
        few = np.stack([self._ids() for _ in range(4096)])
        ids = few[self._rng.integers(0, len(few), n)]
        start = time.perf_counter()
        store.context.replay(il, np.ones(n, np.int32), np.full(n, shape.n_expert_used, np.int32), ids.ravel())
        seconds = time.perf_counter() - start
        store.close()
        return seconds * 1e6 / (n * shape.n_expert_used)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("slots", 10_000), ("layers", 64), ("experts", 256), ("used", 8), ("events", 4000)):
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args()
    shape = MoeShape(args.layers, args.experts, args.used, tuple(range(args.layers)), 64, 1000, expert_bytes=3000)
    bench = Bench(shape, args.slots, args.events)
    print(f"{args.slots} slots, {args.layers} layers of {args.experts} experts, {args.used} per token")
    print(f"{'policy':18} {'miss, free slot':>16} {'miss, eviction':>16} {'an eviction':>12} {'1e6 lookups':>12}")
    for policy in (*native_policies(), SCORES, ALL):
        free, full = bench.eviction(policy)
        million = f"{bench.replay(policy):>10.2f} s" if policy != ALL else ""
        print(f"{policy:18} {free:>13.2f} µs {full:>13.2f} µs {full - free:>9.2f} µs {million}")


if __name__ == "__main__":
    main()
