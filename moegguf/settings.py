"""Reads environment variables: `Environment` holds variables that apply everywhere,
`read_load_keywords` returns keywords for loading a model, and `Settings` configures the
server and its clients.

A field of `Settings` is read from MOEGGUF_*, or from OLLAMA_* if MOEGGUF_* is unset.
Where Ollama has a variable, the name and the format of its value follow Ollama's
envconfig and Python client.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from moegguf.errors import BudgetError, OptionError
from moegguf.options import (
    OF_COMMANDS,
    OF_EVERY_LOAD,
    OPTIONS,
    Kind,
    Option,
    load_keywords,
)
from moegguf.quantities import (
    parse_duration,
    parse_expert_cache,
    parse_size,
    parse_store_size,
)
from moegguf.text import without_password

DEFAULT_PORT = 11434

_PORTS = {"http": 80, "https": 443}
_SWITCH = {
    "0": False,
    "off": False,
    "false": False,
    "no": False,
    "1": True,
    "on": True,
    "true": True,
    "yes": True,
}

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Environment:
    """Environment variables that apply in the Python API, commands and servers, and set
    no keyword of `Llama`. The table in `options` describes them."""

    hooks: bool = True
    library: Path | None = None
    models: Path | None = None
    home: Path | None = None
    trial_load: Literal["on", "off", "again"] = "on"
    kernels: str = ""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads the fields of `Environment` from MOEGGUF_* in `environ` (default: this
    process's environment). An empty variable is treated as unset. Raises OptionError,
    which names the variable, for an invalid value."""
    return Environment(**_read(_names_of(Environment), ("MOEGGUF_",), environ))


def read_load_keywords(
    *, commands: bool = False, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the keyword arguments of `Llama` that the environment sets: options in
    OF_EVERY_LOAD, and with `commands` also options in OF_COMMANDS. Raises OptionError
    or BudgetError, which name the variable, for an invalid value."""
    found = _read(OF_EVERY_LOAD, ("MOEGGUF_",), environ)
    if commands:
        found |= _read(OF_COMMANDS, ("MOEGGUF_", "OLLAMA_"), environ)
    return load_keywords(found)


def logs_decisions() -> bool:
    """Returns True if MOEGGUF_LOG is "debug". Does not read other variables. Raises
    OptionError for an unknown value."""
    return _read(["log"], ("MOEGGUF_",)).get("log") == "debug"


def shows_tracebacks() -> bool:
    """Returns True if MOEGGUF_DEBUG is on or has an invalid value. Does not read other
    variables."""
    try:
        return bool(_read(["debug"], ("MOEGGUF_",)).get("debug"))
    except OptionError:
        return True


def data_folder() -> Path:
    """Returns the folder for models' names, chat history and data learnt about models:
    MOEGGUF_HOME, or `moegguf` in the user's data folder."""
    import platformdirs

    return read_environment().home or Path(platformdirs.user_data_dir("moegguf"))


def models_folder() -> Path:
    """Returns the folder of GGUF files that are known by name: MOEGGUF_MODELS, or
    `models` in the data folder."""
    return read_environment().models or data_folder() / "models"


def cache_folder() -> Path:
    """Returns the folder for data that can be recomputed: `cache` in MOEGGUF_HOME, or
    `moegguf` in the user's cache folder."""
    import platformdirs

    home = read_environment().home
    return home / "cache" if home else Path(platformdirs.user_cache_dir("moegguf"))


@dataclass(frozen=True)
class Host:
    """The address of a server. `host` has no brackets, and `path` neither begins nor
    ends with a slash."""

    scheme: str = "http"
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    path: str = ""

    @property
    def url(self) -> str:
        """Returns the address as a URL: "http://127.0.0.1:11434",
        "http://[::1]:80/path"."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + (
            f"/{self.path}" if self.path else ""
        )

    @property
    def is_loopback(self) -> bool:
        """True if the host is "localhost" or a loopback address, which only this
        machine can reach."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def parse_host(text: str | None) -> Host:
    """Parses an address: "host", ":port", "host:port/path", "http://host", "[::1]:port"
    or "::1". For None and an empty string, returns the default address. The default
    port is 11434 without a scheme, 80 for http and 443 for https.

    Raises OptionError for anything else, such as an unknown scheme, an invalid port, a
    query, or a user and password.
    """
    given = (text or "").strip()
    scheme, found, rest = given.partition("://")
    scheme, rest = (scheme.lower(), rest) if found else ("http", given)
    port = _PORTS.get(scheme, DEFAULT_PORT) if found else DEFAULT_PORT
    try:
        if scheme not in _PORTS or any(
            c in "@?#" or c.isspace() or not c.isprintable() for c in rest
        ):
            raise ValueError
        with suppress(ValueError):  # an IPv6 address without brackets
            rest = f"[{ipaddress.IPv6Address(rest)}]"
        split = urllib.parse.urlsplit(f"{scheme}://{rest}")
        port = port if split.port is None else split.port
        return Host(scheme, split.hostname or Host.host, port, split.path.strip("/"))
    except ValueError:
        raise OptionError(
            f"{without_password(given)[:80]!r} is not an address of a server; accepted: 'host', ':port', 'host:port',"
            " 'http://host:port' or '[::1]:port', with a port from 0 to 65535, and without a user,"
            " password, query or fragment."
        ) from None


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parses networks or single addresses that are separated by commas or line breaks:
    "192.168.1.0/24,fd00::/8". Raises OptionError for anything else."""
    try:
        return tuple(ipaddress.ip_network(part) for part in _items(text))
    except ValueError as error:
        raise OptionError(
            f"{error}; give networks such as 192.168.1.0/24, separated by commas."
        ) from None


@dataclass(frozen=True)
class Settings:
    """Options of the server and of its clients. The table in `options` describes each
    option except `loading`.

    The duration `math.inf` means no limit, and None means a default that is chosen
    later.
    """

    host: Host = field(default_factory=Host)
    keep_alive_s: float = 300.0
    origins: tuple[str, ...] = ()
    max_models: int | None = None
    max_queue: int = 512
    load_timeout_s: float = 300.0
    memory_bytes: int | None = None
    debug: bool = False
    log_level: str = "info"
    log_format: str = "text"
    history: bool = True
    # Secret, so not in the repr.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    share_contexts: bool = False
    trusted: tuple[Network, ...] = ()
    reasoning_budget_tokens: int | None = None
    reasoning_budget_message: str = ""
    batch_parallel: int = 16
    batch_window_s: float = 86400.0
    responses_age_s: float = 86400.0
    upload_bytes: int = 200 << 20
    storage_bytes: int = 10 << 30
    editor: str = ""
    # Load options that override the environment's.
    loading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tells_clients_apart(self) -> bool:
        """True if the server can distinguish clients: there are several keys, or there
        is a key and clients in trusted networks need none."""
        return len(set(self.api_keys)) + bool(self.trusted) > 1


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings from `environ` (default: this process's environment). Raises
    OptionError, which names the variable, for an invalid value."""
    return Settings(**_read(_names_of(Settings), ("MOEGGUF_", "OLLAMA_"), environ))


def n_parallel() -> int:
    """Returns the default number of requests that a model answers at once:
    MOEGGUF_NUM_PARALLEL or OLLAMA_NUM_PARALLEL, or 1 if neither is set."""
    return int(read_load_keywords(commands=True).get("n_seq_max", 1))


def _names_of(kind: type[Environment] | type[Settings]) -> list[str]:
    return [each.name for each in fields(kind) if each.name in OPTIONS]


def _read(
    names: Iterable[str],
    prefixes: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns {option: value} for the variables that are set. Empty variables are
    treated as unset, and so is 0 for an option with `zero_is_default`. Quotes around a
    value are removed."""
    env = os.environ if environ is None else environ
    found = dict[str, Any]()
    for option in (OPTIONS[name] for name in names):
        for prefix in prefixes:
            variable = prefix + option.variable
            if text := env.get(variable, "").strip().strip("\"'"):
                if not option.zero_is_default or text.strip("0"):
                    found[option.name] = parse_option(option.name, text, variable)
                break
    return found


def parse_option(name: str, text: str, source: str) -> Any:
    """Parses the text of an option. Raises OptionError or BudgetError with a message
    that begins with `source`, the name of a flag or variable."""
    option = OPTIONS[name]
    try:
        if option.kind == "whole":
            return _whole(option, text)
        if option.kind == "choice":
            return _choice(option, text)
        return _PARSERS[option.kind](text)
    except BudgetError as error:
        raise BudgetError(f"{source}: {error}") from None
    except (ValueError, OptionError) as error:
        raise OptionError(f"{source}: {error}") from None


def _items(text: str) -> tuple[str, ...]:
    return tuple(item for part in re.split(r"[,\n]", text) if (item := part.strip()))


def _whole(option: Option, text: str) -> int:
    least, most = option.least or 0, option.most or 1 << 31
    if (
        not re.fullmatch(r"-?\d{1,12}", text, re.ASCII)
        or not least <= int(text) <= most
    ):
        raise OptionError(
            f"{text[:60]!r} is not a whole number from {least:.0f} to {most:.0f}."
        )
    return int(text)


def _choice(option: Option, text: str) -> str:
    if text.lower() not in option.choices:
        raise OptionError(f"{text[:60]!r} must be one of {', '.join(option.choices)}.")
    return text.lower()


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise OptionError(f"{text[:60]!r} means neither on nor off; give 1 or 0.")
    return _SWITCH[text.lower()]


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Returns a parser that checks an option's text with `parse` and returns the text
    unchanged. The text is reparsed when the option is used."""
    return lambda text: (parse(text), text)[1]


# Parsers of the kinds of options that have neither limits nor choices.
_PARSERS: dict[Kind, Callable[[str], Any]] = {
    "text": str,
    # One, or one per device.
    "budget": _checked(
        lambda text: [parse_expert_cache(part) for part in text.split(",")]
    ),
    "size": parse_size,
    "duration": parse_duration,
    "timeout": lambda text: parse_duration(text) or math.inf,
    "switch": _switch,
    "off switch": lambda text: not _switch(text),
    "level": lambda text: (
        int(text) > 0 if re.fullmatch(r"-?\d{1,3}", text, re.A) else _switch(text)
    ),
    "trial": lambda text: (
        "again" if text.lower() == "again" else ("off", "on")[_switch(text)]
    ),
    "address": parse_host,
    "networks": parse_networks,
    "list": _items,
    "store size": _checked(parse_store_size),
    "path": lambda text: Path(text).expanduser(),
}
