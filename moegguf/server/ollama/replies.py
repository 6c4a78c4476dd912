"""Answers in the objects of /api/chat and /api/generate: a line for each piece, and the last one with the figures.

A line comes for every token, so its constant part is made once and only the text is encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from json import encoder
from typing import Any

from moegguf.generate.request import Delta, ToolCall
from moegguf.server.common.streams import dumps
from moegguf.server.ollama.words import call_object, figures, logprob_object, now_text
from moegguf.serving.events import Done, Event

quoted = encoder.encode_basestring


class Reply(ABC):
    """An answer of model `name`, to a request that came at `begun_ns` (perf_counter)."""

    def __init__(self, name: str, begun_ns: int) -> None:
        self._name = name
        self._begun_ns = begun_ns
        self._head = f'{{"model":{quoted(name)},"created_at":"'
        self._n_calls = 0
        self._pieces: list[Delta] = []

    @abstractmethod
    def said(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The part of an object that holds what the model said."""

    @abstractmethod
    def said_text(self, text: str) -> str:
        """`said` of a text alone, as JSON without its braces."""

    def ending(self, done: Done) -> dict[str, Any]:
        """What only the last object has, besides the figures."""
        return {"done": True, "done_reason": done.timing.finish}

    def line(self, event: Event) -> bytes:
        """The line for an event; empty for those that Ollama does not tell of."""
        if isinstance(event, Delta):
            return self._delta_line(event)
        if isinstance(event, Done):
            return self._line(self.said("", "", ()) | self.ending(event) | figures(event, self._begun_ns))
        return b""

    def _delta_line(self, delta: Delta) -> bytes:
        if delta.text and not (delta.thinking or delta.tool_calls or delta.logprobs):
            return f'{self._head}{now_text()}",{self.said_text(delta.text)},"done":false}}\n'.encode()
        if delta == Delta():
            return b""
        return self._line(self._said(delta) | {"done": False} | _logprobs(delta))

    def _line(self, rest: dict[str, Any]) -> bytes:
        return f'{self._head}{now_text()}",{dumps(rest)[1:]}\n'.encode()

    def keep(self, event: Event) -> None:
        """Remembers a piece for `whole`."""
        if isinstance(event, Delta):
            self._pieces.append(event)

    def whole(self, done: Done) -> dict[str, Any]:
        """All that was kept as one object, with the figures."""
        kept = self._pieces
        all_of_it = Delta(
            "".join(delta.text for delta in kept),
            "".join(delta.thinking for delta in kept),
            tuple(call for delta in kept for call in delta.tool_calls),
            tuple(logprob for delta in kept for logprob in delta.logprobs),
        )
        said = self._said(all_of_it) | _logprobs(all_of_it)
        return self._object(said | self.ending(done) | figures(done, self._begun_ns))

    def nothing(self, reason: str) -> dict[str, Any]:
        """The object that says that a model was loaded or let go."""
        return self._object(self.said("", "", ()) | {"done": True, "done_reason": reason})

    def _object(self, rest: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._name, "created_at": now_text(), **rest}

    def _said(self, delta: Delta) -> dict[str, Any]:
        return self.said(delta.text, delta.thinking, self._calls(delta.tool_calls))

    def _calls(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        first, self._n_calls = self._n_calls, self._n_calls + len(calls)
        return [call_object(call, first + i) for i, call in enumerate(calls)]


class ChatReply(Reply):
    """What /api/chat answers."""

    def said(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        return {"message": message | _present(thinking=thinking, tool_calls=list(calls))}

    def said_text(self, text: str) -> str:
        return f'"message":{{"role":"assistant","content":{quoted(text)}}}'


class GenerateReply(Reply):
    """What /api/generate answers. `tells_context`: the last object has the tokens to go on from."""

    def __init__(self, name: str, begun_ns: int, *, tells_context: bool = True) -> None:
        super().__init__(name, begun_ns)
        self._tells_context = tells_context

    def said(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text} | _present(thinking=thinking, tool_calls=list(calls))

    def said_text(self, text: str) -> str:
        return f'"response":{quoted(text)}'

    def ending(self, done: Done) -> dict[str, Any]:
        context = list(done.timing.context) if self._tells_context else []
        return super().ending(done) | _present(context=context)


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _logprobs(delta: Delta) -> dict[str, Any]:
    return _present(logprobs=[logprob_object(logprob) for logprob in delta.logprobs])
