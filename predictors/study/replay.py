"""A replay with counts for each pass, and a baseline that prefetches the whole next
layer without a predictor. The simulator itself counts only by request and phase. The
99th percentile of latencies and the time to the first token can be computed only from
counts for each pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moegguf.controller.controller import Controller
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Bools, Int64s, Phase, RoutingEvent
from moegguf.native.store import Store
from moegguf.trace.simulate import Meter, Simulation

COUNTED = (
    "lookups", "hits_ready", "hits_late", "stall_ns", "bytes_missed", "bytes_prefetched", "prefetch_started",
    "prefetch_useful", "prefetch_late", "sim_clock_ns",
)  # fmt: skip


class NextLayer(Controller):
    """The method of SE-MoE and MoESys: when a layer has been routed, prefetches all
    experts of the next layer.

    It makes no predictions. After the last MoE layer, the experts of the first one are
    prefetched.
    """

    def __init__(self, shape: MoeShape, store: Store) -> None:
        self._store = store
        self._experts = np.arange(shape.n_expert, dtype=np.int32)
        self._following = dict(
            zip(shape.layers, np.roll(shape.layers, -1).tolist(), strict=True)
        )

    def announce(self, announcement: Announcement) -> None:
        """Does nothing, because the method does not depend on the tokens."""

    def observe(self, event: RoutingEvent) -> None:
        """Prefetches all experts of the MoE layer that follows the event's layer."""
        self._store.prefetch(
            np.full_like(self._experts, self._following[event.il]), self._experts
        )


class NotingMeter(Meter):
    """A meter that also keeps the store's counters at the beginning of each pass."""

    def __init__(self, store: Store, expert_bytes: int) -> None:
        super().__init__(store, expert_bytes)
        self.counters_before: list[dict[str, int]] = []

    def begin(self, *of_pass: Any) -> None:
        """Counts a pass before its first routing event."""
        super().begin(*of_pass)
        self.counters_before.append(self.store.counters())


class Replay(Simulation):
    """A replay with counts for each pass. If `next_layer` is True, `NextLayer` replaces
    the controller and its predictor."""

    next_layer = False

    def counted(self) -> dict[str, Int64s]:
        """Runs the replay. Returns {name in COUNTED: (n_pass,)}: the growth of each
        counter in each pass. Raises the errors of `run`."""
        result = self.run()
        counters = (*self._noting.counters_before, result.counters)
        noted = np.array([[of[name] for name in COUNTED] for of in counters], np.int64)
        return dict(zip(COUNTED, (noted[1:] - noted[:-1]).T, strict=True))

    def passes(self, sequence: int, phase: Phase) -> Bools:
        """Returns a mask (n_pass,): True for each pass of this phase whose first
        request is `sequence`."""
        return np.asarray(
            (self.trace.pass_sequence == sequence) & (self.trace.pass_phase == phase)
        )

    def _controller(self, store: Store) -> Controller | None:
        return (
            NextLayer(self.trace.shape, store)
            if self.next_layer
            else super()._controller(store)
        )

    def _meter(self, store: Store) -> NotingMeter:
        self._noting = NotingMeter(store, self.trace.shape.expert_bytes)
        return self._noting
