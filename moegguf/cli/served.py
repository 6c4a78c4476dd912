"""Answers from a running server, for `moegguf run`: the same text and figures as those of a model in this process."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Generator, Mapping
from typing import Any

from moegguf.cli.client import Client, ServerError
from moegguf.errors import MoeggufError
from moegguf.generate.decoding import OnProgress
from moegguf.generate.request import Delta, PromptProgress, Timing
from moegguf.serving.wire import build
from moegguf.terminal.messages import print_message

CONNECT_S = 0.5
KNOWN_S = 10.0  # to answer whether it knows a model


def server_with(model: str) -> Client | None:
    """A client of the server at MOEGGUF_HOST when it is moegguf's and knows `model`, else None."""
    client = Client()
    try:
        with socket.create_connection((client.host.host, client.host.port), CONNECT_S):
            pass
        if "moegguf" not in client.get("/api/version", KNOWN_S):
            return None  # Ollama has the same port
        client.post("/api/show", {"model": model}, KNOWN_S)
    except ServerError as error:
        if error.status == 401:
            print_message(
                f"note: the server at {client.host.url} needs a key (MOEGGUF_API_KEY); loading the model here"
            )
        return None
    except (MoeggufError, OSError):
        return None
    return client


def user_message(client: Client, model: str, prompt: str) -> dict[str, Any]:
    """`prompt` as a message for /api/chat; with the images that it names, where the server's model reads images.

    Raises OptionError for an image that cannot be used, ServerError, NoServerError.
    """
    from moegguf.chat.image_files import extract_images

    images: list[bytes] = []
    if "vision" in client.post("/api/show", {"model": model}, KNOWN_S).get("capabilities", ()):
        prompt, images = extract_images(prompt)
    return {"role": "user", "content": prompt, "images": [base64.b64encode(data).decode() for data in images]}


class ServedAnswer:
    """One answer of a server to the body of /api/chat, as `moegguf.generate.answer.Answer` is one of a model here.

    `load_s` and `decisions` are those of the model in the server, complete with `timing`.
    """

    def __init__(self, client: Client, body: Mapping[str, Any]) -> None:
        self.timing = Timing(finish="cancelled")
        self.load_s = 0.0
        self.decisions: Mapping[str, Any] = {}
        self._client = client
        self._body = {**body, "stream": True, "details": True}
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ends the answer with the next line from the server, which stops when the connection ends."""
        self._cancelled.set()

    def deltas(self, on_progress: OnProgress | None = None) -> Generator[Delta, None, None]:
        """The parts of the answer as they arrive. Raises ServerError, NoServerError."""
        for line in self._client.stream("/api/chat", self._body):
            if self._cancelled.is_set():
                return
            if line.get("done"):
                self._finish(line)
                return
            if "prompt_progress" in line:
                if on_progress is not None:
                    on_progress(build(PromptProgress, line["prompt_progress"]))
                continue
            message = line["message"]
            yield Delta(message.get("content", ""), message.get("thinking", ""))
        raise self._client.lost_connection()

    def _finish(self, line: Mapping[str, Any]) -> None:
        self.timing = build(Timing, line["timing"])
        self.load_s, self.decisions = line.get("load_duration", 0) / 1e9, line["decisions"]
