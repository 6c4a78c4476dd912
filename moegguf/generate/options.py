"""Ollama's options: their ranges, and their translation to `Sampling`, for the chat and the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moegguf.generate.request import Sampling

MAX_TOKENS = 1 << 22
MAX_SEED = (1 << 63) - 1
MAX_TOP_LOGPROBS = 20
THINK_LEVELS = ("low", "medium", "high", "max")

LOAD_PARAMETERS = {
    "num_ctx": "n_ctx", "num_batch": "n_batch", "num_thread": "n_threads", "num_gpu": "n_gpu_layers",
    "expert_cache": "expert_cache",
}  # fmt: skip
"""{option that changes how a model is loaded: keyword of `Llama`}"""

RANGES: dict[str, tuple[float, float]] = {
    "num_ctx": (0, MAX_TOKENS),
    "num_batch": (1, 1 << 14),
    "num_gpu": (-1, 1 << 24),
    "num_thread": (0, 512),
    "num_predict": (-2, MAX_TOKENS),
    "num_keep": (-1, MAX_TOKENS),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "temperature": (0, 1000),
    "top_k": (-1, (1 << 31) - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repeat_last_n": (-1, MAX_TOKENS),
    "repeat_penalty": (0.001, 1000),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}


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
