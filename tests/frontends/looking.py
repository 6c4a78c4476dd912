"""Pools without processes whose models can be looked at: views come when a test says so, or all the time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from fake_pool import FakeCatalog, FakePool, entry_of

from moegguf.engine.stats import Stats
from moegguf.models.catalog import demo_path
from moegguf.serving.events import Snapshot

VIEW = Snapshot(
    model="demo:latest", layers=(0, 2), n_expert=3, state=bytes([2, 0, 1, 2, 2, 0]), uses=bytes([3, 0, 0, 255, 1, 0]),
    loads=bytes([1, 0, 0, 0, 0, 0]), stats=Stats(tokens=7, lookups=10, hits_ready=9, misses=1), busy=True,
    tokens_per_s=12.5, seconds=4.0,
)  # fmt: skip


class LivePool(FakePool):
    """Views are given when they are put into `feed`; `n_watching` counts who looks on."""

    def __init__(self, *names: str) -> None:
        super().__init__(FakeCatalog(*(entry_of(demo_path(), name) for name in names or ("demo:latest",))))
        self.feeds: dict[str | None, asyncio.Queue[Snapshot | Exception | None]] = {}
        self.n_watching = 0

    def feed(self, name: str | None) -> asyncio.Queue[Snapshot | Exception | None]:
        return self.feeds.setdefault(name, asyncio.Queue())

    async def watch(self, name: str | None = None, per_s: float = 4.0) -> AsyncIterator[Snapshot]:
        self.n_watching += 1
        try:
            while (view := await self.feed(name).get()) is not None:
                if isinstance(view, Exception):
                    raise view
                yield view
        finally:
            self.n_watching -= 1

    def put_in_memory(self, name: str = "demo:latest") -> None:
        self.there[name] = self.catalog.find(name)


class BusyPool(FakePool):
    """A model that computes all the time: nine of ten lookups hit."""

    def __init__(self) -> None:
        super().__init__(FakeCatalog(entry_of(demo_path())))
        self.there["demo:latest"] = self.catalog.find("demo")

    async def watch(self, name: str | None = None, per_s: float = 4.0) -> AsyncIterator[Snapshot]:
        tokens = 0
        while True:
            tokens += 1
            yield replace(VIEW, stats=Stats(tokens=tokens, lookups=10 * tokens, hits_ready=9 * tokens, misses=tokens))
            await asyncio.sleep(0.02)
