"""`/live`: the experts of loaded models as they work, one JSON object per line, and `?once=1` as one object.

A line is a view (`moegguf.serving.events.View`, its bytes in base64, with the figures of the loaded model under
`loaded`) or `{"loaded_models": [names]}`, sent first, whenever that changes, and as a sign of life. A view that shows
nothing new is left out. Looking loads no model, and ends with the connection.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.server.common.errors import HttpError
from moegguf.server.common.streams import NdjsonResponse, dumps

if TYPE_CHECKING:
    from moegguf.serving.events import Loaded, Snapshot
    from moegguf.serving.manager import ModelManager

PER_S = 4.0
FASTEST_PER_S = 20.0
LOOK_S = 0.5  # between looks at which models are loaded
LIFE_S = 5.0  # between signs of life
ONCE_S = 2.0  # for a first view


async def live(request: Request) -> Response:
    """Query: `model` (default: all that are loaded), `per_s` views a second, `once`."""
    manager, query = request.app.state.manager, request.query_params
    if query.get("once", "0") not in ("", "0"):
        return JSONResponse({"models": await snapshot(manager)})
    name = query.get("model") or None
    if name is not None:
        name = (await asyncio.to_thread(request.app.state.catalog.find, name)).name
    return NdjsonResponse(Viewing(manager, name, _per_s(query.get("per_s")), request.app.state.ending).lines())


def _per_s(text: str | None) -> float:
    try:
        value = PER_S if text is None else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= FASTEST_PER_S:
        raise HttpError(400, f"per_s must be a number above 0 and at most {FASTEST_PER_S:g}, but is {text!r:.40}")
    return value


async def snapshot(manager: ModelManager) -> list[dict[str, Any]]:
    """Each loaded model's figures, with its view under `view`; None when it gives none in time."""
    loaded = manager.loaded()
    views = await asyncio.gather(*(first_view(manager, model.name) for model in loaded))
    facts = [loaded_facts(model, whole=True) for model in loaded]
    return [of | {"view": view and view_facts(view)} for of, view in zip(facts, views, strict=True)]


async def first_view(manager: ModelManager, name: str) -> Snapshot | None:
    try:
        async with asyncio.timeout(ONCE_S), aclosing(_views(manager, name, FASTEST_PER_S)) as views:
            return await anext(views, None)
    except TimeoutError:
        return None


def _views(manager: ModelManager, name: str, per_s: float) -> AsyncGenerator[Snapshot]:
    return cast("AsyncGenerator[Snapshot]", manager.watch(name, per_s))  # closing it ends the watch at once


class Viewing:
    """One client that looks on: a task per model puts views where `lines` takes them, the latest of each."""

    def __init__(
        self, manager: ModelManager, name: str | None, per_s: float, ending: threading.Event | None = None
    ) -> None:
        self._pool = manager
        self._ending = ending or threading.Event()
        self._name = name
        self._per_s = per_s
        self._latest: dict[str, Snapshot] = {}
        self._news = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def lines(self) -> AsyncGenerator[bytes]:
        """Lines until closed, or the server ends."""
        seen: dict[str, Any] = {}
        told: list[str] | None = None
        told_s = 0.0
        try:
            while True:
                loaded = {model.name: model for model in self._pool.loaded()}
                is_open = self._follow(loaded)
                if list(loaded) != told or time.monotonic() - told_s > LIFE_S:
                    told, told_s = list(loaded), time.monotonic()
                    yield _line({"loaded_models": told})
                for view in self._take():
                    model = loaded.get(view.model)
                    face = model and _face(view, model)
                    if model and (face != seen.get(view.model) or any(view.uses) or any(view.loads)):
                        seen[view.model] = face
                        yield _line(view_facts(view) | {"loaded": loaded_facts(model)})
                if not is_open or self._ending.is_set():
                    return
                await self._wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _follow(self, loaded: Iterable[str]) -> bool:
        """Watches the models it is about, and no others. False when the server is about to end; raises what a watch
        has raised."""
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
        async with aclosing(_views(self._pool, name, self._per_s)) as views:
            async for view in views:
                earlier = self._latest.get(name)
                self._latest[name] = view if earlier is None else _joined(earlier, view)
                self._news.set()

    def _take(self) -> list[Snapshot]:
        views, self._latest = list(self._latest.values()), {}
        self._news.clear()
        return views

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._news.wait()
        except TimeoutError:
            return


def _joined(earlier: Snapshot, later: Snapshot) -> Snapshot:
    """One view in place of two that the client was too slow for."""
    if earlier.layers != later.layers or later.seconds < earlier.seconds:
        return later  # loaded anew
    uses, loads = _sum(earlier.uses, later.uses), _sum(earlier.loads, later.loads)
    return replace(later, uses=uses, loads=loads)


def _sum(a: bytes, b: bytes) -> bytes:
    return bytes(min(x + y, 255) for x, y in zip(a, b, strict=True))


def _face(view: Snapshot, loaded: Loaded) -> tuple[Any, ...]:
    """What a client would see change, besides uses and loads."""
    return view.state, view.busy, view.stats.tokens, view.layers, loaded.queue, loaded.stopping


def view_facts(view: Snapshot) -> dict[str, Any]:
    """A view as JSON: its fields, the bytes in base64, the statistics with what follows from them."""
    facts = {field.name: getattr(view, field.name) for field in fields(view)}
    maps = {name: base64.b64encode(facts[name]).decode() for name in ("state", "uses", "loads")}
    return facts | maps | {"layers": list(view.layers), "stats": view.stats.as_dict()}


def loaded_facts(loaded: Loaded, *, whole: bool = False) -> dict[str, Any]:
    """A loaded model as JSON; `whole` with its statistics and its plan."""
    facts = {field.name: getattr(loaded, field.name) for field in fields(loaded)}
    facts["expires"] = loaded.expires and loaded.expires.isoformat()
    facts["stats"] = loaded.stats.as_dict()
    return facts if whole else {name: value for name, value in facts.items() if name not in ("stats", "plan")}


def _line(facts: dict[str, Any]) -> bytes:
    return dumps(facts).encode() + b"\n"


routes = [Route("/live", live)]
