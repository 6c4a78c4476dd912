"""Clients that watch the experts of models: distributes snapshots, and sets how often each worker sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from moegguf.models.entry import ModelEntry
from moegguf.serving.events import Snapshot
from moegguf.serving.managed_model import ManagedModel, State, files_key
from moegguf.serving.worker_process import WorkerProcess


class Subscriber:
    """Receives snapshots of the model that `entry` names; None: of each loaded one, under the first of its names.
    `per_s`: rate per second. `closed`: there are no more."""

    def __init__(self, entry: ModelEntry | None, per_s: float) -> None:
        self.name = entry and entry.name
        self.files = entry and files_key(entry)
        self.per_s = per_s
        self.closed = False
        self._latest: dict[str, Snapshot] = {}
        self._changed = asyncio.Event()

    def put(self, snapshot: Snapshot) -> None:
        """Adds a snapshot; of one model that a slow client has not taken yet, both become one."""
        earlier = self._latest.get(snapshot.model)
        self._latest[snapshot.model] = snapshot if earlier is None else merged(earlier, snapshot)
        self._changed.set()

    def close(self) -> None:
        """Ends the wait for more."""
        self.closed = True
        self._changed.set()

    def take(self) -> list[Snapshot]:
        """A snapshot of each model that there is something new of."""
        taken, self._latest = list(self._latest.values()), {}
        self._changed.clear()
        return taken

    async def wait(self, most_s: float) -> None:
        """Returns when there is something to take, or `closed`; after `most_s` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._changed.wait()


def merged(earlier: Snapshot, later: Snapshot) -> Snapshot:
    """One snapshot in place of two of a model."""
    if earlier.layers != later.layers or later.seconds < earlier.seconds:
        return later  # the model was reloaded
    uses, loads = _sum(earlier.uses, later.uses), _sum(earlier.loads, later.loads)
    return replace(later, uses=uses, loads=loads)


def _sum(a: bytes, b: bytes) -> bytes:
    return bytes(min(x + y, 255) for x, y in zip(a, b, strict=True))


class Subscribers:
    """All subscribers of one manager."""

    def __init__(self) -> None:
        self._subscribers: set[Subscriber] = set()
        self._rates: dict[WorkerProcess, float] = {}
        self._used: set[str] = set()  # names that use a loaded model

    @contextmanager
    def subscribe(self, entry: ModelEntry | None, per_s: float) -> Iterator[Subscriber]:
        """A subscriber that is registered inside the `with` block."""
        subscriber = Subscriber(entry, per_s)
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    def publish(self, model: ManagedModel, snapshot: Snapshot) -> None:
        """Gives a snapshot to every subscriber of `model`, under the name that it asked for."""
        for subscriber in self._subscribers:
            if self._sees(subscriber, model):
                subscriber.put(replace(snapshot, model=subscriber.name or model.name))

    def update_rates(self, models: Iterable[ManagedModel]) -> None:
        """Sets each worker's snapshot rate to the highest that a subscriber of its model wants, 0 without any."""
        models = list(models)
        self._used = {name for model in models for name in model.uses}
        ready = {m: m.process for m in models if m.state is State.READY and m.process is not None}
        rates: dict[WorkerProcess, float] = {}
        for model, process in ready.items():
            wanted = [s.per_s for s in self._subscribers if self._sees(s, model)]
            rates[process] = max(wanted, default=0.0)
            if rates[process] != self._rates.get(process, 0.0):
                process.send("watch", per_s=rates[process])
        self._rates = rates

    def _sees(self, subscriber: Subscriber, model: ManagedModel) -> bool:
        """Whether the snapshots of `model` are for the subscriber: of the process that its name uses, else of any of
        its files."""
        other = subscriber.name in self._used and subscriber.name not in model.uses
        return subscriber.files is None or (subscriber.files == files_key(model.entry) and not other)

    def close(self) -> None:
        """Ends the wait of every subscriber."""
        for subscriber in self._subscribers:
            subscriber.close()
