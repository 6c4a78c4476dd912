"""One map from an error to what a client gets: a status, headers and JSON, in Ollama's or OpenAI's form.

Below /v1 it is OpenAI's `{"error": {"message", "type", "param", "code"}}`, elsewhere Ollama's `{"error": "text"}`.
Knows nothing of requests but their path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler, Receive, Scope, Send

from moegguf import errors

log = logging.getLogger(__name__)

LINGER_S = 2.0
FINAL = {"x-should-retry": "false"}  # OpenAI's clients would otherwise ask twice more


class HttpError(errors.MoeggufError):
    """A fault that only a server knows, with the status to answer."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] = {}) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers)


@dataclass(frozen=True)
class Fault:
    """What a client is told. `code` is OpenAI's, such as "model_not_found"."""

    status: int
    message: str
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, path: str) -> dict[str, Any]:
        """The JSON of the answer to a request at `path`."""
        if not path.startswith("/v1"):
            return {"error": self.message}
        kinds = {404: "not_found_error", 401: "authentication_error", 403: "permission_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


# The first that fits: subclasses before their bases.
FAULTS: tuple[tuple[type[BaseException], int, str | None, Mapping[str, str]], ...] = (
    (errors.ModelNotFoundError, 404, "model_not_found", {}),
    (errors.ContextError, 400, "context_length_exceeded", {}),
    (errors.ModelNameError, 400, None, {}),
    (errors.OptionError, 400, None, {}),
    (errors.SchemaError, 400, None, {}),
    (errors.CapabilityError, 400, None, {}),
    (errors.TemplateError, 400, None, {}),
    (errors.BusyError, 503, None, {"retry-after": "1"}),
    (errors.GenerationCancelled, 499, None, {}),
    (errors.BudgetError, 500, None, FINAL),
    (errors.AllocationError, 500, None, FINAL),
    (errors.ModelFormatError, 500, None, FINAL),
    (errors.LibraryError, 500, None, FINAL),
    (errors.MoeggufError, 500, None, {}),
)


def fault_of(error: BaseException) -> Fault:
    """What `error` is to a client. An error that nobody raised on purpose is logged, and its text stays here."""
    if isinstance(error, HttpError):
        return Fault(error.status, str(error), error.code, error.headers)
    if isinstance(error, HTTPException):
        return Fault(error.status_code, _phrase(error.status_code), None, error.headers or {})
    for kind, status, code, headers in FAULTS:
        if isinstance(error, kind):
            return Fault(status, " ".join(str(error).split()), code, headers)
    if isinstance(error, MemoryError):
        return Fault(500, "there is not enough memory for this request.", None, FINAL)
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return Fault(500, f"internal error: unexpected {type(error).__name__}; the server's log has more.")


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase.lower()


def error_response(error: BaseException, path: str) -> Response:
    """The whole answer to a request at `path` that ended in `error`."""
    fault = fault_of(error)
    kind = LingeringResponse if fault.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else JSONResponse
    return kind(fault.body(path), status_code=fault.status, headers=dict(fault.headers))


class LingeringResponse(JSONResponse):
    """An answer to a client that is still sending: a connection closed at once would take the answer from it, so what
    comes is read and dropped for a while first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _handle(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


HANDLERS: dict[Any, ExceptionHandler] = {HTTPException: _handle, errors.MoeggufError: _handle, Exception: _handle}
