"""/v1/batches: files of requests, answered while nobody else waits."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.server.common import limits
from moegguf.server.common.body import Body, read_body
from moegguf.server.common.errors import NO_RETRY, HttpError
from moegguf.server.openai.files import check_expiry
from moegguf.server.openai.in_process import ENDPOINTS
from moegguf.server.openai.lists import page
from moegguf.serving.batch.answers import Counts
from moegguf.serving.batch.batches import CANCELLABLE, Batch, Batches

MAX_LISTED, DEFAULT_LISTED = 100, 20
TIMES = (
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Id = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]


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
        "request_counts": {
            "total": batch.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "usage": usage_object(batch.counts),
        "metadata": batch.metadata,
    }


def usage_object(counts: Counts) -> dict[str, Any]:
    """The tokens of all answers."""
    return {
        "input_tokens": counts.input_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens},
        "output_tokens": counts.output_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.input_tokens + counts.output_tokens,
    }


def _batches(request: Request) -> Batches:
    return request.app.state.batches


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
    return JSONResponse(page(request, objects, MAX_LISTED, DEFAULT_LISTED))


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


routes = [
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{batch}", retrieve_batch, methods=["GET"]),
    Route("/v1/batches/{batch}/cancel", cancel_batch, methods=["POST"]),
]
