"""A worker of one program, for `moegguf run`: asked with calls that wait, from ordinary threads.

The event loop that `WorkerProcess` needs runs on a thread of its own. The worker ends with this process, however that
ends: its socket closes.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from moegguf.engine.stats import Stats
from moegguf.serving import worker_process
from moegguf.serving.wire import LoadConfig, Ready
from moegguf.serving.worker_process import OnLoad, PendingRequest, WorkerProcess

Result = TypeVar("Result")


class OwnWorker:
    """A worker process, started at once. A request that is cancelled may take as long as it needs to end: a person
    waits for it, who can end this program. Methods raise what those of `WorkerProcess` raise."""

    def __init__(self, on_warning: Callable[[str], object], *, echo_stderr: bool = False) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="moegguf-worker", daemon=True).start()
        options = {"on_warning": on_warning, "echo_stderr": echo_stderr, "cancel_grace_s": math.inf}
        start = WorkerProcess.start(lambda snapshot: None, command=worker_process.COMMAND, **options)
        self._process = self.run(start).result()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """What a coroutine gives on the worker's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def stats(self) -> Stats:
        """Statistics since the load, as of the last reply."""
        return self._process.stats

    @property
    def decisions(self) -> Any:
        """Those of the model (`Llama.decisions`), as of the last reply."""
        return self._process.decisions

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.exited.done()

    def load(self, config: LoadConfig, on_progress: OnLoad) -> Ready:
        """Loads the model; `on_progress` is called on another thread."""
        return self.run(self._process.load(config, math.inf, on_progress)).result()

    def call(self, kind: str, **fields: Any) -> Any:
        """The value of a request."""

        async def value() -> Any:
            return [event async for event in self._process.request(kind, **fields).events()][-1]

        return self.run(value()).result()

    def request(self, kind: str, **fields: Any) -> PendingRequest:
        """Sends a request, whose events are read on the worker's loop (`run`)."""

        async def send() -> PendingRequest:
            return self._process.request(kind, **fields)

        return self.run(send()).result()

    def cancel(self, request: PendingRequest) -> None:
        """Has a request end soon."""
        self._loop.call_soon_threadsafe(request.cancel)

    def kill(self) -> None:
        """Ends the process at once."""
        self._loop.call_soon_threadsafe(self._process.kill, "")

    def close(self) -> None:
        """Ends the process, and returns after that."""
        self.run(self._process.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
