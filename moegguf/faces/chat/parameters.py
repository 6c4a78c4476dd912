"""Ollama's options by name: the values they take here, and what they mean for a model's opening and its sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moegguf.config import parse_expert_cache
from moegguf.engine.ask import Sampling
from moegguf.errors import OptionError
from moegguf.faces.opening import LoadOptions
from moegguf.models import recipe

MOST = 1 << 24
LIMITS: dict[str, tuple[float, float]] = {
    "num_ctx": (0, MOST),
    "num_batch": (1, MOST),
    "num_gpu": (-1, MOST),
    "num_thread": (0, 4096),
    "seed": (-1, (1 << 63) - 1),
    "num_predict": (-2, MOST),
    "top_k": (0, MOST),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repeat_last_n": (-1, MOST),
    "temperature": (0, 100),
    "repeat_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}
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
    least, most = LIMITS.get(name, (value, value))
    if name in LIMITS and not least <= value <= most:
        raise OptionError(f"{name} takes {least:,} to {most:,}, but is {value:,}")
    if name == "expert_cache":
        parse_expert_cache(value)
    return value


def sampling_with(base: Sampling, parameters: Mapping[str, Any]) -> Sampling:
    """`base` changed by those of `parameters` that choose tokens. Negative seeds and lengths: none."""
    changes: dict[str, Any] = {}
    for name, value in parameters.items():
        field = "max_tokens" if name == "num_predict" else name
        if field not in Sampling.__dataclass_fields__:
            continue
        if name == "stop":
            value = tuple([value] if isinstance(value, str) else value)
        elif name in ("seed", "num_predict") and value < 0:
            value = None
        changes[field] = value
    return replace(base, **changes)


def opening_with(base: LoadOptions, parameters: Mapping[str, Any]) -> LoadOptions:
    """`base` changed by those of `parameters` that decide how a model is opened. 0, and num_gpu -1: by moegguf."""
    changes: dict[str, Any] = {}
    for name, field in OPENING.items():
        if name in parameters:
            value = parameters[name]
            changes[field] = None if value == (-1 if name == "num_gpu" else 0) else value
    return replace(base, **changes)
