"""Keeps, in the folder of computed contexts, the ids of the experts that the last token
of a model's latest prompt used.

These experts are prefetched when the model is reloaded, so that a continued
conversation waits for fewer experts.
"""

from __future__ import annotations

import numpy as np

from moegguf.engine.kv_block_store import KvBlockStore
from moegguf.engine.session import RoutingListener, Session
from moegguf.gguf.fingerprint import header_digest
from moegguf.native.events import RoutingEvent
from moegguf.native.store import ListenOptions


class RecentExperts(RoutingListener):
    """Keeps the recent experts of one model in the block `name`.

    The constructor prefetches the kept experts; it is called before the weights are
    read. Between `begin` and `end`, the object records the experts that the last token
    of each pass used.
    """

    listen_options = ListenOptions(lazy=True)

    def __init__(self, session: Session, store: KvBlockStore) -> None:
        self._session = session
        self.name = f"{header_digest(session.layout.shards)}-experts"
        # {layer: experts that the last recorded token used}.
        self._used = dict[int, list[int]]()
        if store.holds(self.name) and (found := store.read(self.name)) is not None:
            session.store.prefetch(*np.frombuffer(found, np.int32).reshape(2, -1))

    def begin(self) -> None:
        """Starts recording experts before a prompt is evaluated. A second call does
        nothing."""
        self._session.listeners.remove(self)
        self._session.listeners.add(self)

    def observe(self, event: RoutingEvent) -> None:
        """Records the experts that the event's last token uses in the event's layer."""
        self._used[event.il] = event.expert_ids[-1].tolist()

    def end(self) -> memoryview | None:
        """Stops recording experts after a prompt. Returns the bytes to store in the
        block `name`; None if nothing was recorded."""
        self._session.listeners.remove(self)
        used = sorted(self._used.items())
        self._used = {}
        pairs = [(il, expert) for il, experts in used for expert in experts]
        return np.array(pairs, np.int32).T.copy().data.cast("B") if pairs else None
