"""Warm start: when a model is loaded, fetches the experts that its earlier runs used
most, so that the first tokens find their experts in slots.

These experts use only free slots. Reads for which a layer waits come before the reads
of a warm start. The most used experts go into the tier that layers read experts from,
and the next most used ones into RAM below.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.shape import MoeShape
from moegguf.engine.session import Session
from moegguf.native.events import Int32s

# Number of passes in a run after which the uses of earlier runs have half their weight.
HALF_LIFE_PASSES = 4096


def start_warm(session: Session, artifacts: Artifacts) -> None:
    """Requests the most used experts, up to the number of slots in all tiers together.
    Does nothing if no uses are known, or if every expert has a slot, because such slots
    are filled anyway."""
    store = session.store
    uses = (
        None
        if store.info()["resident"]
        else artifacts.uses(MoeShape.of(session.layout))
    )
    if uses is not None:
        store.warm(
            *most_used(
                uses, sum(store.tier(tier)["n_slots_usable"] for tier in store.tiers)
            )
        )


def save_uses(session: Session, artifacts: Artifacts) -> None:
    """Adds the counts of expert uses since the model was loaded to the counts of
    earlier runs, and saves the sums. The weight of earlier runs decreases with each
    pass.

    Does nothing if there was no pass, or if every expert has a slot, because uses are
    then not known.
    """
    store = session.store
    shape = MoeShape.of(session.layout)
    passes = store.counters()["passes"]
    if passes == 0 or store.info()["resident"]:
        return
    now = store.activity()[0].astype(np.float32)
    before = artifacts.uses(shape)
    if before is not None:
        now += before * np.float32(0.5 ** (passes / HALF_LIFE_PASSES))
    artifacts.save_uses(shape, now)


def most_used(uses: npt.NDArray[np.float32], n: int) -> tuple[Int32s, Int32s]:
    """Returns (layers, experts) of up to n experts, the most used first, without
    experts that were never used. uses: number of uses, shape (n_layer, n_expert)."""
    order = np.argsort(uses, axis=None, kind="stable")[::-1][
        : min(n, int(np.count_nonzero(uses)))
    ]
    il, experts = np.unravel_index(order, uses.shape)
    return il.astype(np.int32), experts.astype(np.int32)
