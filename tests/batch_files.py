"""Writes files of requests in OpenAI's batch format. `Endpoint` answers such requests
without a model."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moegguf.serving.batch.answers import Reply, Requests
from moegguf.serving.clients import current_owner

CHAT = "/v1/chat/completions"
ENDPOINTS = (CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses")


def request(
    custom_id: Any, text: str = "hi", *, url: str = CHAT, **body: Any
) -> dict[str, Any]:
    """Returns one line of a batch file as an object: a request with one user
    message."""
    made = {"model": "demo", "messages": [{"role": "user", "content": text}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": made}


def jsonl(lines: Iterable[Any]) -> bytes:
    """Returns each item as one line of JSON. A bytes item is copied unchanged."""
    return b"".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        for line in lines
    )


@contextmanager
def requests_in(path: Path, lines: Iterable[Any], **options: Any) -> Iterator[Requests]:
    """Writes `lines` to the file `path`, and yields a `Requests` object that reads this
    file."""
    path.write_bytes(jsonl(lines))
    with path.open("rb") as file:
        yield Requests(file, ENDPOINTS, **options)


def entries(data: bytes | Path) -> list[Any]:
    """Returns the JSON object of each line. `data` is the contents or the path of a
    file in JSON Lines format."""
    return [
        json.loads(line)
        for line in (
            data if isinstance(data, bytes) else data.read_bytes()
        ).splitlines()
    ]


def usage(n_tokens: int) -> dict[str, Any]:
    """Returns a made-up `usage` object in the form of /v1/chat/completions."""
    return {
        "prompt_tokens": 2 * n_tokens,
        "completion_tokens": n_tokens,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


class Endpoint:
    """Stands in for the server's endpoint: it answers each request with the text of the
    request's last message.

    For a text whose first word is "fail", the reply has status 400. A text whose first
    word is "hold" is answered when `released` is set.
    """

    def __init__(self) -> None:
        # (url, body) of each call.
        self.calls: list[tuple[str, Any]] = []
        # The owners of all calls.
        self.owners: set[str] = set()
        # `most`: the largest number of calls that ran at the same time.
        self.most = self.running = self.cancelled = 0
        self.released = asyncio.Event()

    async def __call__(self, url: str, raw: bytes) -> Reply:
        body = json.loads(raw)
        self.calls.append((url, body))
        self.owners.add(current_owner.get())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._reply(body["messages"][-1]["content"])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _reply(self, text: str) -> Reply:
        await asyncio.sleep(0)
        command = text.partition(" ")[0]
        if command == "fail":
            return Reply(400, {"error": {"message": "as asked"}})
        if command == "hold":
            await self.released.wait()
        return Reply(200, {"text": text, "usage": usage(3)})

    @property
    def texts(self) -> list[str]:
        """Returns the text of each call's last message, in the order of the calls."""
        return [body["messages"][-1]["content"] for _, body in self.calls]
