"""The experts that the requests of each client use, so that a client learns nothing about another client's prompts.

The store counts the uses of all passes together. A run of passes that compute for one client alone is counted for this
client. A pass for several clients is counted for nobody.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.engine.session import Session

Maps = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
"""State, uses and loads of each expert, each (n_layer, n_expert)."""


class ExpertUses:
    """The experts of one model. `begin_pass` is called by the thread that computes, `maps` by any."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._client_key: str | None = None  # client of the present run of passes
        self._begun = session.store.activity()  # uses and loads before the present run
        self._views: dict[str, Maps] = {}  # each client's uses at the end of its last run

    def begin_pass(self, client_key: str | None) -> None:
        """Counts what is used from now on for `client_key`; None: for nobody."""
        if client_key == self._client_key:
            return
        with self._lock:
            if self._client_key is not None:
                self._views[self._client_key] = self._view(self._client_key)
            self._client_key, self._begun = client_key, self._session.store.activity()

    def maps(self, client_key: str | None) -> Maps:
        """State now, uses and loads since the model was loaded; None: of all requests.

        For one client key: the uses and loads of its passes. The state is 0 but for experts that its latest run of
        passes used, while that lasted, because what is in memory later depends on the prompts of others.
        """
        with self._lock:
            if client_key is None:
                return self._session.places(), *self._session.store.activity()
            return self._view(client_key) if client_key == self._client_key else self._last(client_key)

    def _last(self, client_key: str) -> Maps:
        nothing = np.zeros(self._session.store.shape, np.uint32)
        return self._views.get(client_key, (nothing.astype(np.uint8), nothing, nothing))

    def _view(self, client_key: str) -> Maps:
        """The maps of whoever computes now. A load counts for an expert that was used: another one may have been for a
        request before."""
        uses, loads = (now - begun for now, begun in zip(self._session.store.activity(), self._begun, strict=True))
        used = uses > 0
        _, uses_before, loads_before = self._last(client_key)
        return self._session.places() * used, uses_before + uses, loads_before + loads * used
