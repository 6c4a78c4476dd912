"""How often each request of a context used each expert, from the routing of its own tokens."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.engine.listeners import RoutingListener
from moegguf.engine.session import Session
from moegguf.native.events import RoutingEvent
from moegguf.native.store import ListenOptions

MAX_REQUESTS = 512  # that are counted at once: as many as compute, and those whose last events came after their end


class UseCounter(RoutingListener):
    """Counts the routing of each request by its number in events: the rEAM of MoE-Infinity (section 4.3), prompt and
    answer together. It listens from its construction until `close`; events come some tenths of a second late."""

    listen_options = ListenOptions(lazy=True)  # nobody waits for the counts

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shape = MoeShape.of(session.layout)
        self._lock = threading.Lock()  # events come on another thread
        self._counts: dict[int, npt.NDArray[np.uint32]] = {}
        session.listeners.add(self)

    def observe(self, event: RoutingEvent) -> None:
        """Adds the tokens of each request."""
        row = self._shape.row_of.get(event.il)
        if row is None:
            return
        with self._lock:
            for part in event.parts():
                ids = event.expert_ids[part.rows]
                known = ids[(ids >= 0) & (ids < self._shape.n_expert)]
                self._of(part.sequence)[row] += np.bincount(known, minlength=self._shape.n_expert).astype(np.uint32)

    def _of(self, request: int) -> npt.NDArray[np.uint32]:
        counts = self._counts.pop(request, None)
        if counts is None:
            counts = np.zeros((len(self._shape.layers), self._shape.n_expert), np.uint32)
            for oldest in list(self._counts)[: max(0, len(self._counts) + 1 - MAX_REQUESTS)]:
                del self._counts[oldest]
        self._counts[request] = counts  # last, in order of use
        return counts

    def take(self, request: int) -> npt.NDArray[np.uint32] | None:
        """How many tokens of a request that has ended used each expert (n_moe_layer, n_expert), so far as its events
        have come; it is forgotten then. None: nothing is known."""
        with self._lock:
            return self._counts.pop(request, None)

    def close(self) -> None:
        """Listens no longer."""
        self._session.listeners.remove(self)
