"""`moegguf serve`: the server's settings from the command line and the environment."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from moegguf.cli.options import (
    OF_THE_MODEL,
    OF_THINKING,
    Command,
    Flag,
    Given,
    flags,
    loading_options,
    model_argument,
)
from moegguf.errors import OptionError
from moegguf.options import BUDGETS, OF_COMMANDS, OPTIONS
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.settings import Settings


SERVER_FLAGS, LOAD_FLAGS = (
    [name for name, option in OPTIONS.items() if option.flags and option.scope == scope]
    for scope in ("server", "load")
)
TO_EVERY_MODEL = [name for name in LOAD_FLAGS if name not in ("n_ctx", *OF_THE_MODEL)]
WITHOUT_FLAG = [
    option
    for option in OPTIONS.values()
    if option.variable and option.name not in (*SERVER_FLAGS, *LOAD_FLAGS, *OF_THINKING)
]
Models = Annotated[
    list[str] | None,
    model_argument(
        "Models to load at the start: names, or GGUF files, which are served under their file names."
    ),
]
PORT = Flag(
    "--port",
    "N",
    "Port to listen on. 0: any free port.",
    None,
    int,
    {"min": 0, "max": 65535},
)


class ServeCommand(Command):
    """The command `serve`, whose help ends with a list of environment variables."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes the environment variables of options that have no flag in this
        command, and of huggingface_hub."""
        with formatter.section(
            "Environment (OLLAMA_NAME is used if MOEGGUF_NAME is not set)"
        ):
            formatter.write_dl(
                [(f"MOEGGUF_{option.variable}", option.help) for option in WITHOUT_FLAG]
            )
            formatter.write_text(
                "HF_TOKEN HF_HOME HF_HUB_CACHE HF_ENDPOINT HF_HUB_OFFLINE: as in huggingface_hub"
            )


@flags(
    *dict.fromkeys((BUDGETS["RAM"], *SERVER_FLAGS, *OF_THINKING, *LOAD_FLAGS)),
    own=(PORT,),
)
def serve(models: Models = None, *, given: Given, port: int | None = None) -> int:
    """Serve models over the Ollama, OpenAI and Anthropic APIs, with a web page."""
    loading = loading_options(given, [*TO_EVERY_MODEL, *OF_COMMANDS])
    files = {name: given.pop(name) for name in OF_THE_MODEL if name in given}
    settings = replace(serve_settings(port, given), loading=loading)
    models = models or []
    if files and len(models) != 1:
        named = " and ".join(OPTIONS[name].flags[0] for name in files)
        raise OptionError(
            f"with {named}, exactly one model must be named, as in `moegguf serve MODEL`, but {len(models)} are."
        )
    entries = []
    for model in models:
        from moegguf.models.sources import file_name
        from moegguf.terminal.loading import find_or_pull, with_files

        # A model given by path is named after its file, without ".gguf".
        entry = find_or_pull(model)
        own = (
            replace(entry, name=file_name(entry.path))
            if entry.source == "path"
            else entry
        )
        entries.append(with_files(own, **files))
    from moegguf.server.serve import listen, run_server

    listener = listen(settings.host)
    try:
        return run_server(
            settings, listener, lambda: print_address(settings, listener), entries
        )
    finally:
        listener.close()


def serve_settings(port: int | None, given: Given) -> Settings:
    """Returns the settings from the environment, overridden by the settings from the
    command line. A value of 0 or an empty value overrides nothing, except for the
    options in `counts`.

    Raises OptionError for invalid settings. An address other than loopback needs an API
    key or a trusted network.
    """
    from moegguf.settings import read_settings

    counts = ("trusted", "reasoning_budget_tokens", "max_queue")
    settings = replace(
        read_settings(),
        **{name: value for name, value in given.items() if value or name in counts},
    )
    if settings.host.scheme != "http":
        raise OptionError(
            "the server supports http only; use a reverse proxy for https."
        )
    settings = replace(settings, debug=settings.debug or settings.log_level == "debug")
    if port is not None:
        settings = replace(settings, host=replace(settings.host, port=port))
    if not settings.host.is_loopback and not settings.api_keys and not settings.trusted:
        raise OptionError(
            f"{settings.host.host} is reachable from other machines: set MOEGGUF_API_KEY (clients send it as a"
            " Bearer token), name the networks that need no key with --trust-network, or listen on 127.0.0.1."
        )
    return settings


def print_address(settings: Settings, listener: socket.socket) -> None:
    """Prints the version, the folder of models, the memory, the reason if a GPU cannot
    be used, and the address. A remark after the address states the number of API keys,
    if other machines can reach the server, and the networks whose clients need no
    key."""
    from moegguf.engine.machine import read_memory
    from moegguf.package import __version__
    from moegguf.quantities import format_bytes
    from moegguf.settings import models_folder
    from moegguf.terminal.loading import print_card_note

    address = replace(settings.host, port=listener.getsockname()[1])
    keys = (
        "an API key"
        if len(settings.api_keys) == 1
        else f"{len(settings.api_keys)} API keys"
    )
    remarks = [f"with {keys}"] if settings.api_keys and not address.is_loopback else []
    if settings.trusted:
        remarks.append(f"no key from {', '.join(map(str, settings.trusted))}")
    free = read_memory()
    limit = (
        f"at most {format_bytes(settings.memory_bytes)}"
        if settings.memory_bytes
        else "what is free"
    )
    free_now = (
        f"{format_bytes(free.available_bytes)} of {format_bytes(free.total_bytes)} now"
    )
    print_message(
        f"moegguf {__version__}: models of `moegguf list` and in {models_folder()}"
    )
    print_message(f"memory for them: {limit} (free: {free_now})")
    print_card_note(settings.loading)
    told = f" ({'; '.join(remarks)})" if remarks else ""
    print_message(f"listening on {address.url}{told}, with a page at {address.url}/")
