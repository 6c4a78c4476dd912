"""Replicas behind the interface of `ModelManager` (model_manager.py), for the server: names to handles of Ray Serve,
and Ray's errors to moegguf's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from moegguf.engine.stats import Stats
from moegguf.errors import BusyError, OptionError, WorkerError
from moegguf.generate.request import GenerationRequest
from moegguf.models.entry import ModelEntry
from moegguf.serving.events import Event, LoadedModel, LoadedName
from moegguf.serving.lease import Calls
from moegguf.serving.ray.config import ConfiguredCatalog
from moegguf.serving.ray.preference import Conversation, conversation_of
from moegguf.serving.ray.replica import Failure
from moegguf.serving.wire import build_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray.serve.handle import DeploymentHandle

STATUS_PERIOD_S = 5.0
STATUS_TIMEOUT_S = 5.0


class ReplicaManager:
    """Models by name, each a deployment: `handles`. All calls belong to the event loop that entered it.

    Options of loading and keep-alive times of requests have no effect: the config has them.
    """

    def __init__(self, catalog: ConfiguredCatalog, handles: Mapping[str, DeploymentHandle]) -> None:
        self._catalog = catalog
        self._handles = handles
        self._loaded: dict[str, LoadedModel] = {}
        self._updating: asyncio.Task[None]

    async def __aenter__(self) -> ReplicaManager:
        self._updating = asyncio.create_task(self._update_loaded())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._updating.cancel()
        with suppress(asyncio.CancelledError):
            await self._updating

    @asynccontextmanager
    async def lease(self, name: str | ModelEntry, *_: object, **__: object) -> AsyncIterator[ReplicaLease]:
        """The use of a model by one request; each call goes to a replica that suits it. Raises ModelNotFoundError,
        ModelNameError."""
        entry = await self._find(name)
        yield ReplicaLease(entry, self._handles[entry.name])

    async def load(self, name: str | ModelEntry, *_: object, **__: object) -> LoadedModel:
        """The state of a model, which its replicas hold in memory. Raises BusyError while none does."""
        entry = await self._find(name)
        with ray_errors():
            found: LoadedModel | None = await self._handles[entry.name].status.remote(Conversation())
        if found is None:
            raise BusyError(f"no replica has {entry.name!r} in memory; try again later.")
        return found

    async def unload(self, name: str | ModelEntry) -> bool:
        """Raises OptionError."""
        raise OptionError(
            f"{(await self._find(name)).name!r} is not unloaded by requests; set its autoscaling_config in the config"
            " file, then `serve deploy` it."
        )

    def loaded(self) -> list[LoadedModel]:
        """The models that replicas hold, in the config's order: sums over their replicas, at most some seconds old."""
        return [self._loaded[name] for name in self._handles if name in self._loaded]

    async def _find(self, name: str | ModelEntry) -> ModelEntry:
        return name if isinstance(name, ModelEntry) else await asyncio.to_thread(self._catalog.find, name)

    async def _update_loaded(self) -> None:
        while True:
            for name, handle in self._handles.items():
                with suppress(RayError, RayServeException, TimeoutError):
                    found = await handle.broadcast("status").results_async(
                        timeout_s=STATUS_TIMEOUT_S, return_exceptions=True
                    )
                    self._loaded.pop(name, None)
                    if replicas := [each for each in found if isinstance(each, LoadedModel)]:
                        self._loaded[name] = total(replicas)
            await asyncio.sleep(STATUS_PERIOD_S)


def total(replicas: Sequence[LoadedModel]) -> LoadedModel:
    """One model's replicas as one: sums, the shortest context, the first one's process and plan."""
    first = replicas[0]
    return replace(
        first,
        n_ctx=min(each.n_ctx for each in replicas),
        size_bytes=sum(each.size_bytes for each in replicas),
        vram_bytes=sum(each.vram_bytes for each in replicas),
        busy=any(each.busy for each in replicas),
        queue=sum(each.queue for each in replicas),
        n_requests=sum(each.n_requests for each in replicas),
        stats=sum((each.stats for each in replicas), Stats()),
        names=(LoadedName(first.name, first.digest, None),),
    )


class ReplicaLease(Calls):
    """The use of a model by one request, as `moegguf.serving.lease.Lease`.

    A call whose replica ends before it gave anything is repeated once, by another one. Every call raises WorkerError
    when its replica ends later, or again.
    """

    load_s = 0.0

    def __init__(self, entry: ModelEntry, handle: DeploymentHandle) -> None:
        self.entry = entry
        self._handle = handle

    async def answer(self, generation: GenerationRequest, *, stream: bool = True) -> AsyncGenerator[Event, None]:
        """The events of an answer. Closing it stops the answer. Raises what `Lease.answer` raises."""
        conversation = conversation_of(generation)
        is_repeated = False
        while True:
            has_events = False
            items = self._handle.options(stream=True).answer.remote(conversation, generation, stream)
            try:
                with ray_errors():
                    async for item in items:
                        has_events = True
                        yield checked(item)
                return
            except WorkerError:
                if has_events or is_repeated:
                    raise
                is_repeated = True
            finally:
                items.cancel()

    async def value(self, kind: str, **fields: Any) -> Any:
        """The value of a request to some replica."""
        for last in (False, True):
            try:
                with ray_errors():
                    return checked(await self._handle.value.remote(Conversation(), kind, fields))
            except WorkerError:
                if last:
                    raise


def checked(item: Any) -> Any:
    """`item`; raises the error that it is."""
    if isinstance(item, Failure):
        raise build_error(item.error)
    return item


@contextmanager
def ray_errors() -> Iterator[None]:
    """Raises Ray's errors as moegguf's."""
    try:
        yield
    except BackPressureError:
        raise BusyError("server busy, please try again.  maximum pending requests exceeded") from None
    except RayTaskError:  # an exception in the replica, which is not one of moegguf's
        raise
    except (RayError, RayServeException) as error:
        raise WorkerError(
            f"the replica that computed this has ended ({type(error).__name__}); send the request again: another one"
            " takes it, and Ray starts a new one."
        ) from None
