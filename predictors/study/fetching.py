"""FETCHRATE of a predictor (ProMoE, section 4.1), measured: the share of the experts it names that come in time.

The store predicts every layer once, `distance` layers ahead (from the first layer where there is none), and fetches
what is absent over a link, behind what layers wait for. An expert counts when its prediction is made and it is absent;
it is in time when it is there as its layer is routed. What is in the cache counts neither way, so a predictor that
names what is there gains nothing by it. The first layer, which none precedes, is left out.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import numpy.typing as npt

from moegguf.controller.controller import ActingOptions, build_controller
from moegguf.controller.policies import LRU
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.prefetch import NO_LIMIT, PrefetchOptions
from moegguf.native.events import Announcement
from moegguf.native.store import Store
from moegguf.trace.simulate import SimOptions, announce_to, fitted, layout_of
from moegguf.trace.trace import Trace
from predictors.study.accuracy import ratio

THERE = 2  # `Store.residency` has this for an expert that is there


def fetch_rate(trace: Trace, predictor: Predictor, n_slots: int, link: SimOptions, distance: int) -> float | None:
    """Returns FETCHRATE over all layers and passes; None where nothing absent was predicted. The predictor must be
    new."""
    if isinstance(predictor, NoPrediction):
        return None
    prefetch = PrefetchOptions(
        distance, again=False, budget_bytes=NO_LIMIT, least_probability=0.0, watchdog=False, waste_weight=0.0
    )
    predictor.reach = min(predictor.reach, distance)  # a table of tokens knows more layers at once
    layer_ns = round(link.layer_pass_us * 1000)
    per_token_ns = round(link.layer_compute_us * 1000)
    with closing(Store(layout_of(trace.shape), n_slots, link.simulated)) as store:
        acting = ActingOptions(prefetch, strict=True, lockstep=True)
        controller = build_controller(trace.shape, LRU, predictor, store, acting)
        assert controller is not None
        count = _Count(store, trace.shape.n_expert_used)
        for event in fitted(trace, n_slots).events():
            if isinstance(event, Announcement):
                announce_to(store.context, event)
                controller.announce(event)
                count.begin_pass()
                continue
            if event.il != trace.shape.layers[0]:
                count.routed(event.il)
            store.context.acquire(event.il, event.expert_ids, event.inputs)
            controller.observe(event)
            count.predicted()
            store.advance(layer_ns + per_token_ns * len(event.expert_ids))
    return ratio(count.n_in_time, count.n_absent)


class _Count:
    """Counts predicted experts that were absent (just requested, at most), and which of them were there in time."""

    def __init__(self, store: Store, n_expert_used: int) -> None:
        self._store = store
        self._n_expert_used = n_expert_used
        self._wanted: dict[int, npt.NDArray[np.int64]] = {}
        self.n_absent = 0
        self.n_in_time = 0

    def begin_pass(self) -> None:
        """Takes what was predicted from tokens alone."""
        self._wanted.clear()
        self.predicted()

    def predicted(self) -> None:
        """Notes the layers that are newly predicted."""
        probabilities, known = self._store.forecast()
        new = [il for il in np.flatnonzero(known).tolist() if il not in self._wanted]
        if not new:
            return
        residency = self._store.residency()
        for il in new:
            best = np.argsort(-probabilities[il], kind="stable")[: self._n_expert_used]
            self._wanted[il] = best[(probabilities[il, best] > 0) & (residency[il, best] != THERE)]

    def routed(self, il: int) -> None:
        """Counts the layer's predictions, before the layer gets what it needs."""
        wanted = self._wanted.pop(il, None)
        if wanted is None:
            return
        self.n_absent += len(wanted)
        self.n_in_time += int((self._store.residency()[il, wanted] == THERE).sum())
