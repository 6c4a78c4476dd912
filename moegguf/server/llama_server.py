"""llama-server's own endpoints, for its clients and for watchdogs: /health, /props, /tokenize, /detokenize.

Where it has one model, here `model` in the body or the query says which; without, the only one that is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf import __version__
from moegguf.models.entry import ModelEntry
from moegguf.server.common.body import Body, read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import look_up
from moegguf.server.common.options import MAX_TOKEN, ModelName, options_of
from moegguf.server.common.streams import WholeResponse
from moegguf.serving.events import Loaded

if TYPE_CHECKING:
    from moegguf.serving.manager import Lease


async def health(request: Request) -> Response:
    """200 while the server answers; `degraded` tells of models whose experts could not all be read."""
    failed = {model.name: model.stats.read_errors for model in request.app.state.manager.loaded()}
    failed = {name: n for name, n in failed.items() if n}
    if not failed:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "degraded", "read_errors": failed})


def which(request: Request, model: str | None) -> str:
    """The model that is meant. Raises HttpError 400 when none was named and not exactly one is loaded."""
    if model:
        return model
    loaded: list[Loaded] = request.app.state.manager.loaded()
    if len(loaded) != 1:
        raise HttpError(400, f"model: is missing, and {len(loaded)} models are loaded; say which one")
    return loaded[0].name


def visit(request: Request, model: str | None) -> Lease:
    """A look at a model beside the answers of others; loads it when it is not there."""
    lease: Lease = request.app.state.manager.lease(which(request, model), will_answer=False)
    return lease


async def props(request: Request) -> Response:
    """What is known of a model, without loading it: of `?model=`, or of the only one that is loaded."""
    name = which(request, request.query_params.get("model"))
    entry, known = await look_up(request.app.state.catalog, name)
    loaded = next((model for model in request.app.state.manager.loaded() if model.name == entry.name), None)
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": loaded.n_ctx if loaded else 0,
                "is_processing": loaded.busy if loaded else False,
                "params": _params(entry),
            },
            "total_slots": 1,
            "model_alias": entry.name,
            "model_path": entry.path.name,
            "chat_template": entry.template or known.template or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"moegguf-{__version__}",
            "is_sleeping": loaded is None,
        }
    )


def _params(entry: ModelEntry) -> dict[str, Any]:
    """How tokens are chosen when a request says nothing, by llama-server's names."""
    sampling = options_of(None, entry).sampling()
    names = "temperature top_k top_p min_p typical_p repeat_last_n repeat_penalty presence_penalty frequency_penalty"
    return {
        **{name: getattr(sampling, name) for name in names.split()},
        "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "stop": list(sampling.stop),
    }


class TokenizeBody(Body):
    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: ModelName | None = None


async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    return WholeResponse(_tokenize(request, body))


async def _tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
    special = body.parse_special is not False
    async with visit(request, body.model) as lease:
        tokens = await lease.tokenize(body.content, special=special)
        begin = await lease.tokenize("", special=True)  # the token that begins a text, where the model has one
        if special and not body.add_special:
            tokens = tokens[len(begin) :]
        elif body.add_special and not special:
            tokens = [*begin, *tokens]
        if not body.with_pieces:
            return {"tokens": tokens}
        pieces = [await lease.detokenize([token]) for token in tokens]
    return {"tokens": [{"id": token, "piece": piece} for token, piece in zip(tokens, pieces, strict=True)]}


class DetokenizeBody(Body):
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN)]]
    model: ModelName | None = None


async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    return WholeResponse(_detokenize(request, body))


async def _detokenize(request: Request, body: DetokenizeBody) -> dict[str, Any]:
    async with visit(request, body.model) as lease:
        return {"content": await lease.detokenize(body.tokens)}


routes = [
    Route("/health", health, methods=["GET"]),
    Route("/props", props, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
