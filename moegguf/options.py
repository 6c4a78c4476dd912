"""Old names of options, which work for one release with a warning that names the new one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

OLD_NAMES = {"system": "strategy"}
"""{keyword: the new keyword}; flags (--system) and environment variables (MOEGGUF_SYSTEM) follow it."""


def flag(name: str) -> str:
    """The flag of a keyword: "--vram-cache"."""
    return f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """The environment variable of a keyword: "MOEGGUF_VRAM_CACHE"."""
    return f"MOEGGUF_{name.upper()}"


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is called {new} now; the old name goes with the next release.", FutureWarning, stacklevel=4)


def take_old_keywords(options: MutableMapping[str, Any]) -> dict[str, Any]:
    """Takes keywords by old names out of `options`; returns them by their new names."""
    found = {old: options.pop(old) for old in OLD_NAMES if old in options}
    for old in found:
        _warn(f"{old}=", f"{OLD_NAMES[old]}=")
    return {OLD_NAMES[old]: value for old, value in found.items()}


def with_new_flags(arguments: Sequence[str]) -> list[str]:
    """A command line with the new flags in place of old ones; words after `--` are not changed."""
    words = list(arguments)
    new_flags = {flag(old): flag(new) for old, new in OLD_NAMES.items()}
    for at, word in enumerate(words[: words.index("--") if "--" in words else None]):
        name, equals, value = word.partition("=")
        if name in new_flags:
            _warn(name, new_flags[name])
            words[at] = new_flags[name] + equals + value
    return words


def read_variable(environ: Mapping[str, str], name: str) -> str:
    """The text of a keyword's environment variable, or of the old one where that alone is set; "" without both."""
    if text := environ.get(variable(name), "").strip():
        return text
    for old in (old for old, new in OLD_NAMES.items() if new == name):
        if text := environ.get(variable(old), "").strip():
            _warn(variable(old), variable(name))
            return text
    return ""
