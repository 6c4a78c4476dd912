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
from moegguf.server.common.body import Body, read_body
from moegguf.server.common.errors import NO_RETRY, HttpError
from moegguf.server.common.forms import Form, read_form
from moegguf.server.common.objects import page, usage
from moegguf.server.openai.in_process import ENDPOINTS
from moegguf.serving.batch.batches import CANCELLABLE, INPUT_PURPOSE, Batch, Batches
from moegguf.serving.batch.files import StoredFile

MAX_FILES_LISTED = 10_000
MAX_BATCHES_LISTED, DEFAULT_BATCHES_LISTED = 100, 20
TIMES = (
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip
EXPIRY_S = range(3600, 2_592_001)  # OpenAI's

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


def check_expiry(anchor: object, seconds: object) -> int | None:
    """Seconds from `expires_after`; None without. Raises HttpError 400."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise HttpError(400, f"expires_after.anchor: must be 'created_at', but is {str(anchor)[:40]!r}")
    text = str(seconds)
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) in EXPIRY_S):
        raise HttpError(
            400, f"expires_after.seconds: must be from {EXPIRY_S[0]} to {EXPIRY_S[-1]}, but is {text[:40]!r}"
        )
    return int(text)


async def create_file(request: Request) -> Response:
    """Stores a file. Raises HttpError 400, 413, StorageError, BusyError."""
    with _batches(request).files.new() as file:
        form = await read_form(request, file.write, request.app.state.settings.upload_bytes)
        purpose, expires_after_s = _checked(form)
        return JSONResponse(file_object(file.finish(form.filename or "", purpose, expires_after_s)))


def _checked(form: Form) -> tuple[str, int | None]:
    if form.filename is None:
        raise HttpError(400, "file: field required")
    purpose = form.fields.get("purpose")
    if purpose != INPUT_PURPOSE:
        found = "is missing" if purpose is None else f"is {purpose[:40]!r}"
        raise HttpError(400, f"purpose: must be '{INPUT_PURPOSE}', but {found}")
    fields = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    return purpose, check_expiry(*fields)


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


class ExpiresAfter(Body):
    """When the files of answers and of errors are removed."""

    anchor: str
    seconds: int


class BatchBody(Body):
    """The body of /v1/batches."""

    input_file_id: Id
    endpoint: Annotated[str, AfterValidator(_endpoint)]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value] | None, Field(max_length=16)] = None
    output_expires_after: ExpiresAfter | None = None


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
    body = await read_body(request, BatchBody)
    expires_after = body.output_expires_after
    expires_after_s = check_expiry(expires_after.anchor, expires_after.seconds) if expires_after else None
    batch = _batches(request).create(body.endpoint, body.input_file_id, body.metadata, expires_after_s)
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
