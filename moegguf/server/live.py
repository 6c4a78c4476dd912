"""`/live`: snapshots of the experts of loaded models, one JSON object per line; `?once=1`: one object for all models.

A line is a snapshot (`moegguf.serving.events.Snapshot`, bytes in base64, the state of its model under `loaded`) or
`{"loaded_models": [names]}`, sent first, at every change, and every HEARTBEAT_S; of names that share a model, without
`model` in the query, the first. A snapshot without changes is left
out. Watching loads no model, and ends with the connection.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.server.common.errors import HttpError
from moegguf.server.common.streams import LineResponse, json_line
from moegguf.serving.events import MAX_SNAPSHOTS_PER_S

if TYPE_CHECKING:
    from moegguf.serving.events import LoadedModel, Snapshot
    from moegguf.serving.model_manager import ModelManager

DEFAULT_PER_S = 4.0
POLL_S = 0.5  # between two checks which models are loaded
HEARTBEAT_S = 5.0  # between two lines at most
ONCE_S = 2.0  # to wait for a first snapshot


async def live(request: Request) -> Response:
    """Query: `model` (default: all loaded ones), `per_s` snapshots a second, `once`."""
    manager, query = request.app.state.manager, request.query_params
    if query.get("once", "0") not in ("", "0"):
        return JSONResponse({"models": await current_state(manager)})
    name = query.get("model") or None
    if name is not None:
        name = (await asyncio.to_thread(request.app.state.catalog.find, name)).name
    stream = SnapshotStream(manager, name, _per_s(query.get("per_s")), request.app.state.ending)
    return LineResponse(stream.lines())


def _per_s(text: str | None) -> float:
    try:
        value = DEFAULT_PER_S if text is None else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_SNAPSHOTS_PER_S:
        raise HttpError(400, f"per_s must be a number above 0 and at most {MAX_SNAPSHOTS_PER_S:g}, but is {text!r:.40}")
    return value


async def current_state(manager: ModelManager) -> list[dict[str, Any]]:
    """The state of each loaded model, with its snapshot under `snapshot`; None when none comes within ONCE_S."""
    loaded = manager.loaded()
    snapshots = await asyncio.gather(*(first_snapshot(manager, model.name) for model in loaded))
    states = [loaded_object(model, whole=True) for model in loaded]
    return [
        state | {"snapshot": snapshot and snapshot_object(snapshot)}
        for state, snapshot in zip(states, snapshots, strict=True)
    ]


async def first_snapshot(manager: ModelManager, name: str) -> Snapshot | None:
    """The next snapshot of a model; None when none comes within ONCE_S."""
    try:
        async with asyncio.timeout(ONCE_S), aclosing(manager.watch(name, MAX_SNAPSHOTS_PER_S)) as snapshots:
            return await anext(snapshots, None)
    except TimeoutError:
        return None


class SnapshotStream:
    """The lines for one client: a task per model keeps its latest snapshot until `lines` sends it."""

    def __init__(
        self, manager: ModelManager, name: str | None, per_s: float, ending: threading.Event | None = None
    ) -> None:
        self._manager = manager
        self._ending = ending or threading.Event()
        self._name = name
        self._per_s = per_s
        self._latest: dict[str, Snapshot] = {}
        self._changed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def lines(self) -> AsyncGenerator[bytes]:
        """Lines until closed, or until the server shuts down."""
        sent: dict[str, Any] = {}
        sent_names: list[str] | None = None
        sent_names_s = 0.0
        try:
            while True:
                models = self._manager.loaded()
                loaded = {each.name: model for model in models for each in model.names}
                is_open = self._update_tasks(model.name for model in models)
                names = [model.name for model in models] if self._name is None else list(loaded)
                if names != sent_names or time.monotonic() - sent_names_s > HEARTBEAT_S:
                    sent_names, sent_names_s = names, time.monotonic()
                    yield json_line({"loaded_models": sent_names})
                for snapshot in self._take_latest():
                    model = loaded.get(snapshot.model)
                    visible = model and _visible_state(snapshot, model)
                    if model and (visible != sent.get(snapshot.model) or any(snapshot.uses) or any(snapshot.loads)):
                        sent[snapshot.model] = visible
                        yield json_line(snapshot_object(snapshot) | {"loaded": loaded_object(model)})
                if not is_open or self._ending.is_set():
                    return
                await self._wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _update_tasks(self, loaded: Iterable[str]) -> bool:
        """Watches the wanted models only. False when the manager is closing; raises the error of a watch."""
        for task in self._tasks.values():
            if task.done():
                task.result()
                return False
        wanted = set(loaded) if self._name is None else {self._name}
        for name in wanted - self._tasks.keys():
            self._tasks[name] = asyncio.create_task(self._watch(name))
        for name in self._tasks.keys() - wanted:
            self._tasks.pop(name).cancel()
        return True

    async def _watch(self, name: str) -> None:
        async with aclosing(self._manager.watch(name, self._per_s)) as snapshots:
            async for snapshot in snapshots:
                earlier = self._latest.get(name)
                self._latest[name] = snapshot if earlier is None else _merge(earlier, snapshot)
                self._changed.set()

    def _take_latest(self) -> list[Snapshot]:
        snapshots, self._latest = list(self._latest.values()), {}
        self._changed.clear()
        return snapshots

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()


def _merge(earlier: Snapshot, later: Snapshot) -> Snapshot:
    """One snapshot in place of two, for a slow client."""
    if earlier.layers != later.layers or later.seconds < earlier.seconds:
        return later  # the model was reloaded
    uses, loads = _sum(earlier.uses, later.uses), _sum(earlier.loads, later.loads)
    return replace(later, uses=uses, loads=loads)


def _sum(a: bytes, b: bytes) -> bytes:
    return bytes(min(x + y, 255) for x, y in zip(a, b, strict=True))


def _visible_state(snapshot: Snapshot, loaded: LoadedModel) -> tuple[Any, ...]:
    """What a client displays, besides uses and loads."""
    figures = loaded.queue, loaded.stopping, loaded.expert_cache_bytes, loaded.vram_cache_bytes, loaded.last_answer_s
    return snapshot.state, snapshot.busy, snapshot.stats.tokens, snapshot.layers, *figures


def snapshot_object(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as JSON: bytes in base64, statistics with derived values."""
    found = {field.name: getattr(snapshot, field.name) for field in fields(snapshot)}
    maps = {name: base64.b64encode(found[name]).decode() for name in ("state", "uses", "loads")}
    return found | maps | {"layers": list(snapshot.layers), "stats": snapshot.stats.as_dict()}


def loaded_object(loaded: LoadedModel, *, whole: bool = False) -> dict[str, Any]:
    """A loaded model as JSON; `whole`: with its statistics and plan."""
    found = {field.name: getattr(loaded, field.name) for field in fields(loaded)}
    found["expires"] = loaded.expires and loaded.expires.isoformat()
    found["names"] = [each.name for each in loaded.names]
    found["stats"] = loaded.stats.as_dict()
    return found if whole else {name: value for name, value in found.items() if name not in ("stats", "plan")}


routes = [Route("/live", live)]
