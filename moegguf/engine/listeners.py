"""Several listeners on one store's events: the controller, a recorder.

The store has one listener; this one subscribes to what all of them together need and passes every event on, in order.
Without listeners it does not subscribe, and the routing of a resident model costs nothing.
"""

from __future__ import annotations

from typing import Protocol

from moegguf.native.events import Announcement, RoutingEvent
from moegguf.native.store import ListenOptions, Store


class RoutingListener(Protocol):
    """Receives announcements, unless it ignores them, and routing events, on the store's event thread."""

    @property
    def listen_options(self) -> ListenOptions:
        """What the store has to send."""

    def announce(self, announcement: Announcement) -> None:
        """Tokens are about to be evaluated."""
        return

    def observe(self, event: RoutingEvent) -> None:
        """A layer was routed."""


class RoutingListeners:
    """The listeners of one store. Adding or removing one renews the subscription, between routing events."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listeners: tuple[RoutingListener, ...] = ()

    def add(self, listener: RoutingListener) -> None:
        """`listener` receives every event from now on."""
        self._subscribe((*self._listeners, listener))

    def remove(self, listener: RoutingListener) -> None:
        """Returns after the last event that `listener` receives. No effect when it was not added."""
        if listener in self._listeners:
            self._subscribe(tuple(other for other in self._listeners if other is not listener))

    def _subscribe(self, listeners: tuple[RoutingListener, ...]) -> None:
        self._store.listen()
        self._listeners = listeners
        if listeners:
            options = _union([listener.listen_options for listener in listeners])
            self._store.listen(on_routing=self._observe, on_tokens=self._announce, options=options)

    def _announce(self, announcement: Announcement) -> None:
        for listener in self._listeners:
            listener.announce(announcement)

    def _observe(self, event: RoutingEvent) -> None:
        try:
            for listener in self._listeners:
                listener.observe(event)
        except BaseException:
            self._listeners = ()  # nobody is called again, also where another one is added
            raise


def _union(options: list[ListenOptions]) -> ListenOptions:
    return ListenOptions(
        weights=any(o.weights for o in options),
        inputs=any(o.inputs for o in options),
        everything=any(o.everything for o in options),
        lockstep=any(o.lockstep for o in options),
        lazy=all(o.lazy for o in options),
        max_input_tokens=max(o.max_input_tokens for o in options),
    )
