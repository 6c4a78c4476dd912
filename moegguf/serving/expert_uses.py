"""Counts the uses of experts for each client, so that one client's snapshots do not
show which experts other clients use.

The store counts the uses of all passes together. Consecutive passes that serve only one
client are counted for this client. A pass that serves several clients is not counted
for any client.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.engine.session import Session

Maps = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
"""State, uses and loads of each expert: three arrays of shape (n_layer, n_expert)."""


class ExpertUses:
    """The uses of a model's experts by each client. The compute thread calls
    `begin_pass`; any thread may call `maps`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        # Client of the current passes; None: several clients, or none.
        self._client_key: str | None = None
        # Uses and loads when this client's passes began.
        self._begun = session.store.activity()
        # {client: its maps at the end of its last passes}.
        self._views: dict[str, Maps] = {}

    def begin_pass(self, client_key: str | None) -> None:
        """Counts uses from now on for the client `client_key`. None: counts them for no
        client."""
        if client_key == self._client_key:
            return
        with self._lock:
            if self._client_key is not None:
                self._views[self._client_key] = self._view(self._client_key)
            self._client_key, self._begun = client_key, self._session.store.activity()

    def maps(self, client_key: str | None) -> Maps:
        """Returns the current state of each expert, and its uses and loads since the
        model was loaded. With `client_key` None, all requests are counted.

        For one client, only the client's own passes are counted, and loads only of
        experts that these passes used. The state is from the client's last passes, and
        is 0 for experts that these passes did not use, since later states would depend
        on other clients' prompts.
        """
        with self._lock:
            if client_key is None:
                return self._session.places(), *self._session.store.activity()
            return (
                self._view(client_key)
                if client_key == self._client_key
                else self._last(client_key)
            )

    def _last(self, client_key: str) -> Maps:
        nothing = np.zeros(self._session.store.shape, np.uint32)
        return self._views.get(client_key, (nothing.astype(np.uint8), nothing, nothing))

    def _view(self, client_key: str) -> Maps:
        """Returns the maps of the client whose passes are running. Only loads of
        experts that the client used in these passes are added, since other loads may
        belong to an earlier request."""
        uses, loads = (
            now - begun
            for now, begun in zip(
                self._session.store.activity(), self._begun, strict=True
            )
        )
        used = uses > 0
        _, uses_before, loads_before = self._last(client_key)
        return (
            self._session.places() * used,
            uses_before + uses,
            loads_before + loads * used,
        )
