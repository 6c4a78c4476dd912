"""/api/version, tags, ps, show, copy and delete; and push, which is not supported."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.gguf.reader import read_gguf
from moegguf.models.catalog import Catalog
from moegguf.models.details import details, parameters_of
from moegguf.models.entry import Details, ModelEntry
from moegguf.models.recipe import parameter_lines
from moegguf.package import __version__
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import details_or_none, find
from moegguf.server.common.objects import moe_object, to_ns
from moegguf.server.ollama.chat import details_object, time_text
from moegguf.server.ollama.schema import CopyRequest, ModelBody, ShowRequest
from moegguf.serving.events import LoadedModel, LoadedName

OLLAMA_VERSION = "0.33.0"  # of the API; clients parse it as numbers and refuse old ones

SHORT_ARRAY = 5  # longer ones are shown empty without `verbose`
HIDDEN = ("general.name", "tokenizer.chat_template")  # in other fields of the reply


async def _version(request: Request) -> Response:
    return JSONResponse({"version": OLLAMA_VERSION, "moegguf": __version__})


async def tags(request: Request) -> Response:
    """All models, newest first."""
    catalog: Catalog = request.app.state.catalog
    return JSONResponse({"models": await asyncio.to_thread(lambda: [_tag_object(each) for each in catalog.entries()])})


def _tag_object(entry: ModelEntry) -> dict[str, Any]:
    """An entry of the list; with empty details when its file cannot be read."""
    known = details_or_none(entry)
    more = {"context_length": known.n_ctx_train, "embedding_length": known.n_embd} if known else {}
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": time_text(entry.modified),
        "size": entry.size_bytes,
        "digest": entry.digest,
        "details": details_object(known, entry.parent) | more,
        "capabilities": list(known.capabilities) if known else [],
        **({"missing": [str(path) for path in entry.missing]} if entry.missing else {}),
    }


async def ps(request: Request) -> Response:
    """Names of the models in memory, latest expiry first."""
    state = request.app.state

    def found(loaded: list[LoadedModel]) -> list[dict[str, Any]]:
        pairs = ((model, name) for model in loaded for name in model.names)
        return [
            _loaded_object(state.catalog, model, name, state.totals.prompt_tokens(name.name)) for model, name in pairs
        ]

    return JSONResponse({"models": await asyncio.to_thread(found, state.manager.loaded())})


def _loaded_object(
    catalog: Catalog, model: LoadedModel, loaded: LoadedName, prompt_tokens: Mapping[str, int]
) -> dict[str, Any]:
    """A name of a model in memory; `size`: the model's memory in bytes, `size_vram`: the part of it on GPUs. Names with
    the same `pid` share them. prompt_tokens: where those of its prompts came from."""
    try:
        entry = find(catalog, loaded.name)
    except HttpError:  # removed while loaded
        entry = None
    known = details_or_none(entry) if entry else None
    return {
        "name": loaded.name,
        "model": loaded.name,
        "size": model.size_bytes,
        "digest": loaded.digest,
        "details": details_object(known, entry.parent if entry else ""),
        "expires_at": time_text(loaded.expires),
        "size_vram": model.vram_bytes,
        "context_length": model.n_ctx,
        "moe": moe_object(model.stats)
        | {"expert_share": _expert_share(model), "prompt_tokens": dict(prompt_tokens)}
        | {"last_answer": {"eval_count": model.last_answer_tokens, "eval_duration": to_ns(model.last_answer_s)}}
        | {"pid": model.pid, "busy": model.busy, "stopping": model.stopping, "queue": model.queue},
    }


def _expert_share(model: LoadedModel) -> float:
    """The share of its experts that a model has memory for: of a GPU or, where that is more, of RAM."""
    all_bytes = model.stats.n_experts * int(model.plan.get("slot_bytes", 0))
    in_vram = model.vram_cache_bytes - int(model.plan.get("staging_bytes", 0))
    return min(1.0, round(max(model.expert_cache_bytes, in_vram) / all_bytes, 6)) if all_bytes else 1.0


async def show(request: Request) -> Response:
    """The metadata; with `verbose` also long arrays and all tensors."""
    body = await read_body(request, ShowRequest)
    return JSONResponse(await asyncio.to_thread(show_object, request.app.state.catalog, body))


def show_object(catalog: Catalog, body: ShowRequest) -> dict[str, Any]:
    """The reply. Raises HttpError 404, ModelNameError, ModelFormatError."""
    entry = find(catalog, body.model)
    known = details(entry)
    system = body.system or entry.system
    found: dict[str, Any] = {
        "modelfile": catalog.modelfile(entry),
        "parameters": "\n".join(parameter_lines(parameters_of(entry))),
        "template": known.template or "",
        "details": details_object(known, entry.parent),
        "model_info": model_info(entry, known, verbose=bool(body.verbose)),
        "capabilities": list(known.capabilities),
        "modified_at": time_text(entry.modified),
    }
    if entry.license:
        found["license"] = entry.license
    if system:
        found["system"] = system
    if entry.mmproj:
        found["projector_info"] = json_metadata(read_gguf(entry.mmproj).metadata, verbose=False)
    if body.verbose:
        found["tensors"] = list(tensors(entry.files))
    return found


def model_info(entry: ModelEntry, known: Details, *, verbose: bool) -> dict[str, Any]:
    """The keys of the GGUF header, and the number of parameters as `general.parameter_count`."""
    long = long_arrays(entry.path) if verbose else {}
    shown = {key: value for key, value in {**known.metadata, **long}.items() if key not in HIDDEN}
    return json_metadata(shown, verbose=verbose) | {"general.parameter_count": known.n_parameters}


def json_metadata(metadata: Mapping[str, Any], *, verbose: bool) -> dict[str, Any]:
    """Metadata as JSON: infinite numbers become null; long arrays are empty without `verbose`."""
    return {key: _json_value(value, verbose) for key, value in metadata.items()}


def _json_value(value: Any, verbose: bool) -> Any:
    if isinstance(value, tuple | list):
        return [_json_value(each, verbose) for each in value] if verbose or len(value) <= SHORT_ARRAY else []
    return None if isinstance(value, float) and not math.isfinite(value) else value


def long_arrays(path: Path) -> dict[str, list[Any]]:
    """The arrays that `read_gguf` does not keep, such as the tokens of the vocabulary."""
    from gguf import GGUFReader

    names = read_gguf(path).arrays  # also validates the file for the other reader
    fields = GGUFReader(path).fields
    return {name: fields[name].contents() for name in names if name in fields}


def tensors(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Name, type and shape of all tensors, ne0 first."""
    for file in files:
        for tensor in read_gguf(file).tensors:
            yield {"name": tensor.name, "type": tensor.type_name, "shape": list(tensor.shape)}


async def copy(request: Request) -> Response:
    """Adds a name for a model; no file is copied."""
    body = await read_body(request, CopyRequest)
    catalog = request.app.state.catalog

    def work() -> None:
        find(catalog, body.source)
        catalog.copy(body.source, body.destination)

    await asyncio.to_thread(work)
    return Response()


async def delete(request: Request) -> Response:
    """Unloads a model, then removes its name."""
    body = await read_body(request, ModelBody)
    state = request.app.state
    entry = await asyncio.to_thread(find, state.catalog, body.model, even_missing=True)
    await state.manager.unload(entry.name)
    await asyncio.to_thread(state.catalog.remove, entry.name)
    return Response()


async def unsupported(request: Request) -> Response:
    """Raises HttpError 501: an operation that needs ollama.com."""
    raise HttpError(501, f"{request.url.path.rpartition('/')[2]} is not supported")


routes = [
    Route("/api/version", _version, methods=["GET"]),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/copy", copy, methods=["POST"]),
    Route("/api/delete", delete, methods=["DELETE"]),
    Route("/api/push", unsupported, methods=["POST"]),
]
