"""/v1/files: what clients store for batches, and the answers they fetch."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moegguf.server.common.errors import HttpError
from moegguf.server.common.forms import Form, read_form
from moegguf.server.openai.lists import page
from moegguf.serving.batch.batches import INPUT_PURPOSE
from moegguf.serving.batch.files import FileStore, StoredFile

MAX_LISTED = 10_000
EXPIRY_S = range(3600, 2_592_001)  # OpenAI's


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


def _store(request: Request) -> FileStore:
    return request.app.state.batches.files


async def create_file(request: Request) -> Response:
    """Stores a file. Raises HttpError 400, 413, StorageError, BusyError."""
    with _store(request).new() as file:
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
    files = [file for file in _store(request).all() if query.get("purpose", file.purpose) == file.purpose]
    if query.get("order") != "asc":
        files.reverse()
    return JSONResponse(page(request, [file_object(file) for file in files], MAX_LISTED, MAX_LISTED))


async def retrieve_file(request: Request) -> Response:
    """One file's description. Raises UnknownIdError."""
    return JSONResponse(file_object(_store(request).get(request.path_params["file"])))


async def file_content(request: Request) -> Response:
    """The contents of a file. Raises UnknownIdError."""
    store, file_id = _store(request), request.path_params["file"]
    return FileResponse(
        store.path(file_id), media_type="application/octet-stream", filename=store.get(file_id).filename
    )


async def delete_file(request: Request) -> Response:
    """Removes a file. Raises UnknownIdError."""
    file_id = request.path_params["file"]
    _store(request).delete(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


routes = [
    Route("/v1/files", create_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{file}", retrieve_file, methods=["GET"]),
    Route("/v1/files/{file}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file}/content", file_content, methods=["GET"]),
]
