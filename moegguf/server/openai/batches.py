"""/v1/files and /v1/batches: files of requests, answered while nobody else waits, and of their answers."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moegguf.server.common import limits
from moegguf.server.common.body import Body, parse_fields, read_body
from moegguf.server.common.errors import NO_RETRY, HttpError
from moegguf.server.common.forms import read_form
from moegguf.server.common.objects import page, usage
from moegguf.server.openai.in_process import ENDPOINTS
from moegguf.serving.batch.batches import CANCELLABLE, Batch, Batches
from moegguf.serving.batch.files import StoredFile

MAX_FILES_LISTED = 10_000
MAX_BATCHES_LISTED, DEFAULT_BATCHES_LISTED = 100, 20
TIMES = (
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Id = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]


def _batches(request: Request) -> Batches:
    return request.app.state.batches


def file_object(file: StoredFile) -> dict[str, Any]:
    """A file as OpenAI describes it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.n_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


class _ExpiresAfter(Body):
    """When a file is removed: OpenAI's range."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class _FileForm(Body):
    purpose: Literal["batch"]
    expires_after: _ExpiresAfter | None = None


def seconds(expires_after: _ExpiresAfter | None) -> int | None:
    """How long a file is kept; None: until it is deleted."""
    return None if expires_after is None else expires_after.seconds


async def create_file(request: Request) -> Response:
    """Stores a file. Raises HttpError 400, 413, StorageError, BusyError."""
    with _batches(request).files.new() as file:
        form = await read_form(request, file.write, request.app.state.settings.upload_bytes)
        if form.filename is None:
            raise HttpError(400, "file: field required")
        prefix, fields = "expires_after[", form.fields
        expiry = {name[len(prefix) : -1]: text for name, text in fields.items() if name.startswith(prefix)}
        asked = parse_fields(fields | ({"expires_after": expiry} if expiry else {}), _FileForm)
        return JSONResponse(file_object(file.finish(form.filename, asked.purpose, seconds(asked.expires_after))))


async def list_files(request: Request) -> Response:
    """The files, newest first unless `order` is asc."""
    query = request.query_params
    if query.get("order", "desc") not in ("asc", "desc"):
        raise HttpError(400, "order: must be 'asc' or 'desc'")
    files = [file for file in _batches(request).files.all() if query.get("purpose", file.purpose) == file.purpose]
    if query.get("order") != "asc":
        files.reverse()
    return listed(request, [file_object(file) for file in files], MAX_FILES_LISTED)


async def retrieve_file(request: Request) -> Response:
    """One file's description. Raises UnknownIdError."""
    return JSONResponse(file_object(_batches(request).files.get(request.path_params["file"])))


async def file_content(request: Request) -> Response:
    """The contents of a file. Raises UnknownIdError."""
    store, file_id = _batches(request).files, request.path_params["file"]
    return FileResponse(
        store.path(file_id), media_type="application/octet-stream", filename=store.get(file_id).filename
    )


async def delete_file(request: Request) -> Response:
    """Removes a file. Raises UnknownIdError."""
    file_id = request.path_params["file"]
    _batches(request).files.delete(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _endpoint(value: str) -> str:
    if value not in ENDPOINTS:
        raise ValueError(f"must be one of {', '.join(ENDPOINTS)}")
    return value


class _BatchBody(Body):
    input_file_id: Id
    endpoint: Annotated[str, AfterValidator(_endpoint)]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value] | None, Field(max_length=16)] = None
    output_expires_after: _ExpiresAfter | None = None


def batch_object(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI describes it."""
    counts = batch.counts
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: value for name, value in asdict(batch).items() if name in TIMES},
        "request_counts": {"total": batch.total, "completed": counts.completed, "failed": counts.failed},
        "usage": usage(counts.input_tokens, counts.cached_tokens, counts.output_tokens, counts.reasoning_tokens),
        "metadata": batch.metadata,
    }


async def create_batch(request: Request) -> Response:
    """A new batch. Raises HttpError 400, UnknownIdError, BatchFileError, BusyError, StorageError."""
    body = await read_body(request, _BatchBody)
    kept_s = seconds(body.output_expires_after)
    batch = _batches(request).create(body.endpoint, body.input_file_id, body.metadata, kept_s)
    return JSONResponse(batch_object(batch))


async def list_batches(request: Request) -> Response:
    """The batches, newest first."""
    objects = [batch_object(batch) for batch in _batches(request).all()]
    return listed(request, objects, MAX_BATCHES_LISTED, DEFAULT_BATCHES_LISTED)


async def retrieve_batch(request: Request) -> Response:
    """One batch. Raises UnknownIdError."""
    return JSONResponse(batch_object(_batches(request).get(request.path_params["batch"])))


async def cancel_batch(request: Request) -> Response:
    """Begins to cancel a batch. Raises HttpError 409 for one that has ended, UnknownIdError, StorageError."""
    batches = _batches(request)
    batch = batches.get(request.path_params["batch"])
    if batch.status in CANCELLABLE:
        batches.cancel(batch)
    elif batch.status != "cancelling":
        message = f"Cannot cancel a batch with status '{batch.status}'."
        raise HttpError(HTTPStatus.CONFLICT, message, headers=NO_RETRY)
    return JSONResponse(batch_object(batch))


def listed(request: Request, objects: list[dict[str, Any]], most: int, default: int | None = None) -> Response:
    """The page that the query asks for. Raises HttpError 400."""
    return JSONResponse({"object": "list", **page(request, objects, most, default or most)})


routes = [
    Route("/v1/files", create_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{file}", retrieve_file, methods=["GET"]),
    Route("/v1/files/{file}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file}/content", file_content, methods=["GET"]),
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{batch}", retrieve_batch, methods=["GET"]),
    Route("/v1/batches/{batch}/cancel", cancel_batch, methods=["POST"]),
]
