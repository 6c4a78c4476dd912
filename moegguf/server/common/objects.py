"""Parts of replies that more than one API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from moegguf.engine.stats import Stats
from moegguf.generate.request import Timing
from moegguf.server.common.errors import HttpError

MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON cannot hold


def to_ns(seconds: float) -> int:
    """A duration in whole nanoseconds, as Ollama's API gives it."""
    return round(seconds * 1e9)


def moe_object(stats: Stats) -> dict[str, Any]:
    """Cost of the experts: hit rate, lookups, bytes read, stall time in ns. An extension of both APIs."""
    return {
        "hit_rate": round(stats.hit_rate, 6),
        "lookups": stats.lookups,
        "bytes_read": stats.bytes_read,
        "bytes_per_token": round(stats.bytes_per_token),
        "stall_duration": to_ns(stats.stall_s),
    }


def usage(n_input: int, n_cached: int, n_output: int, n_thinking: int, **details: int) -> dict[str, Any]:
    """Token counts as OpenAI's responses and batches have them; those of the input include cached ones."""
    return {
        "input_tokens": n_input,
        "input_tokens_details": {"cached_tokens": n_cached, **details},
        "output_tokens": n_output,
        "output_tokens_details": {"reasoning_tokens": n_thinking},
        "total_tokens": n_input + n_output,
    }


def shorten(vectors: npt.NDArray[np.float32], n_dimensions: int | None) -> npt.NDArray[np.float32]:
    """The first `n_dimensions` of each vector, normalized again: (n, n_embd) to (n, n_dimensions). Unchanged when
    `n_dimensions` is None, 0 or not below n_embd."""
    if not n_dimensions or not len(vectors) or n_dimensions >= vectors.shape[1]:
        return vectors
    cut = vectors[:, :n_dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def cut_object(timing: Timing) -> dict[str, int]:
    """What was left out to fit the context: of the prompt, and how often a full context lost its older half."""
    counts = {"cut_messages": timing.cut_messages, "cut_tokens": timing.cut_tokens, "context_shifts": timing.n_shifts}
    return {name: count for name, count in counts.items() if count}


def page(
    request: Request, objects: Sequence[dict[str, Any]], most: int, default: int, suffix: str = ""
) -> dict[str, Any]:
    """The page of `objects` that the query asks for: `limit` of them, after or before the id in `after` or `before`,
    whose names in the query end with `suffix`. Raises HttpError 400."""
    query = request.query_params
    text = query.get("limit") or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= most):
        raise HttpError(400, f"limit: must be a whole number from 1 to {most}, but is {text[:40]!r}")
    after, before = query.get(f"after{suffix}"), query.get(f"before{suffix}")
    if after and before:
        raise HttpError(400, f"a page lies after{suffix} or before{suffix}, but both were given; leave one out")
    if before:
        rest = objects[: _position(objects, before)]
        data = rest[-int(text) :]
    else:
        rest = objects[_position(objects, after) + 1 :] if after else objects
        data = rest[: int(text)]
    return {
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(rest) > len(data),
    }


def _position(objects: Sequence[dict[str, Any]], name: str) -> int:
    position = next((i for i, each in enumerate(objects) if each["id"] == name), None)
    if position is None:
        raise HttpError(400, f"after: there is no {name:.80} in this list")
    return position
