"""Who looks at the experts of which model: views go to all who want them, and only watched models send any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager

from moegguf.serving.events import Snapshot
from moegguf.serving.loaded_model import ManagedModel, State
from moegguf.serving.worker_process import Process

KEPT_SNAPSHOTS = 8  # for a watcher that is slow: the oldest are left out


class Subscriber:
    """Views of one model, or with `name` None of the one that was used last. `per_s`: how many a second."""

    def __init__(self, name: str | None, per_s: float) -> None:
        self.name = name
        self.per_s = per_s
        self._snapshots: asyncio.Queue[Snapshot | None] = asyncio.Queue()

    def put(self, snapshot: Snapshot | None) -> None:
        while self._snapshots.qsize() >= KEPT_SNAPSHOTS:
            self._snapshots.get_nowait()
        self._snapshots.put_nowait(snapshot)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        while (snapshot := await self._snapshots.get()) is not None:
            yield snapshot


class Subscribers:
    """All watchers. `settle` tells the processes how often to look."""

    def __init__(self) -> None:
        self._subscribers: set[Subscriber] = set()
        self._told: dict[Process, float] = {}
        self._latest: str | None = None

    @contextmanager
    def subscriber(self, name: str | None, per_s: float) -> Iterator[Subscriber]:
        subscriber = Subscriber(name, per_s)
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    def take(self, snapshot: Snapshot) -> None:
        """A view has come from a process."""
        for subscriber in self._subscribers:
            if snapshot.model == (self._latest if subscriber.name is None else subscriber.name):
                subscriber.put(snapshot)

    def settle(self, managed_models: Iterable[ManagedModel]) -> None:
        """Each process looks as often as the keenest of its watchers wants, or not at all."""
        ready = [h for h in managed_models if h.state is State.READY and h.process is not None]
        self._latest = max(ready, key=lambda h: h.last_used_s).name if ready else None
        told: dict[Process, float] = {}
        for model in ready:
            process = model.process
            assert process is not None
            keen = [w.per_s for w in self._subscribers if (w.name or self._latest) == model.name]
            told[process] = max(keen, default=0.0)
            if told[process] != self._told.get(process, 0.0):
                process.send("watch", per_s=told[process])
        self._told = told

    def close(self) -> None:
        """Ends what the watchers see."""
        for subscriber in self._subscribers:
            subscriber.put(None)
