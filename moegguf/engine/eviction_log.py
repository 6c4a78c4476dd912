"""Logs evictions at most once a second: the experts that lost their slots between two
successive routing events, and the experts that received slots.

Evictions at other times are not logged.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from moegguf.decisions import log_decision
from moegguf.engine.session import RoutingListener, Session
from moegguf.native.events import RoutingEvent
from moegguf.native.store import ListenOptions

PERIOD_S = 1.0
MAX_NAMED = 8  # maximum number of experts in each list of a log record


class EvictionLog(RoutingListener):
    """Logs evictions, which it finds by comparing which experts have slots at
    successive routing events."""

    listen_options = ListenOptions(lazy=True)

    def __init__(self, session: Session) -> None:
        self._store = session.store
        self._before: npt.NDArray[np.bool_] | None = None
        self._logged_s = -PERIOD_S

    def observe(self, event: RoutingEvent) -> None:
        """Compares which experts have slots now and at the previous event, and logs
        evictions. Does nothing within PERIOD_S (one second) after the last log
        record."""
        if time.monotonic() - self._logged_s < PERIOD_S:
            return
        now = self._store.residency() > 0
        before = self._before
        self._before = now
        if before is None or not (before & ~now).any():
            return
        self._logged_s = time.monotonic()
        self._before = None
        log_decision(
            "experts_evicted",
            il=event.il,
            phase=event.phase.name.lower(),
            evicted=self._names(before & ~now),
            for_experts=self._names(now & ~before),
            n_evicted=int((before & ~now).sum()),
        )

    def _names(self, experts: npt.NDArray[np.bool_]) -> list[str]:
        """Returns up to MAX_NAMED of these experts, as "layer/expert"."""
        return [
            f"{il}/{expert}" for il, expert in np.argwhere(experts)[:MAX_NAMED].tolist()
        ]
