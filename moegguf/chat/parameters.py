"""Ollama's options in the chat: the values that words write, and what they mean for a model's opening."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moegguf.errors import OptionError
from moegguf.generate.options import RANGES
from moegguf.models import recipe
from moegguf.quantities import parse_expert_cache
from moegguf.terminal.loading import OpenOptions

OPENING = {
    "num_ctx": "ctx",
    "num_batch": "batch",
    "num_gpu": "gpu_layers",
    "num_thread": "threads",
    "expert_cache": "expert_cache",
}


def parse_parameter(name: str, words: Sequence[str]) -> Any:
    """The value that `words` write; `stop` takes them all, every other option the first.

    Raises OptionError for an unknown name or a value that it does not take, BudgetError for an expert_cache.
    """
    if name not in recipe.PARAMETERS:
        raise OptionError(f"unknown parameter '{name}'")
    if name == "stop":
        return list(words)
    value = recipe.parse_parameter(name, words[0])
    least, most = RANGES.get(name, (value, value))
    if name in RANGES and not least <= value <= most:
        raise OptionError(f"{name} takes {least:,} to {most:,}, but is {value:,}")
    if name == "expert_cache":
        parse_expert_cache(value)
    return value


def opening_with(base: OpenOptions, parameters: Mapping[str, Any]) -> OpenOptions:
    """`base` changed by those of `parameters` that decide how a model is opened. 0, and num_gpu -1: by moegguf."""
    changes: dict[str, Any] = {}
    for name, field in OPENING.items():
        if name in parameters:
            value = parameters[name]
            changes[field] = None if value == (-1 if name == "num_gpu" else 0) else value
    return replace(base, **changes)
