"""Random routing on a device whose memory is not the host's."""

from __future__ import annotations

import numpy as np
from fake_model import FakeModel

from moegguf.native.store import Store, StoreOptions


def random_events(fake: FakeModel, n_slots: int, device: str) -> dict[str, int]:
    """Random events and prefetches with checked bytes; the counters afterwards."""
    store = Store(fake.layout, n_slots, StoreOptions(device=device))
    lane = store.open_lane()
    try:
        assert store.info()["n_repacked"] == 0
        rng = np.random.default_rng(0)
        for n in range(120):
            fake.acquire(store, lane, n % 4, rng.permutation(8)[:2])
            store.prefetch([(n + 1) % 4] * 2, rng.permutation(8)[:2])
        if n_slots == 32:
            store.resize(9)
            for n in range(40):
                fake.acquire(store, lane, n % 4, rng.permutation(8)[:2])
        store.drain(10)
        return store.counters()
    finally:
        lane.close()
        store.close()
