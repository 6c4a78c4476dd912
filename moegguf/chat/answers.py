"""Answers of a model in another process: of a worker of this program, or of a running server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from moegguf.generate.request import Delta, OnProgress, PromptProgress, Timing

POLL_S = 0.1  # a signal that another thread receives does not interrupt queue.get()

Part = Delta | PromptProgress


class Answer:
    """One answer, whose parts arrive on another thread (`put`, then `end`); `deltas` gives them to the main thread,
    which Ctrl-C can then interrupt.

    `begin` has the other process compute it, `stop` has it end, also where it has not begun to (`stopped`). `timing`
    and `decisions` (`Llama.decisions`) are complete when it has ended. `load_s`: of a load before it.
    """

    def __init__(self, begin: Callable[[Answer], object], stop: Callable[[Answer], object]) -> None:
        self.timing = Timing(finish="cancelled")
        self.decisions: Mapping[str, Any] = {}
        self.load_s = 0.0
        self.stopped = False
        self._begin = begin
        self._stop = stop
        self._parts: queue.SimpleQueue[Part | BaseException | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def put(self, part: Part) -> None:
        """The next part."""
        self._parts.put(part)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the deltas, with an error if there is one; a second call has no effect."""
        self._ended.set()
        self._parts.put(error)

    def cancel(self, timeout_s: float = 0.0) -> bool:
        """Ends the answer, from any thread; False when it has not ended after `timeout_s`."""
        self.stopped = True
        self._stop(self)
        return self._ended.wait(timeout_s)

    def deltas(self, on_progress: OnProgress) -> Generator[Delta, None, None]:
        """The parts of the answer as they arrive; iterate once. Ending the loop early cancels the answer."""
        try:
            self._begin(self)
            while (part := self._next()) is not None:
                if isinstance(part, BaseException):
                    raise part
                if isinstance(part, PromptProgress):
                    on_progress(part)
                else:
                    yield part
        finally:
            if not self._ended.is_set():
                self.cancel()

    def _next(self) -> Part | BaseException | None:
        while True:
            try:
                return self._parts.get(timeout=POLL_S)
            except queue.Empty:
                continue
