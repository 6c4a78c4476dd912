"""/v1/files and /v1/batches: a client uploads a file of requests and gets a file of
answers. The requests of a batch have lower priority than other requests.

A batch calls the OpenAI-compatible endpoints in this process, with the same checks and
objects as over HTTP. Its requests skip access control, since the client that created
the batch has passed it. Their bodies do not count towards `ALL_BODIES_BYTES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moegguf.server.common.body import (
    Body,
    Whole,
    parse_body,
    parse_fields,
    read_body,
    read_form,
    too_large,
    without_nulls,
)
from moegguf.server.common.conversation import RequestBody
from moegguf.server.common.errors import NO_RETRY, HttpError, http_error
from moegguf.server.common.options import Name
from moegguf.server.common.replies import page, usage
from moegguf.server.embeddings import EmbeddingsBody
from moegguf.server.metrics import Totals
from moegguf.server.openai import chat, completions, responses
from moegguf.serving.batch.answers import Reply
from moegguf.serving.batch.batches import CANCELLABLE, Batch, Batches
from moegguf.serving.batch.files import StoredFile
from moegguf.serving.clients import BACKGROUND, current_client

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog
    from moegguf.serving.model_manager import ModelManager
    from moegguf.serving.ray.application import ReplicaManager
    from moegguf.serving.ray.config import ConfiguredCatalog
    from moegguf.settings import Settings

MAX_FILES_LISTED = 10_000
MAX_BATCHES_LISTED, DEFAULT_BATCHES_LISTED = 100, 20
# Fields of `Batch` that are also fields of OpenAI's batch objects.
BATCH_FIELDS = (
    "id", "endpoint", "model", "input_file_id", "status", "output_file_id", "error_file_id", "metadata",
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip
ENDPOINTS: Mapping[str, type[RequestBody | EmbeddingsBody]] = {
    "/v1/chat/completions": chat.ChatBody,
    "/v1/completions": completions.CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/responses": responses.ResponsesBody,
}
"""{path of an endpoint that a batch may call: the type of a request's body}"""


def new_state(
    manager: ModelManager | ReplicaManager,
    catalog: Catalog | ConfiguredCatalog,
    settings: Settings,
) -> State:
    """Returns the state of an application, which the endpoints read as `app.state`."""
    return State(
        {
            "manager": manager,
            "catalog": catalog,
            "settings": settings,
            "totals": Totals(),
            "preloading": None,
            "responses": None,
            "lora_scales": {},
        }
    )


async def reply_in_process(state: State, url: str, body: bytes) -> Reply:
    """Answers a POST request in this process, with lower priority than clients'
    requests. Returns errors as replies. Cancelling the call stops the answer, as a
    client's disconnect does."""
    kind = ENDPOINTS[url]
    current_client.set(BACKGROUND)
    try:
        if len(body) > kind.limit:
            raise too_large(kind.limit)
        return Reply(200, await parse_body(body, kind).whole_reply(state))
    except Exception as error:
        found = http_error(error)
        return Reply(found.status, found.body(url))


# Files


def _batches(request: Request) -> Batches:
    return request.app.state.batches


def _file_object(file: StoredFile) -> dict[str, Any]:
    facts = {
        name: getattr(file, name)
        for name in ("created_at", "expires_at", "filename", "purpose")
    }
    status = {"status": "processed", "status_details": None}
    return {"id": file.id, "object": "file", "bytes": file.n_bytes, **facts, **status}


class _ExpiresAfter(Body):
    """The time after a file's creation at which the file is deleted, within OpenAI's
    limits."""

    anchor: Literal["created_at"]
    seconds: Annotated[Whole, Field(ge=3600, le=2_592_000)]


class _FileForm(Body):
    purpose: Literal["batch"]
    expires_after: _ExpiresAfter | None = None


async def _create_file(request: Request) -> Response:
    """Stores an uploaded file. Raises HttpError, StorageError or BusyError."""
    with _batches(request).files.new() as file:
        filename, fields = await read_form(
            request, file.write, request.app.state.settings.upload_bytes
        )
        if filename is None:
            raise HttpError("file: field required")
        prefix = "expires_after["
        texts = {
            name[len(prefix) : -1]: text
            for name, text in fields.items()
            if name.startswith(prefix)
        }
        expiry = {
            name: int(text) if text.isascii() and text.isdecimal() else text
            for name, text in texts.items()
        }
        asked = parse_fields(
            fields | ({"expires_after": expiry} if expiry else {}), _FileForm
        )
        kept_s = asked.expires_after.seconds if asked.expires_after else None
        return JSONResponse(_file_object(file.finish(filename, asked.purpose, kept_s)))


async def _list_files(request: Request) -> Response:
    query = request.query_params
    if query.get("order", "desc") not in ("asc", "desc"):
        raise HttpError(
            f"order: must be 'asc' or 'desc', but is {query['order']!r:.40}"
        )
    files = [
        file
        for file in _batches(request).files.all()
        if query.get("purpose", file.purpose) == file.purpose
    ]
    if query.get("order") != "asc":
        files.reverse()
    return _listed(
        request,
        [_file_object(file) for file in files],
        MAX_FILES_LISTED,
        MAX_FILES_LISTED,
    )


async def _retrieve_file(request: Request) -> Response:
    return JSONResponse(
        _file_object(_batches(request).files.get(request.path_params["file"]))
    )


async def _file_content(request: Request) -> Response:
    store = _batches(request).files
    file = store.get(request.path_params["file"])
    return FileResponse(
        store.contents(file.id),
        media_type="application/octet-stream",
        filename=file.filename,
    )


async def _delete_file(request: Request) -> Response:
    file_id = request.path_params["file"]
    _batches(request).files.delete(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


# Batches


def _endpoint(value: str) -> str:
    if value not in ENDPOINTS:
        raise ValueError(f"must be one of {', '.join(ENDPOINTS)}")
    return value


class _BatchBody(Body):
    input_file_id: Name
    endpoint: Annotated[str, AfterValidator(_endpoint)]
    completion_window: Literal["24h"]
    metadata: Annotated[
        dict[
            Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]
        ]
        | None,
        Field(max_length=16),
        BeforeValidator(without_nulls),
    ] = None
    output_expires_after: _ExpiresAfter | None = None


def _batch_object(batch: Batch) -> dict[str, Any]:
    counts = batch.counts
    return {
        **{name: each for name, each in asdict(batch).items() if name in BATCH_FIELDS},
        "object": "batch",
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "completion_window": "24h",
        "request_counts": {
            "total": batch.total,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "usage": usage(
            counts.input_tokens,
            counts.cached_tokens,
            counts.output_tokens,
            counts.reasoning_tokens,
        ),
    }


async def _create_batch(request: Request) -> Response:
    """Creates a batch from an uploaded file. Raises HttpError, UnknownIdError,
    BatchFileError, BusyError or StorageError."""
    body = await read_body(request, _BatchBody)
    kept_s = body.output_expires_after.seconds if body.output_expires_after else None
    batch = _batches(request).create(
        body.endpoint, body.input_file_id, body.metadata, kept_s
    )
    return JSONResponse(_batch_object(batch))


async def _list_batches(request: Request) -> Response:
    objects = [_batch_object(batch) for batch in _batches(request).all()]
    return _listed(request, objects, MAX_BATCHES_LISTED, DEFAULT_BATCHES_LISTED)


async def _retrieve_batch(request: Request) -> Response:
    return JSONResponse(
        _batch_object(_batches(request).get(request.path_params["batch"]))
    )


async def _cancel_batch(request: Request) -> Response:
    """Starts cancelling a batch. Raises HttpError 409 if the batch has ended or is
    already writing its files. Also raises UnknownIdError, BusyError or StorageError."""
    batches = _batches(request)
    batch = batches.get(request.path_params["batch"])
    if batch.status in CANCELLABLE:
        batches.cancel(batch)
    elif batch.status != "cancelling":
        message = f"Cannot cancel a batch with status '{batch.status}'."
        raise HttpError(message, HTTPStatus.CONFLICT, headers=NO_RETRY)
    return JSONResponse(_batch_object(batch))


def _listed(
    request: Request, objects: list[dict[str, Any]], most: int, default: int
) -> Response:
    return JSONResponse({"object": "list", **page(request, objects, most, default)})


routes = [
    Route("/v1/files", _create_file, methods=["POST"]),
    Route("/v1/files", _list_files),
    Route("/v1/files/{file}", _retrieve_file),
    Route("/v1/files/{file}", _delete_file, methods=["DELETE"]),
    Route("/v1/files/{file}/content", _file_content),
    Route("/v1/batches", _create_batch, methods=["POST"]),
    Route("/v1/batches", _list_batches),
    Route("/v1/batches/{batch}", _retrieve_batch),
    Route("/v1/batches/{batch}/cancel", _cancel_batch, methods=["POST"]),
]
