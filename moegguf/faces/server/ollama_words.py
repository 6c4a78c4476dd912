"""Ollama's words for what we know: details, names, times, figures of an answer, and what a model cannot do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from moegguf.engine.ask import TokenChance, ToolCall
from moegguf.engine.stats import Stats
from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.faces.server.body import explain
from moegguf.faces.server.errors import HttpError
from moegguf.faces.server.ollama_schema import Options
from moegguf.models.details import details
from moegguf.models.entry import Details, Entry
from moegguf.serving.events import Done
from moegguf.settings import parse_duration

if TYPE_CHECKING:
    from moegguf.models.catalog import Catalog

NEVER = datetime(2318, 1, 1, tzinfo=UTC)  # when a model leaves that stays for ever; Ollama says a year like it
COMPLETING = {"chat": "completion", "generate": "completion"}  # calls that need the same capability
LEAST_LOGPROB = -9999.0  # for what JSON cannot say


def find(catalog: Catalog, name: str) -> Entry:
    """The model of that name. Raises HttpError 404 in Ollama's words, ModelNameError."""
    try:
        return catalog.find(name)
    except ModelNotFoundError as error:
        message = f"model {name!r:.200} not found, try pulling it first ({' '.join(str(error).split())})"
        raise HttpError(404, message, "model_not_found") from None


async def look_up(catalog: Catalog, name: str) -> tuple[Entry, Details]:
    """A model and what its headers say. Raises what `find` raises, ModelFormatError."""

    def both() -> tuple[Entry, Details]:
        entry = find(catalog, name)
        return entry, details(entry)

    return await asyncio.to_thread(both)


def check_able(entry: Entry, known: Details, needs: Mapping[str, bool]) -> None:
    """Raises HttpError 400 for the first of `needs` ({what: needed}) that the model cannot do, in Ollama's words."""
    for what, needed in needs.items():
        if needed and COMPLETING.get(what, what) not in known.capabilities:
            name = entry.name if what == "tools" else f'"{entry.name}"'
            raise HttpError(400, f"{name} does not support {what}")


def options_of(given: Options | None, entry: Entry) -> Options:
    """The request's options over those of the model. Raises HttpError 400 when the model's cannot be used."""
    if not entry.parameters:
        return given or Options()
    try:
        return Options.model_validate({**entry.parameters, **(given.model_dump(exclude_none=True) if given else {})})
    except ValidationError as error:
        raise HttpError(400, f"parameters of {entry.name}: {explain(error)}") from None


def keep_alive_s(given: int | float | str | None) -> float | None:
    """Seconds to stay loaded, inf for ever, None as the settings say. Raises OptionError."""
    return None if given is None else parse_duration(given)


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


def details_or_none(entry: Entry) -> Details | None:
    """What an entry's headers say, None when they cannot be read: a list shows such a model all the same."""
    try:
        return details(entry)
    except (MoeggufError, OSError):
        return None


def ns(seconds: float) -> int:
    """Ollama's durations are whole nanoseconds."""
    return round(seconds * 1e9)


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


def moe_object(stats: Stats) -> dict[str, Any]:
    """What the experts cost; ours, beside Ollama's figures."""
    return {
        "hit_rate": round(stats.hit_rate, 6),
        "lookups": stats.lookups,
        "bytes_read": stats.bytes_read,
        "bytes_per_token": round(stats.bytes_per_token),
        "stall_duration": ns(stats.stall_s),
    }


def call_object(call: ToolCall, index: int) -> dict[str, Any]:
    """A tool call; its arguments are an object here."""
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": dict(call.arguments)}}


def chance_object(chance: TokenChance) -> dict[str, Any]:
    """A token's log probability, and those of the likeliest others when they were asked for."""
    found = _chance(chance.text, chance.logprob)
    return found | ({"top_logprobs": [_chance(*other) for other in chance.top]} if chance.top else {})


def _chance(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode())}
