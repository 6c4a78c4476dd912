"""Ollama's endpoints about models: they list, show, copy, delete, download and create
models.

When the client of /api/pull disconnects, the download stops. The received part of a
file of up to 50 GB is kept, and the next download of the file resumes from there. The
endpoint /api/create creates a new name for another name's model or for uploaded files
(/api/blobs). Pushing a model is not supported.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import read_gguf
from moegguf.models.catalog import Catalog, check_removable
from moegguf.models.details import details, parameters_of
from moegguf.models.entry import Details, ModelEntry, PullStatus
from moegguf.models.pull import pull as fetch
from moegguf.models.recipe import Recipe, left_out, parameter_lines
from moegguf.package import __version__
from moegguf.server.common import limits
from moegguf.server.common.body import Body, chunks, read_body, without_nulls
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import Name, Options, details_or_none, find
from moegguf.server.common.replies import (
    LineResponse,
    Lines,
    WholeResponse,
    json_line,
    moe_object,
    present,
    to_ns,
)
from moegguf.server.ollama.chat import ChatMessage, ModelBody, time_text
from moegguf.serving.events import LoadedModel, LoadedName
from moegguf.text import without_surrogates

# Version of Ollama's API; clients parse it as numbers and refuse old versions.
OLLAMA_VERSION = "0.33.0"
SHORT_ARRAY = 5  # longer arrays are shown as empty without `verbose`
# metadata left out of `model_info`, as in Ollama; `template` has the chat template
HIDDEN = ("general.name", "tokenizer.chat_template")
SUCCESS = "success"

Json = dict[str, Any]

# Lists


async def _version(request: HttpRequest) -> Response:
    return JSONResponse({"version": OLLAMA_VERSION, "moegguf": __version__})


def _tags(request: HttpRequest) -> Response:
    """Replies with all models of the catalog, newest first. Starlette calls this
    function on a thread."""
    catalog: Catalog = request.app.state.catalog
    return JSONResponse({"models": [_tag_object(each) for each in catalog.entries()]})


def _details_object(known: Details | None, parent: str = "") -> Json:
    """Returns Ollama's object `details`. If `known` is None, because the model's file
    cannot be read, the fields about the file are empty."""
    return {
        "parent_model": parent,
        "format": "gguf",
        "family": known.family if known else "",
        "families": [known.family] if known else [],
        "parameter_size": known.parameter_size if known else "",
        "quantization_level": known.quantization if known else "",
    }


def _tag_object(entry: ModelEntry) -> Json:
    """Returns one model of the list in /api/tags. If its file cannot be read, facts
    from the file are empty or absent."""
    known = details_or_none(entry)
    more = (
        {"context_length": known.n_ctx_train, "embedding_length": known.n_embd}
        if known
        else {}
    )
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": time_text(entry.modified),
        "size": entry.size_bytes,
        "digest": entry.digest,
        "details": _details_object(known, entry.parent) | more,
        "capabilities": list(known.capabilities) if known else [],
        **present(missing=[without_surrogates(str(path)) for path in entry.missing]),
    }


async def _ps(request: HttpRequest) -> Response:
    """Replies with one object for each name of a loaded model. Models that expire last
    come first."""
    state = request.app.state

    def found(loaded: list[LoadedModel]) -> list[Json]:
        pairs = ((model, name) for model in loaded for name in model.names)
        return [
            _loaded_object(
                state.catalog, model, name, state.totals.prompt_tokens(name.name)
            )
            for model, name in pairs
        ]

    return JSONResponse(
        {"models": await asyncio.to_thread(found, state.manager.loaded())}
    )


def _loaded_object(
    catalog: Catalog,
    model: LoadedModel,
    loaded: LoadedName,
    prompt_tokens: Mapping[str, int],
) -> Json:
    """Returns the entry of /api/ps for one name of a loaded model. Names with the same
    `pid` share one loaded model.

    `size` is the model's memory in bytes, and `size_vram` the part of it on GPUs.
    `expert_share` is the larger of two shares: the experts that fit into the slots on
    GPUs, and the experts that fit into the slots in RAM. `expert_share` is
    null for a model without experts.

    prompt_tokens: {where prompt tokens came from ("computed", "memory" or "disk"):
    their number}.
    """
    try:
        entry = find(catalog, loaded.name)
    except HttpError:  # the name was removed while the model was loaded
        entry = None
    known = details_or_none(entry) if entry else None
    plan = model.plan
    all_in_ram = model.stats.n_experts * plan.slot_bytes
    all_on_gpus = model.stats.n_experts * plan.device_slot_bytes
    in_ram, on_gpus = (
        model.cache_bytes["RAM"],
        model.cache_bytes["VRAM"] - plan.supply.staging_bytes,
    )
    share = max(in_ram / all_in_ram, on_gpus / all_on_gpus) if all_in_ram else None
    return {
        "name": loaded.name,
        "model": loaded.name,
        "size": model.size_bytes,
        "digest": loaded.digest,
        "details": _details_object(known, entry.parent if entry else ""),
        "expires_at": time_text(loaded.expires),
        "size_vram": model.vram_bytes,
        "context_length": model.n_ctx,
        "moe": {
            **moe_object(model.stats),
            "expert_share": share and min(1.0, round(share, 6)),
            "prompt_tokens": dict(prompt_tokens),
            "last_answer": {
                "eval_count": model.last_answer_tokens,
                "eval_duration": to_ns(model.last_answer_s),
            },
            "pid": model.pid,
            "busy": model.busy,
            "stopping": model.stopping,
            "queue": model.queue,
        },
    }


# One model


class _ShowRequest(ModelBody):
    verbose: bool = False
    system: str = ""
    options: Options | None = None


async def _show(request: HttpRequest) -> Response:
    body = await read_body(request, _ShowRequest)
    return JSONResponse(
        await asyncio.to_thread(_show_object, request.app.state.catalog, body)
    )


def _show_object(catalog: Catalog, body: _ShowRequest) -> Json:
    entry = find(catalog, body.model)
    known, verbose = details(entry), body.verbose
    metadata = {**known.metadata, **(_long_arrays(entry.path) if verbose else {})}
    shown = {key: value for key, value in metadata.items() if key not in HIDDEN}
    found: Json = {
        "modelfile": catalog.modelfile(entry),
        "parameters": "\n".join(parameter_lines(parameters_of(entry))),
        "template": known.template or "",
        "details": _details_object(known, entry.parent),
        "model_info": _json_value(shown, verbose)
        | {"general.parameter_count": known.n_parameters},
        "capabilities": list(known.capabilities),
        "modified_at": time_text(entry.modified),
        **present(
            license=entry.license,
            messages=[dict(message) for message in entry.messages],
            system=body.system or entry.system,
        ),
    }
    if entry.mmproj:
        found["projector_info"] = _json_value(
            read_gguf(entry.mmproj).metadata, verbose=False
        )
    if verbose:
        tensors = (tensor for file in entry.files for tensor in read_gguf(file).tensors)
        found["tensors"] = [
            {"name": each.name, "type": each.type_name, "shape": list(each.shape)}
            for each in tensors
        ]
    return found


def _json_value(value: Any, verbose: bool) -> Any:
    """Converts metadata to JSON. NaN and infinite numbers become null. Without
    `verbose`, arrays of more than SHORT_ARRAY elements become empty."""
    if isinstance(value, Mapping):
        return {key: _json_value(each, verbose) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return (
            [_json_value(each, verbose) for each in value]
            if verbose or len(value) <= SHORT_ARRAY
            else []
        )
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _long_arrays(path: Path) -> dict[str, list[Any]]:
    """Returns {key: elements} for all arrays in the metadata, including long arrays
    whose elements `read_gguf` skips, such as the vocabulary's tokens."""
    from gguf import GGUFReader

    names = read_gguf(path).arrays  # read_gguf validates the file; GGUFReader does not
    fields = GGUFReader(path).fields
    return {name: fields[name].contents() for name in names if name in fields}


class _CopyRequest(Body):
    source: Name
    destination: Name


async def _copy(request: HttpRequest) -> Response:
    body = await read_body(request, _CopyRequest)
    catalog = request.app.state.catalog
    await asyncio.to_thread(find, catalog, body.source)
    await asyncio.to_thread(catalog.copy, body.source, body.destination)
    return Response()


async def _delete(request: HttpRequest) -> Response:
    body = await read_body(request, ModelBody)
    state = request.app.state
    entry = await asyncio.to_thread(find, state.catalog, body.model, even_missing=True)
    check_removable(entry)
    await state.manager.unload(entry.name)
    await asyncio.to_thread(state.catalog.remove, entry.name)
    return Response()


async def _push(request: HttpRequest) -> Response:
    # Ollama would upload the model to ollama.com.
    raise HttpError("push is not supported", 501)


# New models


class _PullRequest(ModelBody):
    stream: bool = True


def _progress_response(
    body: _PullRequest | _CreateRequest, statuses: AsyncGenerator[Json]
) -> Response:
    """Returns a response with one line of JSON for each status, or with only the last
    status if `stream` is false."""

    async def lines() -> Lines:
        async with aclosing(statuses):
            async for status in statuses:
                yield json_line(status)

    async def last() -> Json:
        async with aclosing(statuses):
            return [status async for status in statuses][-1]

    return LineResponse(lines()) if body.stream else WholeResponse(last())


async def _pull(request: HttpRequest) -> Response:
    body = await read_body(request, _PullRequest)
    return _progress_response(body, _pulling(body.model, request.app.state.catalog))


async def _pulling(name: str, catalog: Catalog) -> AsyncGenerator[Json]:
    """Downloads a model on a daemon thread, and yields the progress. Raises the errors
    of `moegguf.models.pull.pull`. Closing the generator cancels the download."""
    loop, cancelled = asyncio.get_running_loop(), threading.Event()
    items: asyncio.Queue[PullStatus | BaseException | None] = asyncio.Queue()

    def put(item: PullStatus | BaseException | None) -> None:
        with suppress(RuntimeError):  # raised if the loop is already closed
            loop.call_soon_threadsafe(items.put_nowait, item)

    def work() -> None:
        try:
            fetch(name, catalog, put, cancelled)
        except BaseException as error:  # the loop below re-raises the error
            put(error)
        else:
            put(None)

    threading.Thread(target=work, name="moegguf-pull", daemon=True).start()
    try:
        while (item := await items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            # Success is sent below, when the download has ended.
            if item.status != SUCCESS:
                yield _status_object(item)
        yield {"status": SUCCESS}
    finally:
        cancelled.set()


def _status_object(status: PullStatus) -> Json:
    """Returns a download's status in Ollama's format. `completed` is absent until bytes
    of the file have been reported."""
    found: Json = {"status": status.status}
    if status.digest or status.file:
        found |= {"digest": status.digest, "total": status.total_bytes}
    if status.file:
        found["file"] = status.file
    if status.completed_bytes is not None:
        found["completed"] = status.completed_bytes
    return found


class _CreateRequest(ModelBody):
    """The body of /api/create. The weights come either from the model `from_` or from
    `files`, uploaded blobs by file name. The template, system message, license,
    parameters, messages and adapter are stored with the new name. `quantize` is
    refused."""

    from_: Annotated[str, Field(alias="from", max_length=limits.NAME_CHARS)] = ""
    files: Annotated[dict[str, str], Field(max_length=1024)] = {}
    adapters: dict[str, str] = {}
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: Annotated[Json, BeforeValidator(without_nulls)] = {}
    messages: Annotated[list[ChatMessage], Field(max_length=limits.MESSAGES)] = []
    quantize: str = ""
    stream: bool = True


async def _create(request: HttpRequest) -> Response:
    body = await read_body(request, _CreateRequest)
    if not body.from_ and not body.files:
        raise HttpError("neither 'from' or 'files' was specified")
    if body.quantize:
        raise HttpError(
            "quantize is not supported; use files that are already quantised"
        )
    recipe = Recipe(
        from_=body.from_,
        files=body.files,
        adapters=body.adapters,
        system=body.system,
        template=body.template,
        parameters=body.parameters,
        messages=tuple(
            {"role": each.role, "content": each.content} for each in body.messages
        ),
        license="\n".join(body.license)
        if isinstance(body.license, list)
        else body.license,
    )
    return _progress_response(body, _creating(body, recipe, request.app.state.catalog))


async def _creating(
    body: _CreateRequest, recipe: Recipe, catalog: Catalog
) -> AsyncGenerator[Json]:
    if recipe.from_:
        await asyncio.to_thread(find, catalog, recipe.from_)
    try:
        await asyncio.to_thread(catalog.create, body.model, recipe)
    except ModelFormatError as error:
        raise HttpError(str(error)) from None
    for digest in (*recipe.files.values(), *recipe.adapters.values()):
        yield {"status": f"using existing layer {digest}"}
    warnings = left_out(recipe)
    for sentence in warnings:
        yield {"status": f"warning: {sentence}"}
    yield {"status": "writing manifest"}
    yield {"status": SUCCESS, **present(warnings=[] if body.stream else warnings)}


def _has_blob(request: HttpRequest) -> Response:  # called on a thread
    digest = request.path_params["digest"]
    if not request.app.state.catalog.blobs.has(digest):
        raise HttpError(f"blob {digest!r:.80} not found", 404)
    return Response()


async def _add_blob(request: HttpRequest) -> Response:
    """Stores the body as a blob with the digest in the path. Replies with status 201,
    or 200 if the blob already exists. Raises HttpError 400 if the body has another
    digest."""
    digest, catalog = request.path_params["digest"], request.app.state.catalog
    if await asyncio.to_thread(catalog.blobs.has, digest):
        return Response()
    length = request.headers.get("content-length", "")
    size_bytes = int(length) if length.isdecimal() and len(length) < 19 else None
    writer = await asyncio.to_thread(catalog.blobs.writer, digest, size_bytes)
    with writer:
        async for part in chunks(request):
            await asyncio.to_thread(writer.write, part)
        try:
            await asyncio.to_thread(writer.commit)
        except ModelFormatError as error:
            raise HttpError(str(error)) from None
    return Response(status_code=201)


routes = [
    Route("/api/version", _version),
    Route("/api/tags", _tags),
    Route("/api/ps", _ps),
    Route("/api/show", _show, methods=["POST"]),
    Route("/api/copy", _copy, methods=["POST"]),
    Route("/api/delete", _delete, methods=["DELETE"]),
    Route("/api/push", _push, methods=["POST"]),
    Route("/api/pull", _pull, methods=["POST"]),
    Route("/api/create", _create, methods=["POST"]),
    Route("/api/blobs/{digest:path}", _has_blob, methods=["HEAD"]),
    Route("/api/blobs/{digest:path}", _add_blob, methods=["POST"]),
]
