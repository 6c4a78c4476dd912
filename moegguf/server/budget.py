"""`GET /budget?model=NAME`: the memory that a loaded model's experts have. `PUT /budget`: other budgets for them, for
someone who needs the memory now.

Body: `{"model": NAME, "expert_cache": "2GiB", "vram_cache": "4GiB"}`, one or both, as `--expert-cache` and
`--vram-cache` take them, up to what the model was loaded with; `vram_cache` holds what prompts are staged in, which
stays as it is (`staging_bytes` of the reply), and slots. It acts between two passes of a running answer, changes
no token, and lasts until the model is unloaded.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.errors import BudgetError
from moegguf.quantities import parse_expert_cache
from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError
from moegguf.serving.events import LoadedModel
from moegguf.serving.memory_budget import planned_budgets


class BudgetRequest(BaseModel):
    """The body of PUT /budget."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=limits.NAME_CHARS)
    expert_cache: str | int | None = Field(default=None, union_mode="left_to_right")
    vram_cache: str | int | None = Field(default=None, union_mode="left_to_right")


async def put_budget(request: Request) -> Response:
    """Replies with what experts have now, and all of the model's memory, in bytes.

    Raises HttpError 400 for a budget that cannot be read, is too small or does not fit.
    """
    body = await read_body(request, BudgetRequest)
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
    for loaded in state.manager.loaded():
        if entry.name in (each.name for each in loaded.names):
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


routes = [Route("/budget", get_budget, methods=["GET"]), Route("/budget", put_budget, methods=["PUT"])]
