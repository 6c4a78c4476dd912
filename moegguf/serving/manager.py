"""The loaded models, as the server uses them: names from a catalog, rules from dispatcher.py, snapshots from
subscribers.py. Does not know HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Protocol

from moegguf.engine.devices import query_gpus
from moegguf.engine.machine import Device
from moegguf.errors import ModelNotFoundError
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache
from moegguf.serving.dispatcher import Dispatcher
from moegguf.serving.events import LoadedModel, LoadOverrides, Snapshot
from moegguf.serving.lease import Lease
from moegguf.serving.managed_model import Purpose, State, Waiter
from moegguf.serving.model_size import Measure, measure
from moegguf.serving.subscribers import Subscribers
from moegguf.serving.worker_process import COMMAND
from moegguf.settings import Settings

SHUTDOWN_GRACE_S = 5.0

OnProgress = Callable[[float], object]


class Catalog(Protocol):
    """The part of `moegguf.models.catalog.Catalog` that the manager needs."""

    def find(self, name: str) -> ModelEntry:
        """The entry of that name. Raises ModelNotFoundError, ModelNameError."""


def _ignore(fraction: float) -> None:
    pass


class ModelManager:
    """Models by name, each in its own process: `async with ModelManager(catalog, settings) as manager`.

    Leaving the block gives running answers SHUTDOWN_GRACE_S to finish, then ends every process. All calls belong to
    the event loop that entered it.
    """

    def __init__(
        self,
        catalog: Catalog,
        settings: Settings,
        *,
        command: Sequence[str] = COMMAND,
        measure: Measure = measure,
        devices: Callable[[], list[Device]] = query_gpus,
    ) -> None:
        self._catalog = catalog
        self._settings = settings
        self.kept: set[str] = set()  # names whose models stay loaded where a request does not say how long
        self._subscribers = Subscribers()
        self._dispatcher = Dispatcher(settings, self._subscribers, command, measure, devices)

    async def __aenter__(self) -> ModelManager:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._subscribers.close()
        await self._dispatcher.close(SHUTDOWN_GRACE_S)

    def refuse(self) -> None:
        """Refuses requests from now on, also those that wait; running answers go on."""
        self._dispatcher.refuse()

    def lease(
        self,
        name: str | ModelEntry,
        overrides: LoadOverrides = LoadOverrides(),
        keep_alive_s: float | None = None,
        *,
        will_answer: bool = True,
        on_progress: OnProgress = _ignore,
    ) -> Lease:
        """The use of a model, inside `async with`: loads it if needed and waits in its queue.

        `name`: a name, or its catalog entry. `keep_alive_s`: how long an idle model stays loaded afterwards; None: the
        setting, 0: not at all, inf: for ever. With `will_answer=False` the lease does not wait for answers of other
        requests, and cannot generate or embed. `on_progress` gets the fraction read, 0 to 1, while the model loads.

        Entering raises BusyError, ModelNotFoundError, ModelNameError, ModelFormatError, BudgetError, AllocationError,
        WorkerError.
        """

        def new_waiter(entry: ModelEntry) -> Waiter:
            default_s = math.inf if entry.name in self.kept else self._settings.keep_alive_s
            idle_s = default_s if keep_alive_s is None else keep_alive_s
            purpose = Purpose.ANSWER if will_answer else Purpose.SHARED
            return Waiter(entry, overrides, idle_s, purpose, on_progress)

        return Lease(self._dispatcher, partial(self._find, name), new_waiter)

    async def load(
        self,
        name: str | ModelEntry,
        overrides: LoadOverrides = LoadOverrides(),
        keep_alive_s: float | None = None,
        *,
        on_progress: OnProgress = _ignore,
    ) -> LoadedModel:
        """Loads a model, or restarts the keep-alive time of a loaded one. Raises what entering a lease raises."""
        async with self.lease(name, overrides, keep_alive_s, will_answer=False, on_progress=on_progress) as lease:
            return lease.loaded

    async def unload(self, name: str | ModelEntry) -> bool:
        """Ends the use of a model by a name, after its current answer; False when the name used none.

        Returns when the model's process has ended, unless other names use it. Waiting requests load it again. Raises
        ModelNotFoundError, ModelNameError.
        """
        canonical = name if isinstance(name, str) and self._dispatcher.find(name) else (await self._find(name)).name
        model = self._dispatcher.find(canonical)
        if model is None:
            return False
        await self._dispatcher.unload(model, canonical)
        return True

    async def set_budget(
        self, name: str, expert_cache: ExpertCache | None = None, vram_cache: ExpertCache | None = None
    ) -> LoadedModel:
        """Changes a loaded model's budgets for experts, in RAM and on its device, also while it answers, up to those
        that it was loaded with. None: as it is.

        Raises ModelNotFoundError for a name that uses no loaded model, and what `Dispatcher.set_budget` raises.
        """
        canonical = (await self._find(name)).name
        model = self._dispatcher.find(canonical)
        if model is None:
            raise ModelNotFoundError(f"the model {name!r} is not loaded; a request loads it.")
        await self._dispatcher.set_budget(model, expert_cache, vram_cache)
        return model.status(asyncio.get_running_loop().time())

    def loaded(self) -> list[LoadedModel]:
        """Models in memory, latest expiry first. Statistics are as of the last answer or snapshot."""
        now_s, models = asyncio.get_running_loop().time(), self._dispatcher.models.values()
        loaded = [m.status(now_s) for m in models if m.state in (State.READY, State.STOPPING) and m.process is not None]
        return sorted(loaded, key=lambda m: m.expires.timestamp() if m.expires else math.inf, reverse=True)

    async def watch(self, name: str, per_s: float) -> AsyncGenerator[Snapshot]:
        """`per_s` snapshots a second of a model; waits while it is not loaded, ends when the manager closes.

        Raises ModelNotFoundError, ModelNameError.
        """
        entry = await self._find(name)
        try:
            with self._subscribers.subscribe(entry, per_s) as subscriber:
                self._dispatcher.dispatch()
                async for snapshot in subscriber:
                    yield snapshot
        finally:
            self._dispatcher.dispatch()

    async def _find(self, name: str | ModelEntry) -> ModelEntry:
        # A lookup reads files, which must not block the event loop; an entry needs none.
        return name if isinstance(name, ModelEntry) else await asyncio.to_thread(self._catalog.find, name)
