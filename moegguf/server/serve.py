"""The server process: its listening socket, uvicorn with moegguf's limits and error
format, its log on stderr, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import h11
from starlette.types import Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from moegguf.decisions import start_log
from moegguf.errors import MoeggufError
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry
from moegguf.quantities import format_bytes
from moegguf.server.app import make_app
from moegguf.server.common import limits
from moegguf.server.common.errors import HttpError, error_response
from moegguf.server.common.replies import dumps
from moegguf.serving.model_manager import ModelManager
from moegguf.settings import Host, Settings

log = logging.getLogger(__name__)

BACKLOG = 2048
DRAIN_S = 3  # seconds that running answers have at shutdown, before they are cancelled
# Seconds that requests cancelled at shutdown have to send their errors.
CANCELLED_S = 1.0
# Bytes buffered for a slow client before its response waits.
MAX_UNSENT_BYTES = 16 << 20
# Milliseconds; a client that acknowledges no sent data for this time is disconnected.
USER_TIMEOUT_MS = 60_000
HEADERS_S = 30.0  # seconds within which a request's headers must arrive
# Seconds within which headers must arrive on a connection that will be refused.
REFUSED_HEADERS_S = 2.0
MAX_DESCRIPTORS = 1 << 16
RESERVED_DESCRIPTORS = 32  # descriptors for files and worker processes
# Connections beyond the limit that get an error; further connections are closed.
REFUSED_CONNECTIONS = 8


class StartError(MoeggufError, OSError):
    """Raised when the server cannot listen on its address."""


def listen(host: Host) -> socket.socket:
    """Returns a listening socket. Raises StartError if the server cannot listen on the
    address, for example because the port is in use."""
    try:
        family, *_, address = socket.getaddrinfo(
            host.host, host.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(
            f"{host.host!r} is not an address to listen on ({error.strerror}); give another."
        ) from None
    dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            address, family=family, backlog=BACKLOG, dualstack_ipv6=dualstack
        )
    except OSError as error:
        raise StartError(
            f"cannot listen on {host.url} ({os.strerror(error.errno or 0)}); is a server running there already? Choose"
            " another address with --host or MOEGGUF_HOST."
        ) from None


def _max_connections() -> int:
    """Raises this process's file descriptor limit as far as the system allows, up to
    MAX_DESCRIPTORS. Returns the number of connections that the limit allows, after
    subtracting reserved descriptors and connections that will be refused."""
    given, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (
        MAX_DESCRIPTORS if n == resource.RLIM_INFINITY else n for n in (given, hard)
    )
    if soft < (wanted := min(most, MAX_DESCRIPTORS)):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(1, soft - RESERVED_DESCRIPTORS - REFUSED_CONNECTIONS)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application for a connection beyond the limit. Replies to every request with
    HTTP status 503."""
    error = HttpError(
        "too many connections; try again later",
        503,
        headers={"retry-after": "1", "connection": "close"},
    )
    await error_response(error, scope["path"])(scope, receive, send)


class Protocol(H11Protocol):
    """One connection of a client. A client that sends no headers or acknowledges no
    data for too long is disconnected.

    A connection beyond `max_connections` gets an error for every request. If there are
    more than REFUSED_CONNECTIONS such connections, a new one is closed immediately.
    """

    max_connections = math.inf
    _headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # h11's is wider
        """Closes or refuses a connection beyond the limits. Sets the buffer limit and
        the timeouts of a connection that is not closed."""
        super().connection_made(transport)
        n_beyond = len(self.connections) - self.max_connections
        if n_beyond > REFUSED_CONNECTIONS:
            return transport.abort()
        if is_refused := n_beyond > 0:
            self.app = _refuse
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        peer = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS
            )
        self._limit_headers(REFUSED_HEADERS_S if is_refused else HEADERS_S)

    def _limit_headers(self, most_s: float | None) -> None:
        """Starts the timer that closes the connection after `most_s` seconds unless the
        headers of a request arrive. None stops the timer."""
        if self._headers_timer is not None:
            self._headers_timer.cancel()
        self._headers_timer = (
            None
            if most_s is None
            else self.loop.call_later(most_s, self.transport.close)
        )

    def handle_events(self) -> None:
        """Stops the header timer when a request's headers have arrived."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._limit_headers(None)

    def on_response_complete(self) -> None:
        """Starts the timer for the headers of the next request."""
        self._limit_headers(HEADERS_S)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the header timer."""
        self._limit_headers(None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Replies with JSON and status 400 to invalid HTTP and to headers that are too
        long, unless a reply has begun. Closes the connection."""
        if self.cycle is not None:
            # Invalid bytes in a running request: stops the request's own reply.
            self.cycle.disconnected = True
        body = dumps({"error": f"bad request: {msg.lower()}"}).encode()
        headers = [
            ("content-type", "application/json"),
            ("connection", "close"),
            ("content-length", str(len(body))),
        ]
        events = (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in (
            events if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) else ()
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class QuietServer(Server):
    """A uvicorn server that calls `on_start` when it listens, and `on_end` when its
    shutdown begins. A signal stops the server but, unlike in uvicorn, is not re-raised
    afterwards."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        on_start: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(config)
        # asyncio accepts up to `backlog` connections before it handles the first one.
        # If no descriptor is left, it retries `backlog` times, and writes to the log
        # each time.
        config.backlog = 1
        self._listener = listener
        self._on_start = on_start
        self._on_end = on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to serve on the listening socket, then calls `on_start` unless the
        startup has failed."""
        await super().startup(sockets=[self._listener])
        if self.started:
            self._listener.listen(BACKLOG)  # asyncio has set the socket's backlog to 1
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Calls `on_end`, and waits up to DRAIN_S for running answers to end. Then
        cancels the answers that are still running, and waits up to CANCELLED_S for the
        cancelled requests to send their errors."""
        self._on_end()
        # The clients of cancelled requests get an error, so the log needs no
        # tracebacks.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets=[self._listener])
        # Requests must send their errors before the loop cancels them again.
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=CANCELLED_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context manager in which SIGINT and SIGTERM stop the server."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _preload(manager: ModelManager, models: Sequence[ModelEntry]) -> None:
    """Loads models one after another, without a limit on their idle time unless a later
    request sets a keep-alive time. They may still be unloaded to make room. If a model
    cannot be loaded, the error is logged."""
    for model in models:
        try:
            manager.kept.add(model.name)
            loaded = await manager.load(model)
            log.info(
                "loaded %s: %s, a context of %d tokens",
                model.name,
                format_bytes(loaded.size_bytes),
                loaded.n_ctx,
            )
        except MoeggufError as error:
            log.error("%s cannot be loaded: %s", model.name, error)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(
            found | getattr(record, "request", {}) | getattr(record, "decision", {})
        )


def _start_logging(level: str, form: str) -> None:
    """Sends log records to stderr: moegguf's own from this level up, and other
    packages' from level WARNING up. `form` "json" writes them as JSON."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonFormatter() if form == "json" else text)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("moegguf").setLevel(level.upper())
    start_log(handler)


def run_server(
    settings: Settings,
    listener: socket.socket,
    on_listening: Callable[[], None],
    models: Sequence[ModelEntry] = (),
) -> int:
    """Serves until SIGINT or SIGTERM. Calls `on_listening` when requests are accepted,
    and then loads `models`, which clients may use in addition to the catalog's models.
    Returns the exit code: 0, or 1 if the server could not start."""
    # If names could be paths, clients could read any file.
    catalog = Catalog(paths=False, given=models)
    manager = ModelManager(catalog, settings)
    app = make_app(manager, catalog, settings)
    Protocol.max_connections = _max_connections()
    config = Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.HEADER_BYTES,
        timeout_graceful_shutdown=DRAIN_S,
    )

    def on_end() -> None:
        app.state.ending.set()
        manager.refuse()

    def on_start() -> None:
        on_listening()
        if models:
            app.state.preloading = asyncio.ensure_future(_preload(manager, models))

    _start_logging(
        "debug" if settings.debug else settings.log_level, settings.log_format
    )
    server: Server = QuietServer(config, listener, on_start, on_end)
    server.run()
    return 0 if server.started else 1
