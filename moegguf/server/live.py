"""`/live`: snapshots of the experts of loaded models, one JSON object per line; `?once=1`: one object for all models.

A line is a snapshot (`moegguf.serving.events.Snapshot`, bytes in base64, the state of its model under `loaded`) or
`{"loaded_models": [names]}`, sent first, at every change, and every HEARTBEAT_S; of names that share a model, without
`model` in the query, the first. A snapshot without changes is left out. Watching loads no model, and ends with the
connection.

`GET /budget?model=NAME`: the memory that a loaded model's experts have. `PUT /budget`: other budgets for them, for
someone who needs the memory now. Body: `{"model": NAME, "expert_cache": "2GiB", "vram_cache": "4GiB"}`, one or both, as
`--expert-cache` and `--vram-cache` take them, up to what the model was loaded with; `vram_cache` holds what prompts are
staged in, which stays as it is (`staging_bytes` of the reply), and slots. It acts between two passes of a running
answer, changes no token, and lasts until the model is unloaded.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.errors import BudgetError
from moegguf.models.entry import ModelEntry
from moegguf.quantities import parse_expert_cache
from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import loaded_of
from moegguf.server.common.streams import LineResponse, json_line
from moegguf.serving.events import MAX_SNAPSHOTS_PER_S, LoadedModel, Snapshot, Watch
from moegguf.serving.memory_budget import planned_budgets
from moegguf.serving.model_manager import ModelManager

DEFAULT_PER_S = 4.0
HEARTBEAT_S = 5.0  # between two lines at most


async def live(request: Request) -> Response:
    """Query: `model` (default: all loaded ones), `per_s` snapshots a second, `once`."""
    state, query = request.app.state, request.query_params
    if query.get("once", "0") not in ("", "0"):
        return JSONResponse({"models": await current_state(state.manager)})
    name = query.get("model")
    entry = await asyncio.to_thread(state.catalog.find, name) if name else None
    return LineResponse(snapshot_lines(state.manager, entry, _per_s(query.get("per_s")), state.ending))


def _per_s(text: str | None) -> float:
    try:
        value = DEFAULT_PER_S if text is None else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_SNAPSHOTS_PER_S:
        raise HttpError(400, f"per_s must be a number above 0 and at most {MAX_SNAPSHOTS_PER_S:g}, but is {text!r:.40}")
    return value


async def current_state(manager: ModelManager) -> list[dict[str, Any]]:
    """The state of each loaded model, with its snapshot under `snapshot`; None of one that has just ended."""
    loaded, watch = manager.loaded(), Watch(manager.snapshots, None, MAX_SNAPSHOTS_PER_S)
    await watch.take()
    await watch.wait()
    found = {snapshot.model: snapshot for snapshot in await watch.take()}
    return [
        loaded_object(model, whole=True)
        | {"snapshot": snapshot_object(found[model.name]) if model.name in found else None}
        for model in loaded
    ]


async def snapshot_lines(
    manager: ModelManager, entry: ModelEntry | None, per_s: float, ending: threading.Event
) -> AsyncGenerator[bytes]:
    """The lines for one client, until closed, or until the server shuts down."""
    sent: dict[str, Any] = {}
    sent_names: list[str] | None = None
    sent_names_s = 0.0
    watch = Watch(manager.snapshots, entry, per_s)
    while not ending.is_set():
        models = manager.loaded()
        loaded = {each.name: model for model in models for each in model.names}
        names = [model.name for model in models] if entry is None else list(loaded)
        if names != sent_names or time.monotonic() - sent_names_s > HEARTBEAT_S:
            sent_names, sent_names_s = names, time.monotonic()
            yield json_line({"loaded_models": sent_names})
        for snapshot in await watch.take():
            model = loaded.get(snapshot.model)
            if model is None:
                continue
            # What a client displays, besides uses and loads.
            figures = model.queue, model.stopping, model.expert_cache_bytes, model.vram_cache_bytes, model.last_answer_s
            visible = snapshot.state, snapshot.busy, snapshot.stats.tokens, snapshot.layers, *figures
            if visible != sent.get(snapshot.model) or any(snapshot.uses) or any(snapshot.loads):
                sent[snapshot.model] = visible
                yield json_line(snapshot_object(snapshot) | {"loaded": loaded_object(model)})
        await watch.wait()


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


class _BudgetRequest(BaseModel):
    """The body of PUT /budget."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=limits.NAME_CHARS)
    expert_cache: str | int | None = Field(default=None, union_mode="left_to_right")
    vram_cache: str | int | None = Field(default=None, union_mode="left_to_right")


async def put_budget(request: Request) -> Response:
    """Replies with what experts have now, and all of the model's memory, in bytes. Raises HttpError 400 for a budget
    that cannot be read, is too small or does not fit."""
    body = await read_body(request, _BudgetRequest)
    if body.expert_cache is None and body.vram_cache is None:
        raise HttpError(400, "a budget needs expert_cache or vram_cache, but neither is given")
    try:
        expert_cache = None if body.expert_cache is None else parse_expert_cache(str(body.expert_cache))
        vram_cache = None if body.vram_cache is None else parse_expert_cache(str(body.vram_cache), "vram_cache")
        loaded = await request.app.state.manager.set_budget(body.model, expert_cache, vram_cache)
    except BudgetError as error:
        raise HttpError(400, str(error)) from None
    return budget_object(loaded)


async def get_budget(request: Request) -> Response:
    """Replies as `put_budget`. Raises HttpError 404 for a model that is not loaded."""
    state, name = request.app.state, request.query_params.get("model", "")
    entry = await asyncio.to_thread(state.catalog.find, name)
    if loaded := loaded_of(state, entry):
        return budget_object(loaded)
    raise HttpError(404, f"{entry.name} is not loaded; a request loads it.")


def budget_object(loaded: LoadedModel) -> JSONResponse:
    """What experts of a loaded model have, the most that they can have, and all of its memory."""
    slot_bytes, staging_bytes = loaded.plan.get("slot_bytes", 0), loaded.plan.get("staging_bytes", 0)
    most, most_vram = planned_budgets(loaded.plan)
    in_vram = max(0, loaded.vram_cache_bytes - staging_bytes)
    return JSONResponse(
        {
            "model": loaded.name,
            "expert_cache_bytes": loaded.expert_cache_bytes,
            "n_slots": loaded.expert_cache_bytes // slot_bytes if slot_bytes else 0,
            "vram_cache_bytes": loaded.vram_cache_bytes,
            "n_vram_slots": in_vram // slot_bytes if slot_bytes else 0,
            "staging_bytes": staging_bytes,
            "slot_bytes": slot_bytes,
            "n_experts": loaded.stats.n_experts,
            "max_expert_cache_bytes": most,
            "max_vram_cache_bytes": most_vram,
            "size_bytes": loaded.size_bytes,
            "vram_bytes": loaded.vram_bytes,
        }
    )


routes = [
    Route("/live", live),
    Route("/budget", get_budget, methods=["GET"]),
    Route("/budget", put_budget, methods=["PUT"]),
]
