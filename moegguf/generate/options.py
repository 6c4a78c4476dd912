"""Ollama's options of sampling, and their translation to `Sampling`, for the chat and the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moegguf.generate.request import Sampling

MAX_TOP_LOGPROBS = 20
THINK_LEVELS = ("low", "medium", "high", "max")


def sampling_with(base: Sampling, parameters: Mapping[str, Any]) -> Sampling:
    """`base` changed by the sampling options among `parameters`; others are ignored.

    num_predict below 1 sets no limit. seed -1 is random at each request, others count modulo 2^32.
    """
    changes: dict[str, Any] = {}
    for name, value in parameters.items():
        field = "max_tokens" if name == "num_predict" else name
        if field not in Sampling.__dataclass_fields__:
            continue
        if name == "stop":
            value = tuple(text for text in ([value] if isinstance(value, str) else value) if text)
        elif name == "num_predict":
            value = value if value > 0 else None
        elif name == "seed":
            value = None if value == -1 else value & 0xFFFFFFFF
        changes[field] = value
    return replace(base, **changes)
