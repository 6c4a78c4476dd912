"""Maps exceptions to HTTP errors: status, headers and JSON in the format of the API
that was called.

At /v1/messages, and at MODELS_PATH for clients of Anthropic's API, the JSON is
Anthropic's `{"type": "error", "error": {"type", "message"}}`. Elsewhere below /v1 it is
OpenAI's `{"error": {"message", "type", "param", "code"}}`. At LLAMA_PATHS and below
SLOT_PREFIX it is llama-server's `{"error": {"code", "message", "type"}}`. Everywhere
else it is Ollama's `{"error": "text"}`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler, Receive, Scope, Send

from moegguf import errors
from moegguf.text import without_surrogates

log = logging.getLogger(__name__)

LINGER_S = 2.0
OVERLOADED = 529  # status in Anthropic's API for a server that is too busy to answer
OLLAMA_PREFIX = "/api/"
ANTHROPIC_PATH = "/v1/messages"
# Header that all clients of Anthropic's API send.
ANTHROPIC_HEADER = "anthropic-version"
MODELS_PATH = "/v1/models"  # a path that OpenAI's and Anthropic's APIs share
OPENAI_TYPES = {
    404: "not_found_error", 401: "authentication_error", 403: "permission_error", 429: "rate_limit_error",
}  # fmt: skip
ANTHROPIC_TYPES = {
    **OPENAI_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
LLAMA_PATHS = (
    "/completion", "/completions", "/infill", "/apply-template", "/slots", "/rerank", "/reranking", "/embeddings",
    "/health", "/lora-adapters",
)  # fmt: skip
SLOT_PREFIX = "/slots/"
LLAMA_TYPES = {**OPENAI_TYPES, 501: "not_supported_error", 503: "unavailable_error"}
# Stops OpenAI's and Anthropic's clients from retrying.
NO_RETRY = {"x-should-retry": "false"}


class HttpError(errors.MoeggufError):
    """An error with its HTTP status and headers. `code` is OpenAI's error code, such as
    "model_not_found"; None: there is no code."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers)

    def body(self, path: str) -> dict[str, Any]:
        """Returns the JSON of the error in the format of the API at `path`."""
        message, invalid = (
            str(self),
            "invalid_request_error" if self.status < 500 else None,
        )
        if path in LLAMA_PATHS or path.startswith(SLOT_PREFIX):
            kind = LLAMA_TYPES.get(self.status, invalid or "server_error")
            return {"error": {"code": self.status, "message": message, "type": kind}}
        if not path.startswith("/v1"):
            return {"error": message}
        if path.startswith(ANTHROPIC_PATH):
            kind = ANTHROPIC_TYPES.get(self.status, invalid or "api_error")
            return {"type": "error", "error": {"type": kind, "message": message}}
        kind = OPENAI_TYPES.get(self.status, invalid or "api_error")
        return {
            "error": {
                "message": message,
                "type": kind,
                "param": None,
                "code": self.code,
            }
        }


class BodyRefusedError(HttpError):
    """An error that is sent while the client may still be sending the body of its
    request."""


def lists_for_anthropic(request: HttpRequest) -> bool:
    """Returns True if a client of Anthropic's API requests a list of models or one
    model. OpenAI's API has the same paths for models."""
    path = request.url.path
    return ANTHROPIC_HEADER in request.headers and (
        path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
    )


Kinds = type[BaseException] | tuple[type[BaseException], ...]
# Rows of exception classes, status, OpenAI's error code, headers. The first matching
# row is used, so subclasses come first.
STATUSES: tuple[tuple[Kinds, int, str | None, Mapping[str, str]], ...] = (
    (errors.ModelNotFoundError, 404, "model_not_found", {}),
    (errors.ContextError, 400, "context_length_exceeded", {}),
    (errors.UnknownIdError, 404, None, {}),
    (
        (
            errors.ModelNameError,
            errors.OptionError,
            errors.SchemaError,
            errors.CapabilityError,
            errors.TemplateError,
            errors.BatchFileError,
        ),
        400,
        None,
        {},
    ),
    (errors.StorageError, 507, None, NO_RETRY),
    (errors.BusyError, 503, None, {"retry-after": "1"}),
    (errors.GenerationCancelled, 499, None, {}),
    (
        (
            errors.BudgetError,
            errors.AllocationError,
            errors.ModelFormatError,
            errors.LibraryError,
        ),
        500,
        None,
        NO_RETRY,
    ),
    (errors.MoeggufError, 500, None, {}),
)


def http_error(error: BaseException) -> HttpError:
    """Returns the HTTP error for an exception. An unexpected exception is logged, and
    its message is not sent."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, errors.QueueFullError):
        retry = {"retry-after": str(error.retry_after_s)}
        return HttpError(
            str(error), HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_exceeded", retry
        )
    if isinstance(error, HTTPException):
        return HttpError(
            HTTPStatus(error.status_code).phrase.lower(),
            error.status_code,
            headers=error.headers or {},
        )
    for kinds, status, code, headers in STATUSES:
        if isinstance(error, kinds):
            return HttpError(
                without_surrogates(" ".join(str(error).split())), status, code, headers
            )
    if isinstance(error, MemoryError):
        return HttpError(
            "there is not enough memory for this request.", 500, None, NO_RETRY
        )
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return HttpError(
        f"internal error: unexpected {type(error).__name__}; see the server's log.", 500
    )


def error_response(error: BaseException, path: str) -> Response:
    """Returns the response to a request at `path` that failed with `error`."""
    found = http_error(error)
    kind = LingeringResponse if isinstance(found, BodyRefusedError) else JSONResponse
    return kind(
        found.body(path), status_code=_status_of(found, path), headers=found.headers
    )


def _status_of(error: HttpError, path: str) -> int:
    """Returns the HTTP status with which the API at `path` reports an error."""
    if (
        path.startswith(ANTHROPIC_PATH)
        and error.status == HTTPStatus.SERVICE_UNAVAILABLE
    ):
        return OVERLOADED
    if path.startswith(OLLAMA_PREFIX) and error.status == HTTPStatus.TOO_MANY_REQUESTS:
        return HTTPStatus.SERVICE_UNAVAILABLE  # Ollama's status for a full queue
    return error.status


class LingeringResponse(JSONResponse):
    """A response to a client that may still be sending its body. The response reads and
    drops the rest of the body, for at most LINGER_S. If the connection were closed
    immediately, the client could lose the response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _handle(request: HttpRequest, error: Exception) -> Response:
    return error_response(
        error, ANTHROPIC_PATH if lists_for_anthropic(request) else request.url.path
    )


HANDLERS: dict[Any, ExceptionHandler] = {
    HTTPException: _handle,
    errors.MoeggufError: _handle,
    Exception: _handle,
}
