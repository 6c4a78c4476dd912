"""What `serve`, and whoever talks to it, reads from the environment: MOEGGUF_* first, OLLAMA_* where that is unset.

Names, forms and defaults are those of Ollama's envconfig and of its Python client. Reads and checks text; knows no
models, no processes and no HTTP. What decides about experts is in config.py.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from moegguf.config import parse_size
from moegguf.errors import OptionError

DEFAULT_PORT = 11434
KV_CACHE_TYPES = ("f16", "q8_0", "q4_0")
MAX_CONTEXT_TOKENS = 1 << 24

_LONGEST_S = float(2**63 // 10**9)  # Go's longest duration, 292 years
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})"
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"([+-]?)((?:{_NUMBER}(?:ns|us|µs|μs|ms|s|m|h)){{1,16}}|{_NUMBER})", re.ASCII)
_PORTS = {"http": 80, "https": 443}
_SWITCH = {"0": False, "off": False, "false": False, "no": False, "1": True, "on": True, "true": True, "yes": True}

Value = TypeVar("Value")
Default = TypeVar("Default")


@dataclass(frozen=True)
class Host:
    """Where a server listens or is reached. `host` has no brackets; `path` no slash at its ends."""

    scheme: str = "http"
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    path: str = ""

    @property
    def url(self) -> str:
        """As in a request: "http://127.0.0.1:11434", "http://[::1]:80/path"."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + (f"/{self.path}" if self.path else "")

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def parse_host(text: str | None) -> Host:
    """The address in `text`: "host", ":port", "host:port/path", "http://host", "[::1]:port", "::1"; empty for the
    default. Without a scheme the port is 11434, with one it is the scheme's.

    Raises OptionError for another scheme, a port that is none, or a user and password.
    """
    given = (text or "").strip()
    scheme, found, rest = given.partition("://")
    scheme, rest = (scheme.lower(), rest) if found else ("http", given)
    port = _PORTS.get(scheme, DEFAULT_PORT) if found else DEFAULT_PORT
    try:
        if scheme not in _PORTS or "@" in rest or any(c.isspace() or not c.isprintable() for c in rest):
            raise ValueError
        if _is_ipv6(rest):
            rest = f"[{rest}]"
        split = urllib.parse.urlsplit(f"{scheme}://{rest}")
        port = port if split.port is None else split.port
        return Host(scheme, split.hostname or Host.host, port, split.path.strip("/"))
    except ValueError:
        raise OptionError(
            f"{given.rpartition('@')[2][:80]!r} is not an address of a server; accepted: 'host', ':port', 'host:port', 'http://host:port'"
            " or '[::1]:port', with a port from 0 to 65535."
        ) from None


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def parse_duration(value: str | int | float) -> float:
    """Seconds: of a number (or one written as text), or of a Go duration such as "1h30m" or "300ms". Negative: for
    ever, which is `math.inf`; so is what a Go duration cannot hold.

    Raises OptionError for anything else, NaN too.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(min(max(value, -1), _LONGEST_S + 1)) if value == value else math.nan
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        parts = _PART.findall(match[2])
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts) if parts else float(match[2])
        seconds = -seconds if match[1] == "-" else seconds
    if math.isnan(seconds):
        raise OptionError(
            f"{repr(value)[:60]} is not a duration; accepted: seconds, or a text such as '5m', '1h30m', '300ms';"
            " negative is for ever."
        )
    return math.inf if seconds < 0 or seconds > _LONGEST_S else seconds


@dataclass(frozen=True)
class Settings:
    """What the environment says. Durations in seconds, `math.inf` for ever; None: to be chosen where it is used.

    `memory_bytes`: for all loaded models together. `max_models`: at most so many loaded; None: as many as fit.
    `max_queue`: requests that may wait. `load_timeout_s`: a load ends when nothing is read for so long. `n_parallel`
    is read for its form; a model writes one answer at a time. `api_key` is in no text of this object.
    """

    host: Host = field(default_factory=Host)
    keep_alive_s: float = 300.0
    origins: tuple[str, ...] = ()
    n_ctx: int | None = None
    n_parallel: int = 1
    max_models: int | None = None
    max_queue: int = 512
    load_timeout_s: float = 300.0
    kv_cache_type: str = "f16"
    flash_attention: bool | None = None
    gpu_overhead_bytes: int = 0
    memory_bytes: int | None = None
    debug: bool = False
    history: bool = True
    prune: bool = True
    api_key: str | None = field(default=None, repr=False)


class _Variables:
    """Values by the part of their name after MOEGGUF_ or OLLAMA_; empty counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def find(self, name: str) -> tuple[str, str]:
        """The variable that is set and its value; the value is empty when none is."""
        for full in (f"MOEGGUF_{name}", f"OLLAMA_{name}"):
            if text := self.environ.get(full, "").strip().strip("\"'"):
                return full, text
        return f"MOEGGUF_{name}", ""

    def read(self, name: str, parse: Callable[[str], Value], default: Default) -> Value | Default:
        full, text = self.find(name)
        try:
            return parse(text) if text else default
        except ValueError as error:
            raise OptionError(f"{full}: {error}") from None
        except OptionError as error:
            raise OptionError(f"{full}: {error}") from None


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in `environ` (default: the process's).

    Raises OptionError, naming the variable, for a value that cannot be read.
    """
    read = _Variables(os.environ if environ is None else environ).read
    return Settings(
        host=read("HOST", parse_host, Host()),
        keep_alive_s=read("KEEP_ALIVE", parse_duration, Settings.keep_alive_s),
        origins=read("ORIGINS", _words, ()),
        n_ctx=read("CONTEXT_LENGTH", _whole(0, MAX_CONTEXT_TOKENS), 0) or None,
        n_parallel=read("NUM_PARALLEL", _whole(0, 1024), 0) or Settings.n_parallel,
        max_models=read("MAX_LOADED_MODELS", _whole(0, 1024), 0) or None,
        max_queue=read("MAX_QUEUE", _whole(0, 1_000_000), Settings.max_queue),
        load_timeout_s=read("LOAD_TIMEOUT", parse_duration, Settings.load_timeout_s) or math.inf,
        kv_cache_type=read("KV_CACHE_TYPE", _kv_cache_type, Settings.kv_cache_type),
        flash_attention=read("FLASH_ATTENTION", _switch, None),
        gpu_overhead_bytes=read("GPU_OVERHEAD", _size_or_zero, 0),
        memory_bytes=read("MEMORY", parse_size, None),
        debug=read("DEBUG", _level, False),
        history=not read("NOHISTORY", _switch, False),
        prune=not read("NOPRUNE", _switch, False),
        api_key=read("API_KEY", str, None),
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,12}", text, re.ASCII) or not least <= int(text) <= most:
            raise OptionError(f"{text[:60]!r} is not a whole number from {least} to {most}.")
        return int(text)

    return parse


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise OptionError(f"{text[:60]!r} is neither on nor off; give 1 or 0.")
    return _SWITCH[text.lower()]


def _level(text: str) -> bool:
    return int(text) > 0 if re.fullmatch(r"-?\d{1,3}", text, re.ASCII) else _switch(text)


def _size_or_zero(text: str) -> int:
    return 0 if text == "0" else parse_size(text)


def _kv_cache_type(text: str) -> str:
    if text.lower() not in KV_CACHE_TYPES:
        raise OptionError(f"{text[:60]!r} is not a type of the KV cache; accepted: {', '.join(KV_CACHE_TYPES)}.")
    return text.lower()
