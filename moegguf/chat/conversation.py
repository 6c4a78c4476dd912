"""One conversation: with which model, what was said, and what was set. Plain data; computes and prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moegguf.chat.parameters import opening_with
from moegguf.generate.options import sampling_with
from moegguf.generate.request import GenerationRequest, Message, Sampling
from moegguf.terminal.loading import OpenOptions

if TYPE_CHECKING:
    from moegguf.generate.request import Timing
    from moegguf.models.entry import ModelEntry

CUT = "cut"  # in an answer that was stopped; not for the model


@dataclass
class Conversation:
    """`given` are parameters from the command line, `parameters` those set in the chat: these come first, then the
    command line's, then the model's own. `pending`: text that goes before the next message."""

    entry: ModelEntry
    base: OpenOptions = field(default_factory=OpenOptions)
    given: Mapping[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    format: str | Mapping[str, Any] | None = None
    think: bool | str | None = None
    hide_thinking: bool = False
    word_wrap: bool = True
    verbose: bool = False
    pending: str = ""
    last: Timing | None = None

    def __post_init__(self) -> None:
        self.begin(self.entry)

    def begin(self, entry: ModelEntry) -> None:
        """Talks with another model, from its own first messages on. What was set stays."""
        self.entry = entry
        self.messages = [dict(message) for message in entry.messages]
        self.last = None

    def saved(self) -> tuple[list[Message], str]:
        """What was said, for `restore`."""
        return list(self.messages), self.pending

    def restore(self, saved: tuple[list[Message], str]) -> None:
        """Takes back what was said since."""
        self.messages, self.pending = list(saved[0]), saved[1]

    def clear(self) -> None:
        """Forgets all messages; the system message stays."""
        self.messages = []
        self.pending = ""

    @property
    def system_text(self) -> str:
        return self.system if self.system is not None else self.entry.system or ""

    def say(self, text: str) -> None:
        """The person's next message, with what was read before it."""
        self.messages.append({"role": "user", "content": f"{self.pending}\n\n{text}" if self.pending else text})
        self.pending = ""

    def hear(self, text: str, thinking: str, *, cut: bool) -> None:
        """The model's answer. One that was cut is kept, and marked."""
        message: Message = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if cut:
            message[CUT] = True
        self.messages.append(message)

    def take_back_answer(self) -> bool:
        """Forgets the last answer, so that its question can be asked again; False when there is none."""
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def said(self) -> list[Message]:
        """The messages without our own marks."""
        return [{name: value for name, value in message.items() if name != CUT} for message in self.messages]

    def all_parameters(self) -> dict[str, Any]:
        return {**self.entry.parameters, **self.given, **self.parameters}

    def opening(self) -> OpenOptions:
        """How the model has to be open for the next answer."""
        return opening_with(self.base, self.all_parameters())

    def request(self) -> GenerationRequest:
        """The next request."""
        system: list[Message] = [{"role": "system", "content": self.system_text}] if self.system_text else []
        return GenerationRequest(
            messages=(*system, *self.said()),
            format=self.format,
            think=self.think,
            template=self.entry.template,
            sampling=sampling_with(Sampling(), self.all_parameters()),
        )
