"""Clients that watch the experts of models: distributes snapshots, and sets how often each worker sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from moegguf.models.entry import ModelEntry
from moegguf.serving.events import Snapshot
from moegguf.serving.managed_model import ManagedModel, State, files_key
from moegguf.serving.worker_process import WorkerProcess

MAX_QUEUED_SNAPSHOTS = 8  # for a slow subscriber: the oldest are dropped


class Subscriber:
    """Snapshots of the model that `entry` names. `per_s`: rate per second."""

    def __init__(self, entry: ModelEntry, per_s: float) -> None:
        self.name = entry.name
        self.files = files_key(entry)
        self.per_s = per_s
        self._snapshots: asyncio.Queue[Snapshot | None] = asyncio.Queue()

    def put(self, snapshot: Snapshot | None) -> None:
        """Queues a snapshot and drops the oldest when the queue is full; None ends the iteration."""
        while self._snapshots.qsize() >= MAX_QUEUED_SNAPSHOTS:
            self._snapshots.get_nowait()
        self._snapshots.put_nowait(snapshot)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        while (snapshot := await self._snapshots.get()) is not None:
            yield snapshot


class Subscribers:
    """All subscribers of one manager."""

    def __init__(self) -> None:
        self._subscribers: set[Subscriber] = set()
        self._rates: dict[WorkerProcess, float] = {}
        self._used: set[str] = set()  # names that use a loaded model

    @contextmanager
    def subscribe(self, entry: ModelEntry, per_s: float) -> Iterator[Subscriber]:
        """A subscriber that is registered inside the `with` block."""
        subscriber = Subscriber(entry, per_s)
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    def publish(self, model: ManagedModel, snapshot: Snapshot) -> None:
        """Queues a snapshot for every subscriber of `model`, under the name that it asked for."""
        for subscriber in self._subscribers:
            if self._sees(subscriber, model):
                subscriber.put(replace(snapshot, model=subscriber.name))

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
        return subscriber.files == files_key(model.entry) and not other

    def close(self) -> None:
        """Ends the iteration of every subscriber."""
        for subscriber in self._subscribers:
            subscriber.put(None)
