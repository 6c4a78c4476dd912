"""What a user may write for sizes, budgets and environment variables, and what it means.

This file parses and prints; it does not know the model or the machine (engine/plan.py does).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moegguf.errors import BudgetError, OptionError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
MAX_BYTES = 1 << 60

BUDGET_WORDS = 'accepted: "auto", a share of all experts such as "50%", or a size such as "4GiB", "512MiB" or "2.5 GB"'

_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
_NAMES = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)\s*([a-z]{0,3})", re.ASCII | re.IGNORECASE)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)


def _shown(value: object) -> str:
    """`value` as it appears in a message, cut to a length that fits one."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_size(value: str | int) -> int:
    """Bytes from "4GiB", "2.5 GB", "512M" (K, M, G, T alone are powers of 1024) or a plain whole number.

    Raises ValueError for anything else, for zero, for negative and for more than 2^60.
    """
    n_bytes = -1
    if isinstance(value, int) and not isinstance(value, bool):
        n_bytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        number, unit = match.group(1), match.group(2).lower()
        if unit in _UNITS and not ("." in number and _UNITS[unit] == 1):
            whole, _, part = number.partition(".")
            n_bytes = (int(whole) * 10 ** len(part) + int(part or 0)) * _UNITS[unit] // 10 ** len(part)
    if not 0 < n_bytes <= MAX_BYTES:
        raise ValueError(f'a size must be above zero, such as "4GiB" or "512MiB", but is {_shown(value)}')
    return n_bytes


def format_bytes(n_bytes: int) -> str:
    """`n_bytes` in words a person reads: "0 B", "900 B", "22.3MiB", "7.52GiB"."""
    sign, size = ("-", -n_bytes) if n_bytes < 0 else ("", n_bytes)
    if size < KIB:
        return f"{sign}{size} B"
    unit, name = next(pair for pair in _NAMES if size >= pair[0])
    number = size / unit
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{sign}{number:.{digits}f}{name}"


def format_bytes_up(n_bytes: int) -> str:
    """`n_bytes` rounded up to a tenth of a MiB, as `parse_size` reads it back: "22.4MiB"."""
    tenths = -(-n_bytes * 10 // MIB)
    return f"{tenths // 10}.{tenths % 10}MiB"


@dataclass(frozen=True)
class ExpertCache:
    """How much fast memory experts may take, as asked for: what is free, a share of them, or bytes."""

    mode: Literal["auto", "fraction", "bytes"]
    fraction: float = 0.0  # of all experts' bytes, in (0, 1]; only for mode "fraction"
    n_bytes: int = 0  # only for mode "bytes"

    def __str__(self) -> str:
        if self.mode == "auto":
            return "auto"
        return f"{self.fraction * 100:g}%" if self.mode == "fraction" else format_bytes(self.n_bytes)


def parse_expert_cache(value: str | int | float | ExpertCache) -> ExpertCache:
    """The budget a user wrote. A whole number counts bytes.

    Raises BudgetError, stating what is accepted, for zero, negative, NaN, fractions without a unit and words.
    """
    if isinstance(value, ExpertCache):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return ExpertCache("auto")
        if match := _PERCENT.fullmatch(text):
            fraction = float(match.group(1)) / 100
            if 0 < fraction <= 1:
                return ExpertCache("fraction", fraction=fraction)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if not isinstance(value, float):
        try:
            return ExpertCache("bytes", n_bytes=parse_size(value))
        except ValueError:
            pass
    raise BudgetError(f"expert_cache is {_shown(value)}, which is not a budget; {BUDGET_WORDS}.")


@dataclass(frozen=True)
class Environment:
    """The environment variables that concern models and the library; those of the server are in settings.py."""

    hooks: bool = True  # MOEGGUF_HOOKS=0 runs plain llama.cpp
    expert_cache: str = "auto"  # MOEGGUF_EXPERT_CACHE: the budget when the caller gives none
    library: Path | None = None  # MOEGGUF_LIBRARY: folder of the native library, instead of the installed one
    models: Path | None = None  # MOEGGUF_MODELS: folder of models known by name
    home: Path | None = None  # MOEGGUF_HOME: what moegguf keeps, instead of in the user's data folder


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


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads MOEGGUF_* from `environ` (default: the process's). Empty counts as unset.

    Raises OptionError for a switch that is neither on nor off, BudgetError for a budget that cannot be read.
    """
    env = os.environ if environ is None else environ
    hooks = env.get("MOEGGUF_HOOKS", "").strip().lower() or "1"
    if hooks not in _SWITCH:
        raise OptionError(f"MOEGGUF_HOOKS must be 0 or 1, but is {_shown(hooks)}; unset it to use the expert store.")
    cache = env.get("MOEGGUF_EXPERT_CACHE", "").strip() or "auto"
    try:
        parse_expert_cache(cache)
    except BudgetError as error:
        raise BudgetError(f"MOEGGUF_EXPERT_CACHE: {error}") from None
    library, models, home = (env.get(f"MOEGGUF_{name}", "") for name in ("LIBRARY", "MODELS", "HOME"))
    return Environment(
        hooks=_SWITCH[hooks],
        expert_cache=cache,
        library=Path(library).expanduser() if library else None,
        models=Path(models).expanduser() if models else None,
        home=Path(home).expanduser() if home else None,
    )


def data_folder() -> Path:
    """Where names, history and what was learnt about models are kept."""
    import platformdirs

    return read_environment().home or Path(platformdirs.user_data_dir("moegguf"))
