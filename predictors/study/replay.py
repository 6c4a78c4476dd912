"""A replay that is counted pass by pass, and a baseline that is no policy: every expert of the next layer, ahead.

The simulator itself counts by request and phase; a latency at the 99th percentile, and the time to a first token, need
each pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.controller.controller import Controller
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import Store
from moegguf.trace.simulate import Simulation

COUNTED = (
    "lookups", "hits_ready", "hits_late", "stall_ns", "bytes_missed", "bytes_prefetched", "prefetch_started",
    "prefetch_useful", "prefetch_late", "sim_clock_ns",
)  # fmt: skip


class NextLayer(Controller):
    """SE-MoE's and MoESys's way: once a layer has been routed, the whole next layer is fetched, and nothing is
    predicted. The first layer follows the last."""

    def __init__(self, shape: MoeShape, store: Store) -> None:
        self._store = store
        self._experts = np.arange(shape.n_expert, dtype=np.int32)
        self._following = dict(zip(shape.layers, np.roll(shape.layers, -1).tolist(), strict=True))

    def announce(self, announcement: Announcement) -> None:
        """Nothing depends on the tokens."""

    def observe(self, event: RoutingEvent) -> None:
        """Requests all of the layer that follows."""
        self._store.prefetch(np.full_like(self._experts, self._following[event.il]), self._experts)


class Replay(Simulation):
    """`next_layer`: with that baseline in place of a predictor."""

    next_layer = False

    def counted(self) -> dict[str, npt.NDArray[np.int64]]:
        """{each of COUNTED: (n_pass,) what one pass added to it}, of the passes of `self.trace`. Raises as `run`."""
        self._noted: list[dict[str, int]] = []
        result = self.run()
        noted = np.array([[of[name] for name in COUNTED] for of in (*self._noted, result.counters)], np.int64)
        return dict(zip(COUNTED, (noted[1:] - noted[:-1]).T, strict=True))

    def passes(self, sequence: int, phase: Phase) -> npt.NDArray[np.bool_]:
        """(n_pass,): which belong to a request, or to those decoded together with it, in one phase."""
        return np.asarray((self.trace.pass_sequence == sequence) & (self.trace.pass_phase == phase))

    def _controller(self, store: Store) -> Controller | None:
        self._store = store
        return NextLayer(self.trace.shape, store) if self.next_layer else super()._controller(store)

    def _replay_passes(self, context: Any, meter: Any) -> None:
        self._note_passes(meter)
        super()._replay_passes(context, meter)

    def _replay_events(self, store: Store, controller: Controller | None, meter: Any) -> None:
        self._note_passes(meter)
        super()._replay_events(store, controller, meter)

    def _note_passes(self, meter: Any) -> None:
        """Notes the store's counters whenever a pass begins."""
        begin = meter.begin

        def noting(*of_pass: Any) -> None:
            begin(*of_pass)
            self._noted.append(self._store.counters())

        meter.begin = noting
