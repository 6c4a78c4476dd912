"""Ollama's options in the chat: parsing their values, and those that change how the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moegguf.errors import OptionError
from moegguf.generate.options import LOAD_PARAMETERS
from moegguf.models import recipe
from moegguf.quantities import parse_expert_cache
from moegguf.terminal.loading import LoadOptions


def parse_parameter(name: str, values: Sequence[str]) -> Any:
    """The value written by `values`; `stop` takes all of them, every other option the first.

    Raises OptionError for an unknown name or a value out of range, BudgetError for an expert_cache.
    """
    if name not in recipe.PARAMETERS:
        raise OptionError(f"unknown parameter '{name}'")
    if name == "stop":
        return list(values)
    value = recipe.parse_parameter(name, values[0])
    recipe.check_ranges({name: value})
    if name == "expert_cache":
        parse_expert_cache(value)
    return value


def load_options_with(base: LoadOptions, parameters: Mapping[str, Any]) -> LoadOptions:
    """`base` changed by those of `parameters` in LOAD_PARAMETERS. 0, and num_gpu -1, mean moegguf's default."""
    changes: dict[str, Any] = {}
    for name, field in LOAD_PARAMETERS.items():
        if name in parameters:
            value = parameters[name]
            changes[field] = None if value == (-1 if name == "num_gpu" else 0) else value
    return replace(base, **changes)
