"""`moegguf` with a scripted worker: the prompt determines the answer, for tests of the screen.

`python echo_model.py COMMAND ...` is `moegguf COMMAND ...`; `python echo_model.py FD` is its worker.

`think: THINKING|TEXT` thinks first; `slowly TEXT` repeats TEXT until cancelled, `stubborn TEXT` cannot be cancelled;
`fail` raises an error; `messages` and `settings` print the request; any other prompt is echoed.
"""

from __future__ import annotations

import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from moegguf.engine.stats import Stats
from moegguf.errors import ContextError, ExpertIOError
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing
from moegguf.serving.events import Snapshot
from moegguf.serving.wire import Ready, build, decode, encode, encode_error

CUT = Timing(prompt_tokens=1, answer_tokens=2, prompt_s=0.25, answer_s=0.5, total_s=0.75, cut_messages=3)


class EchoWorker:
    """Answers one request after another."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stopped = threading.Event()
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._connection.makefile("rb"):
            message = decode(line)
            if message["kind"] == "cancel":
                self._stopped.set()
            else:
                self._messages.put(message)
        self._messages.put(None)

    def _send(self, kind: str, **fields: Any) -> None:
        self._connection.sendall(encode({"kind": kind, **fields}))

    def run(self) -> None:
        while (message := self._messages.get()) is not None:
            if message["kind"] == "load":
                self._send("ready", ready=Ready(512), stats=Stats(), decisions={})
            elif message["kind"] == "experts":
                self._end(message, value=Snapshot("echo", (), 0, b"", b"", b"", Stats(), False, 0.0, 0.0))
            else:
                self._stopped.clear()
                try:
                    self._answer(message)
                except Exception as error:
                    self._end(message, error=encode_error(error))

    def _end(self, message: dict[str, Any], **outcome: Any) -> None:
        self._send("end", id=message["id"], stats=Stats(), decisions={}, **outcome)

    def _answer(self, message: dict[str, Any]) -> None:
        request = build(GenerationRequest, message["generation"])
        assert request.messages is not None
        prompt = str(request.messages[-1]["content"])
        for event in self._events(prompt, request):
            self._send("event", id=message["id"], **{type(event).__name__: event})
        timing = Timing(**{**vars(CUT), "cut_messages": 3 * (prompt == "cut")})
        timing.finish = "cancelled" if self._stopped.is_set() else "stop"
        self._end(message, value=timing)

    def _events(self, prompt: str, request: GenerationRequest) -> Iterator[Delta | PromptProgress]:
        first, _, rest = prompt.partition(" ")
        if prompt == "too long":
            raise ContextError("the prompt has too many tokens.")
        if prompt == "crash":
            raise ZeroDivisionError("so it goes")
        if first in ("slowly", "stubborn"):
            while not self._stopped.wait(0.02):
                yield Delta(f"{rest} ")
            threading.Event().wait(None if first == "stubborn" else 0)
        elif first == "think:":
            thinking, _, text = rest.partition("|")
            yield Delta(thinking=thinking)
            yield Delta(text=text)
        elif first == "progress":
            yield PromptProgress(6300, 0, 1024, 22.0)
            self._stopped.wait()
        elif first == "messages":
            yield Delta(" ".join(f"[{m['role']}: {m['content']}]" for m in request.messages or ()))
        elif first == "settings":
            yield Delta(f"{request.sampling} format={request.format} think={request.think}")
        elif first == "fail":
            yield Delta("half an answer ")
            raise ExpertIOError("the disk is gone.")
        else:
            yield from map(Delta, prompt)


if __name__ == "__main__" and sys.argv[1].isdigit():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the worker does
    EchoWorker(socket.socket(fileno=int(sys.argv[1]))).run()
elif __name__ == "__main__":
    from moegguf.cli import app
    from moegguf.serving import worker_process

    worker_process.COMMAND = (sys.executable, __file__)
    sys.exit(app.main())
