"""What a server has of a worker besides its process: lines cut from a socket, requests under way, and last words.

Knows the socket's bytes and one request's events; starting and ending processes is up to process.py.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

from moegguf.serving.wire import MAX_MESSAGE_BYTES

FAILURE_WORDS = ("ASSERT", "rror", "abort", "what():")


class Link(asyncio.Protocol):
    """Cuts what arrives into lines."""

    def __init__(self, on_line: Callable[[bytearray], None], on_lost: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_lost = on_lost
        self._rest = bytearray()

    def data_received(self, data: bytes) -> None:
        searched = len(self._rest)
        self._rest += data
        while (end := self._rest.find(b"\n", searched)) >= 0:
            line = self._rest[:end]
            del self._rest[: end + 1]
            searched = 0
            self._on_line(line)
        if len(self._rest) > MAX_MESSAGE_BYTES:
            self._rest.clear()
            self._on_lost()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()


class Request:
    """One request that a worker has: its events as they come. `on_end` is called once, when it has `ended`."""

    def __init__(self, on_end: Callable[[], None], on_cancel: Callable[[], asyncio.TimerHandle]) -> None:
        self.ended = False
        self._on_end = on_end
        self._on_cancel = on_cancel
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._overdue: asyncio.TimerHandle | None = None

    async def events(self) -> AsyncIterator[Any]:
        """Events in order, then the value that ends the request. Raises what the worker raised, or WorkerError."""
        while True:
            kind, value = await self._events.get()
            if kind == "error":
                raise value
            yield value
            if kind == "value":
                return

    async def value(self) -> Any:
        """The value at its end; leaving early cancels."""
        try:
            async for value in self.events():
                last = value
            return last
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Asks the worker to stop, and kills it when it does not. Without effect once the request has ended."""
        if self.ended or self._overdue is not None:
            return
        self._overdue = self._on_cancel()

    def put(self, kind: str, value: Any) -> None:
        """An event ("event"), or the end ("value", "error")."""
        self._events.put_nowait((kind, value))
        if kind != "event":
            if self._overdue is not None:
                self._overdue.cancel()
            self.ended = True
            self._on_end()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(text: str) -> str:
    """The line that says most about an end: the last one that speaks of a failure, at most 300 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line[:300] for line in reversed(lines) if any(word in line for word in FAILURE_WORDS)), "")
