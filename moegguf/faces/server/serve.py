"""`moegguf serve`: the address, the keys, the life of the server process."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from moegguf.errors import MoeggufError, OptionError
from moegguf.faces.messages import say

if TYPE_CHECKING:
    from uvicorn import Server

    from moegguf.settings import Host, Settings

DRAIN_S = 3  # for answers that are being written when the server is told to end; the pool takes as long again


class StartError(MoeggufError, OSError):
    """The server cannot listen where it should."""


def serve(
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Where to listen.  [default: MOEGGUF_HOST, or 127.0.0.1:11434]"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="N", help="Another port; 0 takes a free one.")
    ] = None,
    expert_cache: Annotated[
        str | None,
        typer.Option(metavar="BUDGET", help='Memory for experts of each model: "auto", "50%", "4GiB".'),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for all loaded models together.  [default: as is free]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Ask every client for this key; MOEGGUF_API_KEY shows it to fewer people."),
    ] = None,
) -> int:
    """Serve models over the Ollama and OpenAI APIs, with a page to look at.

    Environment (OLLAMA_NAME is read where MOEGGUF_NAME is not set):

    \b
    MOEGGUF_HOST               where to listen, such as 127.0.0.1:11434
    MOEGGUF_API_KEY            asked of every client; needed on other addresses than loopback
    MOEGGUF_ORIGINS            web pages that may ask, besides those of this machine
    MOEGGUF_MODELS             folder of GGUF files known by name
    MOEGGUF_HOME               where names, blobs and history are kept
    MOEGGUF_MEMORY             for all loaded models together
    MOEGGUF_EXPERT_CACHE       of each model for its experts
    MOEGGUF_KEEP_ALIVE         how long a model stays without work (5m; negative: for ever)
    MOEGGUF_CONTEXT_LENGTH     tokens of context
    MOEGGUF_MAX_LOADED_MODELS  at most so many at once
    MOEGGUF_MAX_QUEUE          requests that may wait (512)
    MOEGGUF_LOAD_TIMEOUT       a load ends when nothing is read for so long (5m)
    MOEGGUF_KV_CACHE_TYPE      f16, q8_0 or q4_0
    MOEGGUF_FLASH_ATTENTION    0 or 1
    MOEGGUF_GPU_OVERHEAD       bytes to leave free on a GPU
    MOEGGUF_DEBUG              1 logs every request
    HF_TOKEN HF_HOME HF_HUB_CACHE HF_ENDPOINT HF_HUB_OFFLINE   as for huggingface_hub
    """
    settings = choose(host, port, memory, api_key)
    if expert_cache is not None:
        from moegguf.config import parse_expert_cache

        parse_expert_cache(expert_cache)
        os.environ["MOEGGUF_EXPERT_CACHE"] = expert_cache  # where the workers look
    listener = listen(settings.host)
    try:
        return work(settings, listener)
    finally:
        listener.close()


def choose(host: str | None, port: int | None, memory: str | None, api_key: str | None) -> Settings:
    """The environment's settings with those of the command line.

    Raises OptionError, also for an address that others can reach without a key to ask them for.
    """
    from moegguf.config import parse_size
    from moegguf.settings import parse_host, read_settings

    settings = read_settings()
    address = parse_host(host) if host is not None else settings.host
    if address.scheme != "http":
        raise OptionError("the server speaks http only; put a proxy before it for https.")
    try:
        memory_bytes = parse_size(memory) if memory is not None else settings.memory_bytes
    except ValueError as error:
        raise OptionError(f"--memory: {error}") from None
    settings = replace(
        settings,
        host=replace(address, port=address.port if port is None else port),
        memory_bytes=memory_bytes,
        api_key=api_key or settings.api_key,
    )
    if not settings.host.is_loopback and not settings.api_key:
        raise OptionError(
            f"{settings.host.host} can be reached by others: set MOEGGUF_API_KEY (clients send it as a Bearer token),"
            " or listen on 127.0.0.1."
        )
    return settings


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


def work(settings: Settings, listener: socket.socket) -> int:
    """Serves until a signal says to end. Returns the exit code."""
    from uvicorn import Config

    from moegguf.faces.server.app import make_app
    from moegguf.faces.server.transport import HEADER_BYTES, Protocol, QuietServer
    from moegguf.models.catalog import Catalog
    from moegguf.serving.pool import Pool

    catalog = Catalog(paths=False)  # a client that could open any file could read any file
    app = make_app(Pool(catalog, settings), catalog, settings)
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
    server: Server = QuietServer(config, lambda: announce(settings.host, listener), app.state.ending.set)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def announce(host: Host, listener: socket.socket) -> None:
    """Says where the server listens, once it does."""
    address = replace(host, port=listener.getsockname()[1])
    say(f"listening on {address.url}" + (" (with an API key)" if not address.is_loopback else ""))
