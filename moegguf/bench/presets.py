"""The presets of `moegguf bench`. Each preset is a function that yields rows of
figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import getfullargspec
from typing import Any

from moegguf.bench.drafts import speedup
from moegguf.bench.parts import evictions, link_times
from moegguf.bench.rows import as_table
from moegguf.bench.served import overhead, resume
from moegguf.bench.turns import Row, against_stock, beside_load
from moegguf.errors import OptionError

PRESETS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "turns": against_stock,
    "busy": beside_load,
    "drafts": speedup,
    "server": overhead,
    "resume": resume,
    "eviction": evictions,
    "link": link_times,
}
"""{preset: the function that measures a model}. The settings of a preset are the
function's keyword-only parameters. A setting has the type of its default."""


def read_settings(name: str, changes: Sequence[str]) -> dict[str, Any]:
    """Returns a preset's settings after changes such as "rounds=5". Raises OptionError
    for an unknown preset, an unknown setting or a value that is not allowed."""
    if name not in PRESETS:
        raise OptionError(
            f"--preset must be one of {', '.join(PRESETS)}, but is {name!r}."
        )
    defaults = getfullargspec(PRESETS[name]).kwonlydefaults or {}
    changed = dict(defaults)
    for change in changes:
        key, _, text = change.partition("=")
        if key not in defaults:
            known = " ".join(f"{key}={value}" for key, value in defaults.items())
            raise OptionError(
                f"--set {change}: the preset {name!r} has no setting {key!r}; its settings are {known}."
            )
        kind = type(defaults[key])
        try:
            changed[key] = kind(text)
        except ValueError:
            number = "whole number" if kind is int else "number"
            raise OptionError(
                f"--set {change}: {key} must be a {number} such as {defaults[key]}."
            ) from None
        if kind is not str and (
            changed[key] < 0 or (defaults[key] and not changed[key])
        ):
            least = "above 0" if defaults[key] else "at least 0"
            raise OptionError(f"--set {change}: {key} must be {least}.")
    return changed


def run_preset(name: str, model: str, changes: Sequence[str], output: str) -> str:
    """Runs a preset. Returns the rows as JSON if `output` is "json", otherwise as a
    table. Raises MoeggufError."""
    settings = read_settings(name, changes)
    rows = list(PRESETS[name](model, **settings))
    return json.dumps(rows, indent=2) + "\n" if output == "json" else as_table(rows)
