"""Endpoints for the experts of loaded models: their use (`/live`) and their memory
(`/budget`).

`/live` sends one JSON object per line; with `?once=1` it sends one object for all
models. It never loads a model.
- One kind of line is a snapshot: a `moegguf.serving.events.Snapshot` with bytes in base64, and the state of its model
  under `loaded`. Snapshots without visible changes are not sent.
- The other kind is `{"loaded_models": [names]}`. It is sent first, at every change, and every HEARTBEAT_S seconds.
  While models are being loaded, it has a key `loading` with the share of each model that has been read. Without `model`
  in the query, only the first name of each model is listed.

`/budget` shows the memory for a loaded model's experts, and PUT changes it.
`expert_cache` and `vram_cache` accept the same values as `--expert-cache` and
`--vram-cache`. A budget cannot exceed its size at the model's load; a larger value is
reduced to that size. `vram_cache` includes the buffers in which prompts are staged;
their size, `staging_bytes` in the reply, does not change. A new budget takes effect
between two passes of a running answer and changes no token. It lasts until the model is
unloaded, and is kept if waiting requests then reload the model.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

from pydantic import ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.errors import BudgetError
from moegguf.models.entry import ModelEntry
from moegguf.options import BUDGETS
from moegguf.quantities import parse_expert_cache
from moegguf.server.common.body import Body, Whole, read_body, without_nulls
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import Name, loaded_of
from moegguf.server.common.replies import LineResponse, json_line, moe_object
from moegguf.serving.events import LoadedModel, Snapshot
from moegguf.serving.model_manager import ModelManager

# Seconds after which a line with the loaded models is resent even if nothing has
# changed.
HEARTBEAT_S = 5.0
MAX_SNAPSHOTS_PER_S = 20.0
POLL_S = 0.5  # longest pause in seconds between two checks of the loaded models


async def _live(request: HttpRequest) -> Response:
    """Replies with a stream of snapshots, or with one object for all loaded models if
    the query has `once=1`. For a stream the query may have `model` (default: all loaded
    models) and `per_s` (snapshots per second; default: 4)."""
    state, query = request.app.state, request.query_params
    if query.get("once", "0") not in ("", "0"):
        return JSONResponse({"models": await _current_state(state.manager)})
    name, text = query.get("model"), query.get("per_s", "4")
    try:
        per_s = float(text)
    except ValueError:
        per_s = 0.0
    if not 0 < per_s <= MAX_SNAPSHOTS_PER_S:
        raise HttpError(
            f"per_s must be a number above 0 and at most {MAX_SNAPSHOTS_PER_S:g}, but is {text!r:.40}"
        )
    entry = await asyncio.to_thread(state.catalog.find, name) if name else None
    return LineResponse(snapshot_lines(state.manager, entry, per_s, state.ending))


async def _current_state(manager: ModelManager) -> list[dict[str, Any]]:
    """Returns the state of each loaded model, with its snapshot under `snapshot`. The
    snapshot is None if the model is being unloaded or has just been unloaded."""
    loaded, before = (
        manager.loaded(),
        await _snapshots(manager, None, MAX_SNAPSHOTS_PER_S),
    )
    await asyncio.sleep(1 / MAX_SNAPSHOTS_PER_S)
    now = await _snapshots(manager, None, MAX_SNAPSHOTS_PER_S)
    found = {
        name: _snapshot_object(snapshot.since(before.get(name)))
        for name, snapshot in now.items()
    }
    return [
        _loaded_object(model, whole=True) | {"snapshot": found.get(model.name)}
        for model in loaded
    ]


async def _snapshots(
    manager: ModelManager, entry: ModelEntry | None, per_s: float
) -> dict[str, Snapshot]:
    """Returns {name: current snapshot} for the model `entry`, or for all loaded models
    if `entry` is None. `per_s` is the number of snapshots per second that the client
    reads."""
    return {
        snapshot.model: snapshot
        for snapshot in await manager.snapshots(entry, 2 / per_s + POLL_S)
    }


async def snapshot_lines(
    manager: ModelManager,
    entry: ModelEntry | None,
    per_s: float,
    ending: threading.Event,
) -> AsyncGenerator[bytes]:
    """Yields the lines for one client of `/live`, until the generator is closed or the
    server shuts down."""
    sent: dict[str, Any] = {}
    sent_models: dict[str, Any] = {}
    sent_models_s = due_s = 0.0
    latest: dict[str, Snapshot] = {}
    while not ending.is_set():
        models = manager.loaded()
        loaded = {each.name: model for model in models for each in model.names}
        # A name that no request has used yet shows the model that its requests will use.
        if entry is not None and entry.name not in loaded:
            loaded.update(
                (entry.name, each) for each in models if each.digest == entry.digest
            )
        names = [model.name for model in models] if entry is None else list(loaded)
        line: dict[str, Any] = {"loaded_models": names}
        if loading := manager.loading():
            line["loading"] = {name: round(share, 2) for name, share in loading.items()}
        if line != sent_models or time.monotonic() - sent_models_s > HEARTBEAT_S:
            sent_models = line
            sent_models_s = time.monotonic()
            yield json_line(line)
        if time.monotonic() >= due_s:
            due_s, before = time.monotonic() + 1 / per_s, latest
            latest = await _snapshots(manager, entry, per_s)
            for name, now in latest.items():
                if (model := loaded.get(name)) is None:
                    continue
                snapshot = now.since(before.get(name))
                # A change in one of these figures, which clients display, triggers a
                # snapshot.
                visible = (
                    snapshot.state,
                    snapshot.busy,
                    snapshot.layers,
                    snapshot.stats.tokens,
                    model.last_answer_s,
                    model.queue,
                    model.stopping,
                    *model.cache_bytes.values(),
                )
                if (
                    visible != sent.get(name)
                    or any(snapshot.uses)
                    or any(snapshot.loads)
                ):
                    sent[name] = visible
                    yield json_line(
                        _snapshot_object(snapshot) | {"loaded": _loaded_object(model)}
                    )
        await asyncio.sleep(max(0.0, min(POLL_S, due_s - time.monotonic())))


def _snapshot_object(snapshot: Snapshot) -> dict[str, Any]:
    maps = {
        name: base64.b64encode(getattr(snapshot, name)).decode()
        for name in ("state", "uses", "loads")
    }
    return {
        **vars(snapshot),
        **maps,
        "layers": list(snapshot.layers),
        "stats": snapshot.stats.as_dict(),
    }


def _loaded_object(loaded: LoadedModel, *, whole: bool = False) -> dict[str, Any]:
    """Returns a loaded model and its budgets as a JSON object. `whole` adds the model's
    statistics and plan."""
    found = {
        **vars(loaded),
        **_budget_object(loaded),
        "expires": loaded.expires and loaded.expires.isoformat(),
        "names": [each.name for each in loaded.names],
        "last_answer_stats": moe_object(loaded.last_answer_stats),
        "stats": loaded.stats.as_dict(),
        "plan": loaded.plan.facts(),
    }
    hidden = {"cache_bytes"} if whole else {"cache_bytes", "stats", "plan"}
    return {name: value for name, value in found.items() if name not in hidden}


class _BudgetRequest(Body):
    model_config = ConfigDict(extra="forbid")

    model: Name
    expert_cache: str | Whole | None = None
    vram_cache: str | Whole | None = None


async def _put_budget(request: HttpRequest) -> Response:
    """Changes the budgets of a loaded model, and replies with the new budgets. Raises
    HttpError 400 if there is no budget in the body, or if a budget is invalid, too
    small, or larger than the free memory allows. Raises ModelNotFoundError for a model
    that is not loaded, and BusyError while it is being loaded or unloaded."""
    body = await read_body(request, _BudgetRequest)
    given = without_nulls({"RAM": body.expert_cache, "VRAM": body.vram_cache})
    if not given:
        raise HttpError(
            "a budget needs expert_cache or vram_cache, but neither is given; give at least one of them"
        )
    try:
        budgets = [
            parse_expert_cache(str(value), tier) for tier, value in given.items()
        ]
        loaded = await request.app.state.manager.set_budget(body.model, *budgets)
        return JSONResponse(_budget_object(loaded))
    except BudgetError as error:
        raise HttpError(str(error)) from None


async def _get_budget(request: HttpRequest) -> Response:
    """Replies with the budgets of a loaded model. Raises HttpError 404 for a model that
    is not loaded."""
    state, name = request.app.state, request.query_params.get("model", "")
    entry = await asyncio.to_thread(state.catalog.find, name)
    if loaded := loaded_of(state, entry):
        return JSONResponse(_budget_object(loaded))
    raise HttpError(
        f"{entry.name} is not loaded; send it a prompt, which loads it.", 404
    )


def _budget_object(loaded: LoadedModel) -> dict[str, Any]:
    """Returns a JSON object with the bytes and slots of a loaded model's experts. It
    also has the maximum bytes that PUT /budget can set, and the bytes of the whole
    model."""
    plan = loaded.plan
    staging_bytes = plan.supply.staging_bytes
    most = plan.cache_bytes
    in_ram, in_vram = (loaded.cache_bytes[tier] for tier in BUDGETS)
    return {
        "model": loaded.name,
        "expert_cache_bytes": in_ram,
        "n_slots": in_ram // max(1, plan.slot_bytes),
        "vram_cache_bytes": in_vram,
        "n_vram_slots": max(0, in_vram - staging_bytes)
        // max(1, plan.device_slot_bytes),
        "staging_bytes": staging_bytes,
        "slot_bytes": plan.slot_bytes,
        "n_experts": loaded.stats.n_experts,
        "max_expert_cache_bytes": most["RAM"],
        "max_vram_cache_bytes": most["VRAM"],
        "size_bytes": loaded.size_bytes,
        "vram_bytes": loaded.vram_bytes,
    }


routes = [
    Route("/live", _live),
    Route("/budget", _get_budget),
    Route("/budget", _put_budget, methods=["PUT"]),
]
