"""`PUT /budget`: another budget for the experts of a loaded model, for someone who needs the memory now.

Body: `{"model": NAME, "expert_cache": "2GiB"}`, as `--expert-cache` takes it, up to what the model was loaded with. It
acts between two passes of a running answer, changes no token, and lasts until the model is unloaded.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.quantities import parse_expert_cache
from moegguf.server.common import limits
from moegguf.server.common.body import read_body


class BudgetRequest(BaseModel):
    """The body of PUT /budget."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=limits.NAME_CHARS)
    expert_cache: str | int = Field(union_mode="left_to_right")


async def put_budget(request: Request) -> Response:
    """Replies with what experts have now, and all of the model's memory, in bytes."""
    body = await read_body(request, BudgetRequest)
    loaded = await request.app.state.manager.set_expert_cache(body.model, parse_expert_cache(body.expert_cache))
    slot_bytes = loaded.plan.get("slot_bytes", 0)
    return JSONResponse(
        {
            "model": loaded.name,
            "expert_cache_bytes": loaded.expert_cache_bytes,
            "n_slots": loaded.expert_cache_bytes // slot_bytes if slot_bytes else 0,
            "n_experts": loaded.stats.n_experts,
            "size_bytes": loaded.size_bytes,
        }
    )


routes = [Route("/budget", put_budget, methods=["PUT"])]
