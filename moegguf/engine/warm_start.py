"""Warm start: what earlier runs of a model used most is fetched when it is loaded, so that its first tokens hit, too.

They go into free slots only, behind everything that a layer waits for: those used most into the tier that layers
compute on, the next ones into RAM below it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.shape import MoeShape
from moegguf.engine.session import Session
from moegguf.native.events import Int32s

HALF_LIFE_PASSES = 4096  # passes after which a use counts half as much


def start_warm(session: Session, artifacts: Artifacts) -> None:
    """Asks for the experts used most, as many as the tiers have slots. A pool of every expert fills itself."""
    store = session.store
    uses = None if store.info()["resident"] else artifacts.uses(MoeShape.of(session.layout))
    if uses is not None:
        store.warm(*most_used(uses, sum(store.tier(tier)["n_slots_usable"] for tier in store.tiers)))


def save_uses(session: Session, artifacts: Artifacts) -> None:
    """Adds the uses since the model was loaded to the uses of earlier runs, and saves them.

    The uses of a pool with a slot for every expert are not known.
    """
    store, shape = session.store, MoeShape.of(session.layout)
    passes = store.counters()["passes"]
    if passes == 0 or store.info()["resident"]:
        return
    now, before = store.activity()[0].astype(np.float32), artifacts.uses(shape)
    if before is not None:
        now += before * np.float32(0.5 ** (passes / HALF_LIFE_PASSES))
    artifacts.save_uses(shape, now)


def most_used(uses: npt.NDArray[np.float32], n: int) -> tuple[Int32s, Int32s]:
    """Returns (layers, experts) of up to n experts, the most used first, without those that were never used. `uses` is
    (n_layer, n_expert)."""
    order = np.argsort(uses, axis=None, kind="stable")[::-1][: min(n, int(np.count_nonzero(uses)))]
    il, experts = np.unravel_index(order, uses.shape)
    return il.astype(np.int32), experts.astype(np.int32)
