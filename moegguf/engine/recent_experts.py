"""The experts that the last tokens of a model's prompts used, kept beside its contexts. When it is loaded again they
are fetched first, while other weights are read and a context is restored: the next token waits for few or none.
"""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO

import numpy as np

from moegguf.atomic_write import write_atomically
from moegguf.engine.context_store import default_folder
from moegguf.engine.listeners import RoutingListener
from moegguf.engine.session import Session
from moegguf.gguf.fingerprint import header_digest
from moegguf.native.events import Int32s, RoutingEvent
from moegguf.native.store import ListenOptions


class RecentExperts(RoutingListener):
    """Those of a model, made before its weights are read, and of prompts between `begin` and `end`. A damaged file has
    none. Those of the last token are read now, the others are the first that fill a pool of every expert."""

    listen_options = ListenOptions(lazy=True)

    def __init__(self, session: Session) -> None:
        self._session, layout, store = session, session.layout, session.store
        self._path = default_folder() / f"experts-{header_digest(layout.shards)}.npy"
        self._routed: dict[int, Int32s] = {}  # of the last pass: (n_tokens, n_expert_used) by layer
        self._recent = np.zeros((0, 2), np.int32)  # (layer, expert), the last used first
        with suppress(OSError, ValueError):
            found = np.load(self._path, allow_pickle=False)
            if found.dtype == np.int32 and found.ndim == 2 and found.shape[1] == 2:
                self._recent = found
        (il, experts), n_last = self._recent.T, layout.token_cycle_slots
        store.prefetch(il[:n_last], experts[:n_last])
        if store.info()["resident"]:
            store.warm(il[n_last:], experts[n_last:])

    def begin(self) -> None:
        """A prompt is computed next. Twice is harmless."""
        self._session.listeners.remove(self)
        self._session.listeners.add(self)

    def observe(self, event: RoutingEvent) -> None:
        """Called for each layer."""
        self._routed[event.il] = event.expert_ids

    def end(self) -> bool:
        """The prompt was computed; whether there is something to save."""
        self._session.listeners.remove(self)
        return bool(self._routed)

    def save(self) -> None:
        """Writes the file. Not between `begin` and `end`; on any thread."""
        layout, last = self._session.layout, sorted(self._routed.items())
        orders = [(il, list(dict.fromkeys(ids[::-1].ravel().tolist()))) for il, ids in last]
        n = layout.n_expert_used
        turns = range(0, layout.n_expert, n)  # of each layer as many as a token uses
        new = [(il, expert) for turn in turns for il, order in orders for expert in order[turn : turn + n]]
        self._recent = np.array(list(dict.fromkeys([*new, *map(tuple, self._recent.tolist())])), np.int32)
        data = BytesIO()
        np.save(data, self._recent)
        self._routed = {}
        with suppress(OSError):  # then they are fetched when they are missed
            write_atomically(self._path, data.getvalue())
