"""The presets of `moegguf bench`. Each preset is a table of settings and a function
that yields rows of figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.bench.drafts import speedup
from moegguf.bench.parts import evictions, link_times
from moegguf.bench.rows import as_table
from moegguf.bench.served import overhead, resume
from moegguf.bench.turns import Row, against_stock, beside_load
from moegguf.errors import OptionError


@dataclass(frozen=True)
class Preset:
    """A measurement with its settings."""

    measure: Callable[..., Iterator[Row]]
    # {setting: default}; a setting has the type of its default.
    settings: Mapping[str, Any]


PRESETS = {
    "turns": Preset(
        against_stock,
        {"prompt": 0, "tokens": 24, "depth": 0, "rounds": 24, "kernels": ""},
    ),
    "busy": Preset(
        beside_load,
        {
            "expert_cache": "100%",
            "seconds": 2.0,
            "rounds": 3,
            "loads": "quiet,busy,pinned",
            "systems": "2,auto,1,llama.cpp",
        },
    ),
    "drafts": Preset(
        speedup,
        {
            "texts": "",
            "draft": "ngram",
            "expert_cache": "50%",
            "prompts": 40,
            "rounds": 3,
        },
    ),
    "server": Preset(overhead, {"rounds": 30}),
    "resume": Preset(resume, {"tokens": 16_000, "folder": ""}),
    "eviction": Preset(
        evictions,
        {"slots": 10_000, "layers": 64, "experts": 256, "used": 8, "events": 4000},
    ),
    "link": Preset(link_times, {"link": "2GB/s,35us", "repetitions": 100}),
}


def find_preset(name: str) -> Preset:
    """Returns the preset with this name. Raises OptionError for an unknown name."""
    if name not in PRESETS:
        raise OptionError(
            f"--preset must be one of {', '.join(PRESETS)}, but is {name!r}."
        )
    return PRESETS[name]


def read_settings(name: str, changes: Sequence[str]) -> dict[str, Any]:
    """Returns a preset's settings after changes such as "rounds=5". Raises OptionError
    for an unknown preset, an unknown setting or a value that is not allowed."""
    defaults = find_preset(name).settings
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
    rows = list(find_preset(name).measure(model, **settings))
    return json.dumps(rows, indent=2) + "\n" if output == "json" else as_table(rows)
