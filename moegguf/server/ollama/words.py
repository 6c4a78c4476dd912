"""Ollama's words for what we know: details, names, times, figures of an answer, and what a model cannot do."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from moegguf.generate.request import TokenLogprob, ToolCall
from moegguf.models.entry import Details
from moegguf.server.common.figures import LEAST_LOGPROB, moe_object, ns
from moegguf.serving.events import Done

if TYPE_CHECKING:
    pass

NEVER = datetime(2318, 1, 1, tzinfo=UTC)  # when a model leaves that stays for ever; Ollama says a year like it


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def now_text() -> str:
    """Now, as RFC 3339 in UTC."""
    seconds, ns = divmod(time.time_ns(), 1_000_000_000)
    return f"{_second(seconds)}.{ns // 1000:06d}Z"


def time_text(moment: datetime | None) -> str:
    """An aware time as RFC 3339; None is never."""
    return (moment or NEVER).astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def details_object(known: Details | None, parent: str = "") -> dict[str, Any]:
    """Ollama's `details`, empty where the file could not be read."""
    return {
        "parent_model": parent,
        "format": "gguf",
        "family": known.family if known else "",
        "families": [known.family] if known else [],
        "parameter_size": known.parameter_size if known else "",
        "quantization_level": known.quantization if known else "",
    }


def figures(done: Done, begun_ns: int) -> dict[str, Any]:
    """The figures of an answer; those that are zero are left out, as Go leaves them out. `begun_ns`: when the request
    came, by perf_counter."""
    timing = done.timing
    found = {
        "total_duration": time.perf_counter_ns() - begun_ns,
        "load_duration": ns(done.load_s),
        "prompt_eval_count": timing.prompt_tokens + timing.cached_tokens,
        "prompt_cached_count": timing.cached_tokens,
        "prompt_eval_duration": ns(timing.prompt_s),
        "eval_count": timing.answer_tokens,
        "eval_duration": ns(timing.answer_s),
        "cut_messages": timing.cut_messages,
    }
    return {name: value for name, value in found.items() if value} | {"moe": moe_object(timing.stats)}


def call_object(call: ToolCall, index: int) -> dict[str, Any]:
    """A tool call; its arguments are an object here."""
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": dict(call.arguments)}}


def logprob_object(logprob: TokenLogprob) -> dict[str, Any]:
    """A token's log probability, and those of the likeliest others when they were asked for."""
    found = _chance(logprob.text, logprob.logprob)
    return found | ({"top_logprobs": [_chance(*other) for other in logprob.top]} if logprob.top else {})


def _chance(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode())}
