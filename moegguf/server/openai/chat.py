"""POST /v1/chat/completions: the next message of a conversation, whole or streamed, and what completions share with it.

Follows OpenAI's API reference, with additional keys: `timings` and `prompt_progress` as llama-server writes them, `moe`
of our own. Thinking is `reasoning` (as in Ollama) and `reasoning_content` (as in llama-server).
"""

from __future__ import annotations

import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from moegguf.generate.request import Delta, PromptProgress, Timing, TokenLogprob
from moegguf.models.entry import ModelEntry
from moegguf.server.common.conversation import Conversation, Json, Reply
from moegguf.server.common.objects import MIN_LOGPROB, cut_object, moe_object
from moegguf.server.common.streams import event_line
from moegguf.server.openai.schema import ChatBody, GenerationBody
from moegguf.serving.events import Done, Event


def usage(timing: Timing) -> Json:
    """Token counts; those of the prompt include tokens cached from an earlier request."""
    prompt = timing.prompt_tokens + timing.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": timing.answer_tokens,
        "total_tokens": prompt + timing.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": timing.cached_tokens},
    }


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0


def timings(timing: Timing) -> Json:
    """llama-server's `timings`: token counts, times in milliseconds."""
    prompt_ms, predicted_ms = timing.prompt_s * 1e3, timing.answer_s * 1e3
    return {
        "cache_n": timing.cached_tokens,
        "prompt_n": timing.prompt_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _per(prompt_ms, timing.prompt_tokens),
        "prompt_per_second": _per(timing.prompt_tokens, timing.prompt_s),
        "predicted_n": timing.answer_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _per(predicted_ms, timing.answer_tokens),
        "predicted_per_second": _per(timing.answer_tokens, timing.answer_s),
    }


def statistics(timing: Timing) -> Json:
    """Additional keys of a complete reply."""
    return {"timings": timings(timing), "moe": moe_object(timing.stats), **cut_object(timing)}


def prompt_progress(progress: PromptProgress) -> Json:
    """llama-server's `prompt_progress`: tokens of the prompt, time in milliseconds."""
    return {
        "total": progress.n_tokens,
        "cache": progress.n_cached,
        "processed": progress.n_done,
        "time_ms": round(progress.seconds * 1e3),
    }


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> Json:
    """`logprobs` of chat."""
    return {
        "content": [
            {
                **_token_object(of.text, of.logprob),
                "top_logprobs": [_token_object(text, logprob) for text, logprob in of.top],
            }
            for of in logprobs
        ]
    }


def _token_object(text: str, logprob: float) -> Json:
    # A token with part of a character has no text, and its bytes are not available here.
    bytes_ = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": bytes_}


def total(timing: Timing, later: Timing) -> Timing:
    """The counts and times of two answers to one request."""
    names = "prompt_tokens cached_tokens disk_tokens answer_tokens prompt_s answer_s cut_messages cut_tokens".split()
    names += ["n_shifts", "stats"]
    return replace(later, **{name: getattr(timing, name) + getattr(later, name) for name in names})


class ChoicesReply(Reply):
    """The reply to one request, of one choice or more in turn; its objects share id and time."""

    prefix, whole_kind, chunk_kind = "", "", ""
    empty: Mapping[str, Any] = {}  # a choice of a chunk without content

    def __init__(self, body: GenerationBody, entry: ModelEntry, *, logprobs: bool, n_answers: int | None) -> None:
        """`n_answers`: of each prompt; its tokens count once."""
        self.n_answers = n_answers or 1
        self.n_choices = self.n_answers
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.logprobs = logprobs
        self._with_progress = bool(body.return_progress)
        self._started = False  # the current choice
        self._choices: list[Json] = []  # the complete ones of a whole reply
        self._index = 0  # of the current choice
        self._timing = Timing()  # of all complete choices
        self._used = Timing()  # the same, with each prompt counted once
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": entry.name,
            "system_fingerprint": f"moegguf-{entry.digest[:12]}",
        }

    @abstractmethod
    def _first(self) -> Json:
        """The chunk before all others of a choice."""

    @abstractmethod
    def _chunks(self, delta: Delta) -> list[Json]:
        """The chunks of a delta; none for an empty one."""

    def lines(self, event: Event) -> bytes:
        """Server-sent events without a name."""
        first = [] if self._started else [self._first()]  # before the last chunk of a choice ends it
        items: list[Json] = []
        if isinstance(event, Delta):
            items = self._chunks(event)
        elif isinstance(event, Done):
            items = self._last(event)
        elif isinstance(event, PromptProgress) and self._with_progress:
            items = [self._chunk(self.empty, prompt_progress=prompt_progress(event))]
        if not items:
            return b""
        self._started = not isinstance(event, Done)
        is_end = isinstance(event, Done) and self._index == self.n_choices
        return b"".join(map(event_line, [*first, *items])) + (b"data: [DONE]\n\n" if is_end else b"")

    def _finish(self, done: Done) -> str:
        """OpenAI's `finish_reason`, which has no "cancelled"."""
        return "tool_calls" if self.n_calls else "length" if done.timing.finish == "length" else "stop"

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _chunk(self, choice: Mapping[str, Any], **more: Any) -> Json:
        choices = [{"index": self._index, "finish_reason": None, "logprobs": None, **choice}]
        if self.include_usage:
            more = {"usage": None, **more}  # as OpenAI: null in all chunks except the last
        return self._object(self.chunk_kind, choices, **more)

    def _end_choice(self, done: Done) -> None:
        is_again = self._index % self.n_answers
        used = replace(done.timing, prompt_tokens=0, cached_tokens=0) if is_again else done.timing
        self._timing, self._used = total(self._timing, done.timing), total(self._used, used)
        self._index += 1
        self.n_calls = 0

    def _last(self, done: Done) -> list[Json]:
        """The chunk with `finish_reason`; with that of the last choice the statistics of all, and the one with `usage`
        if requested."""
        is_last = self._index == self.n_choices - 1
        figures = statistics(total(self._timing, done.timing)) if is_last else {}
        choice = {**self.empty, "finish_reason": self._finish(done)}
        chunks = [self._chunk(choice, **({} if self.include_usage else figures))]
        self._end_choice(done)
        if is_last and self.include_usage:
            chunks.append(self._object(self.chunk_kind, [], usage=usage(self._used), **figures))
        return chunks

    def _add(self, choice: Mapping[str, Any], done: Done) -> None:
        reason = {"finish_reason": self._finish(done)}
        self._choices.append({"index": self._index, "logprobs": None, **choice, **reason})
        self._end_choice(done)

    def whole(self) -> Json:
        """The object of a reply that is not streamed, after `add` of every choice."""
        return self._object(self.whole_kind, self._choices, usage=usage(self._used), **statistics(self._timing))


class _ChatReply(ChoicesReply):
    """A reply of /v1/chat/completions."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    empty: Mapping[str, Any] = {"delta": {}}

    def __init__(self, body: ChatBody, entry: ModelEntry) -> None:
        super().__init__(body, entry, logprobs=bool(body.logprobs), n_answers=body.n)

    def _first(self) -> Json:
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def _chunks(self, delta: Delta) -> list[Json]:
        """One chunk each for thinking, text and calls, in this order; log probabilities are in the first."""
        deltas: list[Json] = []
        if delta.thinking:
            deltas.append({"reasoning": delta.thinking, "reasoning_content": delta.thinking})
        if delta.text:
            deltas.append({"content": delta.text})
        if calls := self._calls(delta):
            deltas.append({"tool_calls": calls})
        if delta.logprobs and not deltas:
            deltas.append({})
        logprobs = [chat_logprobs(delta.logprobs)] if self.logprobs and delta.logprobs else []
        return [self._chunk({"delta": delta, "logprobs": logprobs.pop() if logprobs else None}) for delta in deltas]

    def _calls(self, delta: Delta) -> list[Json]:
        calls = []
        for index, call in self.numbered(delta.tool_calls):
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            calls.append({"index": index, "id": call.id, "type": "function", "function": function})
        return calls

    def add(self, delta: Delta, done: Done) -> None:
        calls = self._calls(delta)
        message: Json = {"role": "assistant", "content": None if calls and not delta.text else delta.text}
        if delta.thinking:
            message |= {"reasoning": delta.thinking, "reasoning_content": delta.thinking}
        if calls:
            message["tool_calls"] = calls
        self._add({"message": message, "logprobs": chat_logprobs(delta.logprobs) if self.logprobs else None}, done)


CHAT = Conversation(ChatBody, lambda body, entry, _: _ChatReply(body, entry))
routes = [CHAT.at("/v1/chat/completions")]
