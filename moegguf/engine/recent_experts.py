"""The experts that the last token of a model's latest prompt used, kept beside its contexts.

They are fetched while the model is read again, so that a conversation that goes on waits for few experts.
"""

from __future__ import annotations

import numpy as np

from moegguf.engine.kv_block_store import KvBlockStore
from moegguf.engine.session import RoutingListener, Session
from moegguf.gguf.fingerprint import header_digest
from moegguf.native.events import RoutingEvent
from moegguf.native.store import ListenOptions


class RecentExperts(RoutingListener):
    """The recent experts of one model, in the block `name`.

    The object is made before the weights are read. It notes the experts of prompts between `begin` and `end`.
    """

    listen_options = ListenOptions(lazy=True)

    def __init__(self, session: Session, store: KvBlockStore) -> None:
        self._session = session
        self.name = f"{header_digest(session.layout.shards)}-experts"
        self._used = dict[int, list[int]]()  # experts by layer
        if store.holds(self.name) and (found := store.read(self.name)) is not None:
            session.store.prefetch(*np.frombuffer(found, np.int32).reshape(2, -1))

    def begin(self) -> None:
        """A prompt is computed next. Twice is harmless."""
        self._session.listeners.remove(self)
        self._session.listeners.add(self)

    def observe(self, event: RoutingEvent) -> None:
        """Notes what a layer's last token uses."""
        self._used[event.il] = event.expert_ids[-1].tolist()

    def end(self) -> memoryview | None:
        """The prompt was computed: the bytes of the block, None where nothing was noted."""
        self._session.listeners.remove(self)
        used, self._used = sorted(self._used.items()), {}
        pairs = [(il, expert) for il, experts in used for expert in experts]
        return np.array(pairs, np.int32).T.copy().data.cast("B") if pairs else None
