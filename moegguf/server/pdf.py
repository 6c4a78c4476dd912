"""`POST /pdf-text`: the text of a PDF file, for the page's attachments. A separate
process (pdf_child.py) reads the file, so that a damaged file cannot crash the
server."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import DEVNULL, PIPE
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.child import child_command, child_environment, kill_child
from moegguf.server.common.body import read_bytes
from moegguf.server.common.errors import HttpError

MAX_BYTES = 16 << 20
# Seconds for one file, including time when the processor is busy with other work.
MAX_S = 60.0
MAX_PROCESSES = 2
COMMAND = child_command(f"{__package__}.pdf_child")

_free = asyncio.Semaphore(MAX_PROCESSES)


async def _pdf_text(request: Request) -> Response:
    """Replies with `n_pages` and `text` of the PDF file in the body. Raises HttpError
    400 if the file cannot be read, and 503 while MAX_PROCESSES other files are being
    read."""
    data = await read_bytes(request, MAX_BYTES)
    if _free.locked():
        raise HttpError(
            f"{MAX_PROCESSES} other PDF files are being read; try again in a moment",
            503,
        )
    async with _free:
        found = await _read(data)
    if "error" in found:
        raise HttpError(found["error"])
    return JSONResponse(found)


async def _read(data: bytes) -> dict[str, Any]:
    """Returns the object that the child process writes for a PDF file. Returns
    {"error"} if the process fails or takes longer than MAX_S."""
    child = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=child_environment()
    )
    try:
        text, _ = await asyncio.wait_for(child.communicate(data), MAX_S)
    except TimeoutError:
        return {"error": f"reading it takes more than {MAX_S:g} s; attach a part of it"}
    finally:
        kill_child(child)
        await child.wait()
    if child.returncode:
        return {
            "error": "reading it takes too much time or memory; attach a part of it"
        }
    found: dict[str, Any] = json.loads(text)
    return found


routes = [Route("/pdf-text", _pdf_text, methods=["POST"])]
