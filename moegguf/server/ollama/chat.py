"""/api/chat and /api/generate: the next message of a conversation, and the answer to one prompt; without a question
they load or unload the model. Their replies, and Ollama's JSON objects (api/types.go) that other endpoints share: model
details, times, statistics."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.generate.request import Delta, GenerationRequest
from moegguf.models.entry import Details, ModelEntry
from moegguf.server.common import conversation, limits
from moegguf.server.common.body import read_body
from moegguf.server.common.conversation import Conversation
from moegguf.server.common.lookup import find
from moegguf.server.common.objects import MIN_LOGPROB, cut_object, moe_object, to_ns
from moegguf.server.common.streams import LineResponse, Lines, WholeResponse, json_line
from moegguf.server.ollama.schema import ChatRequest, GenerateRequest, GenerationBody
from moegguf.serving.events import Done, Event

NEVER = datetime(2318, 1, 1, tzinfo=UTC)  # expiry of a model that is kept for ever; Ollama gives a similar year


def time_text(moment: datetime | None) -> str:
    """An aware time as RFC 3339 in UTC; None is NEVER."""
    return (moment or NEVER).astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def details_object(known: Details | None, parent: str = "") -> dict[str, Any]:
    """Ollama's `details`, with empty fields for an unreadable file."""
    return {
        "parent_model": parent,
        "format": "gguf",
        "family": known.family if known else "",
        "families": [known.family] if known else [],
        "parameter_size": known.parameter_size if known else "",
        "quantization_level": known.quantization if known else "",
    }


def statistics(done: Done, start_ns: int) -> dict[str, Any]:
    """Token counts and durations (ns) of an answer; zeros are omitted, as Go omits them, but that of the load, which is
    0 for a model in memory. `start_ns`: arrival of the request, by perf_counter."""
    timing = done.timing
    durations = {"total_duration": time.perf_counter_ns() - start_ns, "load_duration": to_ns(done.load_s)}
    fields = {
        "prompt_eval_count": timing.prompt_tokens + timing.cached_tokens,
        "prompt_cached_count": timing.cached_tokens,
        "prompt_eval_duration": to_ns(timing.prompt_s),
        "eval_count": timing.answer_tokens,
        "eval_duration": to_ns(timing.answer_s),
    }
    return durations | _present(**fields) | cut_object(timing) | {"moe": moe_object(timing.stats)}


def _token_object(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(text.encode())}


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


class Reply(conversation.Reply):
    """A reply by model `name`. `with_details`: with lines for the progress of the prompt, and all of the timing at the
    end. `with_context`: the last object of /api/generate has the tokens to continue from."""

    def __init__(self, name: str, *, with_details: bool = False, with_context: bool = False) -> None:
        self._name = name
        self._whole: dict[str, Any]  # from `add` on
        self._with_details = with_details
        self._with_context = with_context

    def streamed(self, lines: Lines) -> LineResponse:
        """A JSON object on each line."""
        return LineResponse(lines)

    @abstractmethod
    def content(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The fields with the model's output."""

    def final_fields(self, done: Done) -> dict[str, Any]:
        """Fields of the last object only, besides the statistics."""
        return {"done": True, "done_reason": done.timing.finish}

    def lines(self, event: Event) -> bytes:
        """The line for an event; empty for events that Ollama's API does not have, unless `with_details`."""
        if isinstance(event, Delta):
            return json_line(self._object(self._delta_fields(event) | {"done": False})) if event != Delta() else b""
        if isinstance(event, Done):
            more = {"timing": asdict(event.timing), "decisions": event.decisions} if self._with_details else {}
            figures = statistics(event, self.start_ns) | more
            return json_line(self._object(self.content("", "", ()) | self.final_fields(event) | figures))
        progress = {"prompt_progress": asdict(event), "done": False}
        return json_line(self._object(progress)) if self._with_details else b""

    def add(self, delta: Delta, done: Done) -> None:
        """With the statistics."""
        content = self._delta_fields(delta)
        self._whole = self._object(content | self.final_fields(done) | statistics(done, self.start_ns))

    def whole(self) -> dict[str, Any]:
        """The answer."""
        return self._whole

    def without_content(self, reason: str) -> dict[str, Any]:
        """The object that reports a load or unload."""
        return self._object(self.content("", "", ()) | {"done": True, "done_reason": reason})

    def _object(self, rest: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._name, "created_at": time_text(datetime.now(UTC)), **rest}

    def _delta_fields(self, delta: Delta) -> dict[str, Any]:
        calls = [
            {"id": call.id, "function": {"index": index, "name": call.name, "arguments": dict(call.arguments)}}
            for index, call in self.numbered(delta.tool_calls)
        ]
        logprobs = [
            _token_object(of.text, of.logprob) | _present(top_logprobs=[_token_object(*other) for other in of.top])
            for of in delta.logprobs
        ]
        return self.content(delta.text, delta.thinking, calls) | _present(logprobs=logprobs)


class _ChatReply(Reply):
    """The reply of /api/chat."""

    def content(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        return {"message": message | _present(thinking=thinking, tool_calls=list(calls))}


class _GenerateReply(Reply):
    """The reply of /api/generate."""

    def content(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text} | _present(thinking=thinking, tool_calls=list(calls))

    def final_fields(self, done: Done) -> dict[str, Any]:
        context = list(done.timing.context) if self._with_context else []
        return super().final_fields(done) | _present(context=context)


def route(path: str, kind: type[GenerationBody], reply_kind: type[Reply], *questions: str) -> Route:
    """The endpoint at `path`; a body without any of the fields `questions` only loads or unloads the model."""

    def encode(body: GenerationBody, entry: ModelEntry, generations: Sequence[GenerationRequest]) -> Reply:
        return reply_kind(entry.name, with_details=bool(body.details), with_context=generations[0].return_context)

    conversation = Conversation(kind, encode)

    async def respond(request: Request) -> Response:
        start_ns = time.perf_counter_ns()
        body = await read_body(request, kind, limits.IMAGES_BODY_BYTES)
        if any(getattr(body, name) for name in questions):
            return await conversation.respond_to(request, body, start_ns)
        return await load_only(request, body, reply_kind)

    return Route(path, respond, methods=["POST"])


async def load_only(request: Request, body: GenerationBody, kind: type[Reply]) -> Response:
    """Loads the model, or unloads it with `keep_alive` 0; replies without content."""
    state, keep_alive_s = request.app.state, body.keep_alive_s()
    entry = await asyncio.to_thread(find, state.catalog, body.model)
    reply = kind(entry.name)

    async def work() -> dict[str, Any]:
        if keep_alive_s == 0:
            await state.manager.unload(entry.name)
            return reply.without_content("unload")
        await state.manager.load(entry.name, body.overrides(), keep_alive_s)
        return reply.without_content("load")

    return WholeResponse(work())


routes = [
    route("/api/chat", ChatRequest, _ChatReply, "messages"),
    route("/api/generate", GenerateRequest, _GenerateReply, "prompt", "suffix", "images"),
]
