"""The life of the server process: a socket that listens, the application behind it, an orderly end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from moegguf.errors import MoeggufError

if TYPE_CHECKING:
    from uvicorn import Server

    from moegguf.settings import Host, Settings

DRAIN_S = 3  # for answers that are being written when the server is told to end; the pool takes as long again


class StartError(MoeggufError, OSError):
    """The server cannot listen where it should."""


def listen(host: Host) -> socket.socket:
    """A socket that listens. Raises StartError when the port is taken or the address is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.host, host.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"{host.host!r} is no address to listen on ({error.strerror}).") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host.url} ({error.strerror}); is a server running there already? Choose another"
            " address with --host or MOEGGUF_HOST."
        ) from None
    return listener


def run_server(settings: Settings, listener: socket.socket, on_listening: Callable[[], None]) -> int:
    """Serves until a signal says to end; calls `on_listening` once requests are taken. Returns the exit code."""
    from uvicorn import Config

    from moegguf.models.catalog import Catalog
    from moegguf.server.app import make_app
    from moegguf.server.common.transport import HEADER_BYTES, Protocol, QuietServer
    from moegguf.serving.manager import ModelManager

    catalog = Catalog(paths=False)  # a client that could open any file could read any file
    app = make_app(ModelManager(catalog, settings), catalog, settings)
    config = Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_level="info" if settings.debug else "warning",
        access_log=settings.debug,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=2048,
    )
    server: Server = QuietServer(config, on_listening, app.state.ending.set)
    server.run(sockets=[listener])
    return 0 if server.started else 1
