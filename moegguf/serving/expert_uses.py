"""Which experts the requests of each client use, so that a client sees its own and nothing of another's prompts.

The store counts the uses of a pass, whoever it is for. They are told apart by the runs of passes that compute for one
client alone; those of a pass for several clients are counted for nobody.
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
        self._asker: str | None = None  # of the present run of passes
        self._begun = session.store.activity()  # uses and loads before it
        self._views: dict[str, Maps] = {}  # of askers, at the end of their last run

    def begin_pass(self, asker: str | None) -> None:
        """Counts what is used from now on for `asker`; None: for nobody."""
        if asker == self._asker:
            return
        with self._lock:
            if self._asker is not None:
                self._views[self._asker] = self._view(self._asker)
            self._asker, self._begun = asker, self._session.store.activity()

    def maps(self, asker: str | None) -> Maps:
        """State now, uses and loads since the model was loaded; None: of all requests.

        Of one asker: what its passes used and loaded. The state is of experts that its latest run of passes used, while
        that lasted: what is in memory besides, or later, depends on the prompts of others. All else is 0.
        """
        with self._lock:
            if asker is None:
                return self._session.places(), *self._session.store.activity()
            return self._view(asker) if asker == self._asker else self._last(asker)

    def _last(self, asker: str) -> Maps:
        nothing = np.zeros(self._session.store.shape, np.uint32)
        return self._views.get(asker, (nothing.astype(np.uint8), nothing, nothing))

    def _view(self, asker: str) -> Maps:
        """The maps of whoever computes now. A load counts for an expert that was used: another one may have been for a
        request before."""
        uses, loads = (now - begun for now, begun in zip(self._session.store.activity(), self._begun, strict=True))
        used = uses > 0
        _, uses_before, loads_before = self._last(asker)
        return self._session.places() * used, uses_before + uses, loads_before + loads * used
