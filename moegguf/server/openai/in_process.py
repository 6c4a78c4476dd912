"""OpenAI's endpoints called in this process, as a client would over HTTP: the same checks, the same bytes.

For requests that were let in already, such as those of a batch: no access control. What they hold in memory is bounded
apart from the bodies of other requests.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.types import Message

from moegguf.server.common.body import Bodies
from moegguf.server.common.conversation import BACKGROUND
from moegguf.server.common.errors import HANDLERS
from moegguf.server.metrics import Totals
from moegguf.server.openai import completions, conversations, embeddings
from moegguf.serving.background import BackgroundLeases
from moegguf.serving.batch.runner import Reply

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog
    from moegguf.serving.background import Leases
    from moegguf.serving.ray.catalog import ConfiguredCatalog

ROUTES = [route for module in (completions, conversations, embeddings) for route in module.routes]
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Those that a request of a batch may have."""


def new_state(manager: Leases, catalog: Catalog | ConfiguredCatalog) -> State:
    """What the endpoints need of an application: `app.state`."""
    return State({"manager": manager, "background": BackgroundLeases(manager), "catalog": catalog, "totals": Totals()})


class InProcess:
    """The endpoints over `state`, the application's: `await in_process(url, body)`."""

    def __init__(self, state: State) -> None:
        self._app = Starlette(routes=ROUTES, middleware=[Middleware(Bodies)], exception_handlers=HANDLERS)
        self._app.state = state

    async def __call__(self, url: str, body: bytes) -> Reply:
        """The reply to a POST request, of lower priority. Cancelling it is a client's disconnect."""
        call = _Call(url, body)
        task = asyncio.create_task(self._app(call.scope, call.receive, call.send))
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            call.disconnected.set()
            await asyncio.wait((task,))
            raise
        with suppress(Exception):  # Starlette raises what it has made a reply of
            task.result()
        return Reply(call.status, json.loads(b"".join(call.parts)))


class _Call:
    """One request, as ASGI has it."""

    def __init__(self, url: str, body: bytes) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), BACKGROUND],
            "client": None,
            "server": None,
        }
        self.status = 500
        self.parts: list[bytes] = []
        self.disconnected = asyncio.Event()
        self._body: bytes | None = body

    async def receive(self) -> Message:
        """The body, then nothing before the disconnect."""
        body, self._body = self._body, None
        if body is None:
            await self.disconnected.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Takes the reply."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))
