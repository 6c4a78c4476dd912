"""The last steps between HTTP and the socket: uvicorn with our limits, our errors, and no complaint at its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from moegguf.server.common import limits
from moegguf.server.common.streams import dumps

HEADER_BYTES = limits.HEADER_BYTES
UNSENT_BYTES = 16 << 20  # an answer waits here for a slow reader, and not in the model
GONE_MS = 60_000  # a client that takes nothing for so long has gone
FIRST_S = 30.0  # for a request's headers to arrive


class Protocol(H11Protocol):
    """A connection. A slow reader never holds up the model; one that takes or sends nothing is let go."""

    _first: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        peer = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
        self._first = self.loop.call_later(FIRST_S, transport.close)

    def handle_events(self) -> None:
        super().handle_events()
        if self._first is not None and self.cycle is not None:
            self._first.cancel()
            self._first = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._first is not None:
            self._first.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has headers too long, gets JSON too."""
        body = dumps({"error": f"bad request: {msg.lower()}"}).encode()
        headers = [("content-type", "application/json"), ("connection", "close"), ("content-length", str(len(body)))]
        events = (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class QuietServer(Server):
    """Tells when it listens and when it begins to end; a signal ends it, as it should, and is not sent again to the
    process afterwards."""

    def __init__(self, config: Config, on_start: Callable[[], None], on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_end = on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_end()
        # What is cut off now was told: no traceback for it.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
