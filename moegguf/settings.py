"""Environment variables: those of every command (`Environment`), and those of the server and its clients (`Settings`).

Settings are read from MOEGGUF_*, and from OLLAMA_* where that is unset; names, forms and defaults are those of Ollama's
envconfig and Python client.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from moegguf.errors import BudgetError, OptionError
from moegguf.options import read_variable
from moegguf.quantities import parse_duration, parse_expert_cache, parse_size

DEFAULT_PORT = 11434
KV_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""As llama.cpp's tools take them."""
MAX_CONTEXT_TOKENS = 1 << 24
MAX_KV_TOKENS = 1 << 28  # of all sequences of a context
MAX_BATCH_PARALLEL = 256
MAX_PARALLEL = 256  # llama.cpp's LLAMA_MAX_SEQ

PLACEMENTS = ("auto", "layers", "slots", "cpu")
"""Where experts go on a machine with a GPU: see engine/placement.py."""
MISSES = ("fetch", "compute")
"""What happens to experts that a GPU lacks: they are copied there, or the CPU computes them where that is faster."""

_PORTS = {"http": 80, "https": 443}
_SWITCH = {"0": False, "off": False, "false": False, "no": False, "1": True, "on": True, "true": True, "yes": True}

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Value = TypeVar("Value")
Default = TypeVar("Default")


@dataclass(frozen=True)
class Environment:
    """The environment variables of every command, for models and the library."""

    hooks: bool = True  # MOEGGUF_HOOKS=0 runs plain llama.cpp
    expert_cache: str = "auto"  # MOEGGUF_EXPERT_CACHE: the budget when the caller gives none
    warm_start: bool = False  # MOEGGUF_WARM_START=1: what earlier runs used most is fetched at load, and remembered
    vram_cache: str = ""  # MOEGGUF_VRAM_CACHE: the budget on a GPU when the caller gives none; empty: "auto"
    placement: str = "auto"  # MOEGGUF_PLACEMENT: where experts go when the caller does not say (engine.placement)
    policy: str = "auto"  # MOEGGUF_POLICY: which experts stay when the caller does not say (controller.policies)
    misses: str = "fetch"  # MOEGGUF_MISSES: what happens to experts that a GPU lacks when the caller does not say
    strategy: str = ""  # MOEGGUF_STRATEGY: what decides on experts (controller.strategies) when the caller names none
    library: Path | None = None  # MOEGGUF_LIBRARY: folder of the native library, instead of the installed one
    models: Path | None = None  # MOEGGUF_MODELS: folder of models known by name
    home: Path | None = None  # MOEGGUF_HOME: folder of moegguf's data, instead of the user's data folder
    trial_load: Literal["on", "off", "again"] = "on"  # MOEGGUF_TRIAL_LOAD: try a file in a process of its own first


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads MOEGGUF_* from `environ` (default: the process's). Empty counts as unset.

    Raises OptionError for MOEGGUF_HOOKS, MOEGGUF_WARM_START, MOEGGUF_PLACEMENT, MOEGGUF_MISSES and MOEGGUF_TRIAL_LOAD,
    BudgetError for MOEGGUF_EXPERT_CACHE and MOEGGUF_VRAM_CACHE.
    """
    env = os.environ if environ is None else environ
    hooks = env.get("MOEGGUF_HOOKS", "").strip().lower() or "1"
    if hooks not in _SWITCH:
        raise OptionError(f"MOEGGUF_HOOKS must be 0 or 1, but is {hooks[:60]!r}; unset it to use the expert store.")
    warm_start = env.get("MOEGGUF_WARM_START", "").strip().lower() or "0"
    if warm_start not in _SWITCH:
        raise OptionError(f"MOEGGUF_WARM_START must be 0 or 1, but is {warm_start[:60]!r}.")
    cache = env.get("MOEGGUF_EXPERT_CACHE", "").strip() or "auto"
    vram_cache = env.get("MOEGGUF_VRAM_CACHE", "").strip()
    placement = env.get("MOEGGUF_PLACEMENT", "").strip().lower() or "auto"
    if placement not in PLACEMENTS:
        raise OptionError(f"MOEGGUF_PLACEMENT is none of {', '.join(PLACEMENTS)}, but {placement[:60]!r}.")
    misses = env.get("MOEGGUF_MISSES", "").strip().lower() or "fetch"
    if misses not in MISSES:
        raise OptionError(f"MOEGGUF_MISSES is none of {', '.join(MISSES)}, but {misses[:60]!r}.")
    budgets = [("EXPERT", cache), *(("VRAM", part) for part in (vram_cache or "auto").split(","))]  # one per device
    for name, budget in budgets:
        try:
            parse_expert_cache(budget)
        except BudgetError as error:
            raise BudgetError(f"MOEGGUF_{name}_CACHE: {error}") from None
    trial = env.get("MOEGGUF_TRIAL_LOAD", "").strip().lower() or "1"
    if trial not in _SWITCH and trial != "again":
        raise OptionError(f"MOEGGUF_TRIAL_LOAD must be 0, 1 or 'again', but is {trial[:60]!r}.")
    library, models, home = (env.get(f"MOEGGUF_{name}", "") for name in ("LIBRARY", "MODELS", "HOME"))
    return Environment(
        hooks=_SWITCH[hooks],
        expert_cache=cache,
        warm_start=_SWITCH[warm_start],
        vram_cache=vram_cache,
        placement=placement,
        policy=env.get("MOEGGUF_POLICY", "").strip() or "auto",
        misses=misses,
        strategy=read_variable(env, "strategy"),
        library=Path(library).expanduser() if library else None,
        models=Path(models).expanduser() if models else None,
        home=Path(home).expanduser() if home else None,
        trial_load="again" if trial == "again" else "on" if _SWITCH[trial] else "off",
    )


def parse_misses(text: str) -> str:
    """One of `MISSES`. Raises OptionError."""
    if text not in MISSES:
        raise OptionError(f"misses={text[:60]!r} is none of {', '.join(MISSES)}.")
    return text


def data_folder() -> Path:
    """The folder of names, history and learnt data of models: MOEGGUF_HOME, or the user's data folder."""
    import platformdirs

    return read_environment().home or Path(platformdirs.user_data_dir("moegguf"))


def cache_folder() -> Path:
    """The folder of what can be found out again: a folder in MOEGGUF_HOME, or the user's cache folder."""
    import platformdirs

    home = read_environment().home
    return home / "cache" if home else Path(platformdirs.user_cache_dir("moegguf"))


@dataclass(frozen=True)
class Host:
    """The address of a server. `host` has no brackets; `path` no slash at its ends."""

    scheme: str = "http"
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    path: str = ""

    @property
    def url(self) -> str:
        """The URL: "http://127.0.0.1:11434", "http://[::1]:80/path"."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + (f"/{self.path}" if self.path else "")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def parse_host(text: str | None) -> Host:
    """The address in `text`: "host", ":port", "host:port/path", "http://host", "[::1]:port", "::1"; empty for the
    default. Without a scheme the port is 11434, with one it is the scheme's.

    Raises OptionError for another scheme, an invalid port, or a user and password.
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


def parse_networks(text: str) -> tuple[Network, ...]:
    """The networks in `text`, separated by commas: "192.168.1.0/24", "fd00::/8", or a single address.

    Raises OptionError for anything else.
    """
    try:
        return tuple(ipaddress.ip_network(part) for part in _comma_separated(text))
    except ValueError as error:
        raise OptionError(f"{error}; give networks such as 192.168.1.0/24, separated by commas.") from None


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


SCHEDULES = ("fifo", "expertflow", "auto")  # which of the sequences that run compute in a step


@dataclass(frozen=True)
class Settings:
    """Options of the server. Durations in seconds, `math.inf` without a limit; None: chosen where it is used.

    `memory_bytes`: of all loaded models together. `max_models`: most models loaded; None: as many as fit. `max_queue`:
    most requests waiting. `n_parallel`: requests that a model answers at once. `kv_tokens`: of context that these
    have together. `schedule`: which of them compute in a step (`SCHEDULES`). `load_timeout_s`: a load fails after this
    time without a read. `api_key` is not in the repr. `trusted`: networks whose clients need no key. `batch_parallel`:
    most requests of a batch at once. `batch_window_s`: a batch that takes longer expires. `upload_bytes`,
    `storage_bytes`: of one uploaded file, and of all stored files.
    """

    host: Host = field(default_factory=Host)
    keep_alive_s: float = 300.0
    origins: tuple[str, ...] = ()
    n_ctx: int | None = None
    max_models: int | None = None
    max_queue: int = 512
    n_parallel: int = 1
    kv_tokens: int | None = None
    schedule: str = SCHEDULES[0]
    load_timeout_s: float = 300.0
    kv_cache_type: str = "f16"
    flash_attention: bool | None = None
    memory_bytes: int | None = None
    debug: bool = False
    history: bool = True
    api_key: str | None = field(default=None, repr=False)
    trusted: tuple[Network, ...] = ()
    batch_parallel: int = 16
    batch_window_s: float = 86400.0
    upload_bytes: int = 200 << 20
    storage_bytes: int = 10 << 30


class _Variables:
    """Reads variables by their name after MOEGGUF_ or OLLAMA_; empty counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def find(self, name: str) -> tuple[str, str]:
        """(full name, value) of the first that is set; an empty value when none is."""
        for full in (f"MOEGGUF_{name}", f"OLLAMA_{name}"):
            if text := self.environ.get(full, "").strip().strip("\"'"):
                return full, text
        return f"MOEGGUF_{name}", ""

    def read(self, name: str, parse: Callable[[str], Value], default: Default) -> Value | Default:
        full, text = self.find(name)
        try:
            return parse(text) if text else default
        except (ValueError, OptionError) as error:
            raise OptionError(f"{full}: {error}") from None


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in `environ` (default: the process's).

    Raises OptionError, naming the variable, for a value that cannot be read.
    """
    read = _Variables(os.environ if environ is None else environ).read
    return Settings(
        host=read("HOST", parse_host, Host()),
        keep_alive_s=read("KEEP_ALIVE", parse_duration, Settings.keep_alive_s),
        origins=read("ORIGINS", _comma_separated, ()),
        n_ctx=read("CONTEXT_LENGTH", _whole(0, MAX_CONTEXT_TOKENS), 0) or None,
        max_models=read("MAX_LOADED_MODELS", _whole(0, 1024), 0) or None,
        max_queue=read("MAX_QUEUE", _whole(0, 1_000_000), Settings.max_queue),
        n_parallel=read("NUM_PARALLEL", _whole(0, MAX_PARALLEL), 0) or Settings.n_parallel,
        kv_tokens=read("KV_TOKENS", _whole(0, MAX_KV_TOKENS), 0) or None,
        schedule=read("SCHEDULE", parse_schedule, Settings.schedule),
        load_timeout_s=read("LOAD_TIMEOUT", parse_duration, Settings.load_timeout_s) or math.inf,
        kv_cache_type=read("KV_CACHE_TYPE", parse_kv_cache_type, Settings.kv_cache_type),
        flash_attention=read("FLASH_ATTENTION", _switch, None),
        memory_bytes=read("MEMORY", parse_size, None),
        debug=read("DEBUG", _level, False),
        history=not read("NOHISTORY", _switch, False),
        api_key=read("API_KEY", str, None),
        trusted=read("TRUST_NETWORK", parse_networks, ()),
        batch_parallel=read("BATCH_PARALLEL", _whole(1, MAX_BATCH_PARALLEL), Settings.batch_parallel),
        batch_window_s=read("BATCH_WINDOW", parse_duration, Settings.batch_window_s),
        upload_bytes=read("UPLOAD_LIMIT", parse_size, Settings.upload_bytes),
        storage_bytes=read("STORAGE_LIMIT", parse_size, Settings.storage_bytes),
    )


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(item for part in text.split(",") if (item := part.strip()))


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


def parse_schedule(text: str) -> str:
    """One of `SCHEDULES`. Raises OptionError."""
    if text not in SCHEDULES:
        raise OptionError(f"there is no schedule {text[:60]!r}; known are {', '.join(SCHEDULES)}.")
    return text


def parse_kv_cache_type(text: str) -> str:
    """The type of a KV cache named by `text`, in lower case. Raises OptionError."""
    if text.lower() not in KV_CACHE_TYPES:
        raise OptionError(f"{text[:60]!r} is not a type of the KV cache; accepted: {', '.join(KV_CACHE_TYPES)}.")
    return text.lower()
