"""Who looks at the experts of which model: views go to all who want them, and only watched models send any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager

from moegguf.serving.events import View
from moegguf.serving.loaded_model import Holding, State
from moegguf.serving.worker_process import Process

KEPT_VIEWS = 8  # for a watcher that is slow: the oldest are left out


class Watcher:
    """Views of one model, or with `name` None of the one that was used last. `per_s`: how many a second."""

    def __init__(self, name: str | None, per_s: float) -> None:
        self.name = name
        self.per_s = per_s
        self._views: asyncio.Queue[View | None] = asyncio.Queue()

    def put(self, view: View | None) -> None:
        while self._views.qsize() >= KEPT_VIEWS:
            self._views.get_nowait()
        self._views.put_nowait(view)

    async def __aiter__(self) -> AsyncIterator[View]:
        while (view := await self._views.get()) is not None:
            yield view


class Watching:
    """All watchers. `settle` tells the processes how often to look."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._told: dict[Process, float] = {}
        self._latest: str | None = None

    @contextmanager
    def watcher(self, name: str | None, per_s: float) -> Iterator[Watcher]:
        watcher = Watcher(name, per_s)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def take(self, view: View) -> None:
        """A view has come from a process."""
        for watcher in self._watchers:
            if view.model == (self._latest if watcher.name is None else watcher.name):
                watcher.put(view)

    def settle(self, holdings: Iterable[Holding]) -> None:
        """Each process looks as often as the keenest of its watchers wants, or not at all."""
        ready = [h for h in holdings if h.state is State.READY and h.process is not None]
        self._latest = max(ready, key=lambda h: h.last_used_s).name if ready else None
        told: dict[Process, float] = {}
        for holding in ready:
            process = holding.process
            assert process is not None
            keen = [w.per_s for w in self._watchers if (w.name or self._latest) == holding.name]
            told[process] = max(keen, default=0.0)
            if told[process] != self._told.get(process, 0.0):
                process.send("watch", per_s=told[process])
        self._told = told

    def close(self) -> None:
        """Ends what the watchers see."""
        for watcher in self._watchers:
            watcher.put(None)
