"""`moegguf serve`: the server's settings from the command line and the environment."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from moegguf.cli.options import Misses, Placement, Strategy, VramCache, WarmStart
from moegguf.errors import OptionError
from moegguf.settings import MAX_KV_TOKENS
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.settings import Settings


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
    vram_cache: VramCache = None,
    placement: Placement = None,
    misses: Misses = None,
    strategy: Strategy = None,
    warm_start: WarmStart = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for all loaded models together.  [default: what is free]")
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            metavar="N",
            help="Requests that a model answers at once.  [default: 1]",
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_KV_TOKENS,
            metavar="N",
            help="Tokens of context that these have together, one whole context at least; when they are used up, the"
            " newest waits.  [default: a full context for each, less where experts would miss that memory]",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which of them compute in a step: fifo (all), expertflow (half, by the experts that they will use) or"
            " auto, which measures.  [default: fifo]",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key required of clients; MOEGGUF_API_KEY keeps it out of the process list."),
    ] = None,
    trust_network: Annotated[
        str | None,
        typer.Option(
            metavar="NETWORKS",
            help='Networks whose clients need no key, such as "192.168.1.0/24", unless a proxy forwards their'
            " requests; commas between them.",
        ),
    ] = None,
) -> int:
    """Serve models over the Ollama, OpenAI and Anthropic APIs, with a web page.

    Environment (OLLAMA_NAME is read where MOEGGUF_NAME is not set):

    \b
    MOEGGUF_HOST               where to listen, such as 127.0.0.1:11434
    MOEGGUF_API_KEY            required of clients; it, or the next, must be set for addresses other than loopback
    MOEGGUF_TRUST_NETWORK      networks whose clients need no key: everyone in them can use, add and remove models
    MOEGGUF_ORIGINS            allowed web origins, besides those of this machine
    MOEGGUF_MODELS             folder of GGUF files known by name
    MOEGGUF_HOME               where names, blobs and history are kept
    MOEGGUF_MEMORY             memory for all loaded models together
    MOEGGUF_EXPERT_CACHE       for the experts of each model
    MOEGGUF_VRAM_CACHE         the same on a GPU; of each loaded model
    MOEGGUF_PLACEMENT          what goes there: auto, layers, slots, cpu
    MOEGGUF_POLICY             which experts stay, instead of as that decides: a name, or vram=NAME,ram=NAME
    MOEGGUF_MISSES             what a GPU lacks: fetch, or compute (on the CPU where that is faster; not exact)
    MOEGGUF_STRATEGY           what decides on experts: moegguf, none, lru, moe-infinity, promoe, expertflow, duoserve
    MOEGGUF_WARM_START         1: fetch at load the experts that earlier runs used most
    MOEGGUF_KEEP_ALIVE         how long an idle model stays loaded (5m; negative: for ever)
    MOEGGUF_CONTEXT_LENGTH     tokens of context
    MOEGGUF_MAX_LOADED_MODELS  at most so many at once
    MOEGGUF_MAX_QUEUE          requests that may wait (512); when full, of the client with most of them
                               the newest is refused for one of a client with fewer
    MOEGGUF_NUM_PARALLEL       requests that a model answers at once (1)
    MOEGGUF_KV_TOKENS          tokens of context that these have together
    MOEGGUF_SCHEDULE           which of them compute in a step: fifo, expertflow or auto
    MOEGGUF_LOAD_TIMEOUT       a load fails after this long without progress (5m)
    MOEGGUF_BATCH_PARALLEL     requests of a batch at once (16)
    MOEGGUF_BATCH_WINDOW       a batch that takes longer expires (24h; negative: never)
    MOEGGUF_UPLOAD_LIMIT       size of an uploaded file (200MiB)
    MOEGGUF_STORAGE_LIMIT      size of all uploaded files and answers of batches together (10GiB)
    MOEGGUF_KV_CACHE_TYPE      f16, q8_0, q4_0 or another of llama.cpp
    MOEGGUF_FLASH_ATTENTION    0 or 1; unset: where the devices that compute have it, also for moegguf run
    MOEGGUF_DEBUG              1 logs every request
    HF_TOKEN HF_HOME HF_HUB_CACHE HF_ENDPOINT HF_HUB_OFFLINE   as for huggingface_hub
    """
    settings = serve_settings(host, port, memory, api_key, trust_network, parallel, schedule, kv_tokens)
    for name, budget in (("MOEGGUF_EXPERT_CACHE", expert_cache), ("MOEGGUF_VRAM_CACHE", vram_cache)):
        if budget is not None:
            from moegguf.quantities import parse_expert_cache

            parse_expert_cache(budget)
            os.environ[name] = budget  # read by the workers
    if placement is not None:
        from moegguf.engine.placement import parse_placement

        os.environ["MOEGGUF_PLACEMENT"] = parse_placement(placement)
    if misses is not None:
        from moegguf.settings import parse_misses

        os.environ["MOEGGUF_MISSES"] = parse_misses(misses)
    _warn_without_gpu(placement is not None)
    from moegguf.controller.strategies import find_strategy
    from moegguf.settings import read_environment

    chosen = read_environment().strategy if strategy is None else strategy
    os.environ["MOEGGUF_STRATEGY"] = find_strategy(chosen).name
    if warm_start is not None:
        os.environ["MOEGGUF_WARM_START"] = str(int(warm_start))
    from moegguf.server.serve import listen, run_server

    listener = listen(settings.host)
    try:
        return run_server(settings, listener, lambda: print_address(settings, listener))
    finally:
        listener.close()


def _warn_without_gpu(placement_given: bool) -> None:
    """Says what becomes of settings that need a GPU where there is none. The environment's own placement is left to
    the plans' reasons: one environment may serve machines with and without a GPU."""
    from moegguf.engine.devices import has_gpu
    from moegguf.settings import read_environment

    environment = read_environment()
    placed = placement_given and environment.placement in ("slots", "layers")
    if not (placed or environment.vram_cache) or has_gpu():
        return
    if environment.vram_cache:
        wanted, so = "--vram-cache", "models with experts cannot be loaded"
    else:
        wanted, so = f"--placement {environment.placement}", "the CPU computes every model"
    print_message(
        f"warning: {wanted} needs a GPU, and this build of moegguf sees none (`moegguf doctor` lists devices): {so}"
    )


def serve_settings(
    host: str | None,
    port: int | None,
    memory: str | None,
    api_key: str | None,
    trust_network: str | None = None,
    parallel: int | None = None,
    schedule: str | None = None,
    kv_tokens: int | None = None,
) -> Settings:
    """The environment's settings, overridden by the command line's.

    Raises OptionError, also for an address other than loopback with neither an API key nor a trusted network.
    """
    from moegguf.quantities import parse_size
    from moegguf.settings import parse_host, parse_networks, parse_schedule, read_settings

    settings = read_settings()
    address = parse_host(host) if host is not None else settings.host
    if address.scheme != "http":
        raise OptionError("the server supports http only; use a reverse proxy for https.")
    try:
        memory_bytes = parse_size(memory) if memory is not None else settings.memory_bytes
    except ValueError as error:
        raise OptionError(f"--memory: {error}") from None
    settings = replace(
        settings,
        host=replace(address, port=address.port if port is None else port),
        memory_bytes=memory_bytes,
        n_parallel=parallel or settings.n_parallel,
        kv_tokens=kv_tokens or settings.kv_tokens,
        schedule=settings.schedule if schedule is None else parse_schedule(schedule),
        api_key=api_key or settings.api_key,
        trusted=settings.trusted if trust_network is None else parse_networks(trust_network),
    )
    if not settings.host.is_loopback and not settings.api_key and not settings.trusted:
        raise OptionError(
            f"{settings.host.host} is reachable from other machines: set MOEGGUF_API_KEY"
            " (clients send it as a Bearer token), name the networks that need none with --trust-network, or listen on"
            " 127.0.0.1."
        )
    return settings


def print_address(settings: Settings, listener: socket.socket) -> None:
    """Prints the address on stderr once the server listens, and who needs a key where others reach it."""
    address = replace(settings.host, port=listener.getsockname()[1])
    remarks = ["with an API key"] if settings.api_key and not address.is_loopback else []
    if settings.trusted:
        remarks.append(f"no key from {', '.join(map(str, settings.trusted))}")
    print_message(f"listening on {address.url}" + (f" ({'; '.join(remarks)})" if remarks else ""))
