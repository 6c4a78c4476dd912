"""Ollama's options in the chat: parsing their values, and those that change how the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegguf.errors import OptionError
from moegguf.generate.options import LOAD_PARAMETERS
from moegguf.models import recipe
from moegguf.quantities import parse_expert_cache


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


def load_options_with(base: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `Llama`: `base` changed by those of `parameters` in LOAD_PARAMETERS. 0, and num_gpu -1, mean
    moegguf's default, which is left out."""
    changed = dict(base)
    for name, keyword in LOAD_PARAMETERS.items():
        if name in parameters:
            value = parameters[name]
            changed[keyword] = None if value == (-1 if name == "num_gpu" else 0) else value
    return {keyword: value for keyword, value in changed.items() if value is not None}
