"""The loaded models: what the server calls.

Puts together names (a catalog), rules (scheduler.py) and those who watch (watching.py). Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from moegguf.models.entry import ModelEntry
from moegguf.serving.dispatcher import Dispatcher
from moegguf.serving.events import Loaded, LoadOptions, Snapshot
from moegguf.serving.lease import Lease
from moegguf.serving.loaded_model import Purpose, State, Waiter, with_own_options
from moegguf.serving.memory_budget import Measure, measure
from moegguf.serving.subscribers import Subscribers
from moegguf.serving.worker_process import COMMAND
from moegguf.settings import Settings

SHUTDOWN_GRACE_S = 5.0

OnShare = Callable[[float], object]


class Catalog(Protocol):
    """Of `moegguf.models.catalog.Catalog`, what is needed here."""

    def find(self, name: str) -> ModelEntry: ...


def _ignore(share: float) -> None:
    """Nobody wants to know how far a load is."""


class ModelManager:
    """Models by name, each in a process of its own: `async with Pool(catalog, settings) as pool`.

    Leaving it lets running answers finish for SHUTDOWN_GRACE_S, then ends every process. Everything is for the event
    loop that entered it.
    """

    def __init__(
        self, catalog: Catalog, settings: Settings, *, command: Sequence[str] = COMMAND, measure: Measure = measure
    ) -> None:
        self._catalog = catalog
        self._settings = settings
        self._subscribers = Subscribers()
        self._scheduler = Dispatcher(settings, self._subscribers, command, measure)

    async def __aenter__(self) -> ModelManager:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._subscribers.close()
        await self._scheduler.close(SHUTDOWN_GRACE_S)

    def lease(
        self,
        name: str | ModelEntry,
        load: LoadOptions = LoadOptions(),
        keep_alive_s: float | None = None,
        *,
        will_answer: bool = True,
        on_share: OnShare = _ignore,
    ) -> Lease:
        """A model for somebody, inside `async with`: loads it if needed and waits in line for its turn.

        `name`: or what the catalog found for it. `keep_alive_s`: how long it stays afterwards; None as the settings
        say, 0 not at all, inf for ever. With `will_answer=False` there is no waiting for answers of others, and no
        answer. `on_share` hears how much has been read, 0 to 1, while it loads.

        Entering raises BusyError, ModelNotFoundError, ModelNameError, ModelFormatError, BudgetError, AllocationError,
        WorkerError.
        """

        async def new_waiter() -> Waiter:
            self._scheduler.check_open()
            entry = await self._find(name)
            stay_s = self._settings.keep_alive_s if keep_alive_s is None else keep_alive_s
            purpose = Purpose.TURN if will_answer else Purpose.VISIT
            return Waiter(entry, with_own_options(entry, load), stay_s, purpose, on_share)

        return Lease(self._scheduler, new_waiter)

    async def load(
        self,
        name: str | ModelEntry,
        load: LoadOptions = LoadOptions(),
        keep_alive_s: float | None = None,
        *,
        on_share: OnShare = _ignore,
    ) -> Loaded:
        """Loads a model, or has it stay for `keep_alive_s` from now. Raises what entering a lease raises."""
        async with self.lease(name, load, keep_alive_s, will_answer=False, on_share=on_share) as lease:
            return lease.loaded

    async def unload(self, name: str | ModelEntry) -> bool:
        """Lets a model leave after the answer that it is writing; returns when its process is gone, False when there
        is none. Requests that wait load it again. Raises ModelNotFoundError, ModelNameError."""
        model = self._scheduler.managed_models.get((await self._find(name)).name)
        if model is None or model.state is State.ABSENT:
            return False
        await self._scheduler.stop(model)
        return True

    def loaded(self) -> list[Loaded]:
        """Models in memory, those that stay longest first. Their figures are as of their last answer or view."""
        now_s, known = asyncio.get_running_loop().time(), self._scheduler.managed_models.values()
        there = [h.figures(now_s) for h in known if h.state in (State.READY, State.STOPPING) and h.process is not None]
        return sorted(there, key=lambda m: m.expires.timestamp() if m.expires else math.inf, reverse=True)

    async def watch(self, name: str | None = None, per_s: float = 4.0) -> AsyncIterator[Snapshot]:
        """Looks at the experts of a model, or of the one that was used last; waits while it is not loaded, ends when
        the pool does."""
        canonical = (await self._find(name)).name if name is not None else None
        try:
            with self._subscribers.subscriber(canonical, per_s) as subscriber:
                self._scheduler.settle()
                async for snapshot in subscriber:
                    yield snapshot
        finally:
            self._scheduler.settle()

    async def _find(self, name: str | ModelEntry) -> ModelEntry:
        # Looking up a name reads files, so it may not hold up the loop; whoever has looked already need not wait again.
        return name if isinstance(name, ModelEntry) else await asyncio.to_thread(self._catalog.find, name)
