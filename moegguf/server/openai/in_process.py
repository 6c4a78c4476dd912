"""OpenAI's endpoints called in this process, as a client would over HTTP: the same checks, the same objects.

For requests that were let in already, such as those of a batch: no access control, and no limit of all bodies together.
"""

from __future__ import annotations

from starlette.datastructures import State

from moegguf.models.catalog import Catalog
from moegguf.server.common.errors import http_error
from moegguf.server.metrics import Totals
from moegguf.server.openai.chat import CHAT
from moegguf.server.openai.completions import COMPLETIONS
from moegguf.server.openai.embeddings import whole_embeddings
from moegguf.server.openai.responses import RESPONSES
from moegguf.serving.batch.answers import Reply
from moegguf.serving.lease import BackgroundLeases, Leases
from moegguf.serving.ray.config import ConfiguredCatalog

ENDPOINTS = {
    "/v1/chat/completions": CHAT.whole,
    "/v1/completions": COMPLETIONS.whole,
    "/v1/embeddings": whole_embeddings,
    "/v1/responses": RESPONSES.whole,
}
"""Those that a request of a batch may have."""


def new_state(manager: Leases, catalog: Catalog | ConfiguredCatalog, share_contexts: bool = False) -> State:
    """What the endpoints need of an application: `app.state`."""
    return State(
        {
            "manager": manager,
            "background": BackgroundLeases(manager),
            "catalog": catalog,
            "totals": Totals(),
            "share_contexts": share_contexts,
        }
    )


class InProcess:
    """The endpoints over `state`, the application's: `await in_process(url, body)`."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def __call__(self, url: str, body: bytes) -> Reply:
        """The reply to a POST request, of lower priority. Cancelling it is a client's disconnect."""
        try:
            return Reply(200, await ENDPOINTS[url](self._state, self._state.background, body))
        except Exception as error:
            found = http_error(error)
            return Reply(found.status, found.body(url))
