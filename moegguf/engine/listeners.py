"""Several hearers of one store's events: the controller, a recorder, a judge.

The store tells one listener; this one asks it for what all hearers together need and passes everything on, in the
order they came. Without hearers nobody listens, and a resident model's gates cost nothing.
"""

from __future__ import annotations

from typing import Protocol

from moegguf.native.events import Announcement, RoutingEvent
from moegguf.native.store import ListenOptions, Store


class RoutingListener(Protocol):
    """Hears announcements and gates, on the store's event thread."""

    @property
    def wants(self) -> ListenOptions:
        """What it needs to hear."""

    def announce(self, announcement: Announcement) -> None:
        """Tokens are about to be evaluated."""

    def observe(self, gate: RoutingEvent) -> None:
        """A layer was routed."""


class RoutingListeners:
    """The hearers of one store. Adding and removing one restarts the listening, between gates."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hearers: tuple[RoutingListener, ...] = ()

    def add(self, hearer: RoutingListener) -> None:
        self._restart((*self._hearers, hearer))

    def remove(self, hearer: RoutingListener) -> None:
        """Returns after the last event it hears. Removing one that is not there is harmless."""
        if hearer in self._hearers:
            self._restart(tuple(other for other in self._hearers if other is not hearer))

    def _restart(self, hearers: tuple[RoutingListener, ...]) -> None:
        self._store.listen()
        self._hearers = hearers
        if hearers:
            options = _union([hearer.wants for hearer in hearers])
            self._store.listen(on_routing=self._observe, on_tokens=self._announce, options=options)

    def _announce(self, announcement: Announcement) -> None:
        for hearer in self._hearers:
            hearer.announce(announcement)

    def _observe(self, gate: RoutingEvent) -> None:
        for hearer in self._hearers:
            hearer.observe(gate)


def _union(options: list[ListenOptions]) -> ListenOptions:
    return ListenOptions(
        weights=any(o.weights for o in options),
        inputs=any(o.inputs for o in options),
        everything=any(o.everything for o in options),
        lockstep=any(o.lockstep for o in options),
        lazy=all(o.lazy for o in options),
        max_input_tokens=max(o.max_input_tokens for o in options),
    )
