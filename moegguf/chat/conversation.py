"""The data of one conversation: its model, its messages, its settings and Ollama's
options. This module neither runs a model nor prints anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moegguf.generate.images import with_images
from moegguf.generate.request import (
    REPEAT_LIMIT,
    Message,
    Request,
    Sampling,
    sampling_with,
)
from moegguf.models.details import parameters_of
from moegguf.options import LOAD_PARAMETERS

if TYPE_CHECKING:
    from moegguf.models.entry import NamedModel

Snapshot = tuple["NamedModel", list[Message], str]  # model, messages, pending text


@dataclass
class Conversation:
    """The messages and settings of a conversation. `parameters` (set in the chat) have
    priority over `initial_parameters` (from the command line), which have priority over
    the model's own parameters. `pending_text` is prepended to the text of the next user
    message."""

    entry: NamedModel
    initial_parameters: Mapping[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    format: str | Mapping[str, Any] | None = None
    think: bool | str | None = None
    hide_thinking: bool = False
    context_shift: bool = True
    word_wrap: bool = True
    verbose: bool = False
    pending_text: str = ""

    def __post_init__(self) -> None:
        self.switch_model(self.entry)

    def switch_model(self, entry: NamedModel) -> None:
        """Switches to another model, and replaces the messages with the ones in its
        Modelfile. Keeps the settings."""
        self.entry = entry
        self.messages = [dict(message) for message in entry.messages]

    def snapshot(self) -> Snapshot:
        """Returns the model, a copy of the messages, and the pending text, for
        `restore`."""
        return self.entry, list(self.messages), self.pending_text

    def restore(self, snapshot: Snapshot) -> None:
        """Restores the model, the messages and the pending text from `snapshot`."""
        self.entry, self.messages, self.pending_text = (
            snapshot[0],
            list(snapshot[1]),
            snapshot[2],
        )

    def clear(self) -> None:
        """Removes the messages of the chat, and the pending text. As in Ollama, the
        system message and the messages of the Modelfile are kept."""
        self.switch_model(self.entry)
        self.pending_text = ""

    @property
    def system_text(self) -> str:
        """The system message: the one set in the chat, otherwise the model's, or "" if
        there is none."""
        return self.system if self.system is not None else self.entry.system or ""

    def add_user_message(self, text: str, images: Sequence[bytes] = ()) -> None:
        """Appends a user message with the images, the pending text and `text`, in that
        order. Clears the pending text. Raises OptionError for an image that cannot be
        used."""
        content = f"{self.pending_text}\n\n{text}" if self.pending_text else text
        self.messages.append({"role": "user", "content": with_images(content, images)})
        self.pending_text = ""

    def user_parameters(self) -> dict[str, Any]:
        """Returns the parameters from the command line and the chat, keyed by their
        names in a Modelfile."""
        return {**self.initial_parameters, **self.parameters}

    def all_parameters(self) -> dict[str, Any]:
        """Returns all parameters in effect, including the model's, keyed by their names
        in a Modelfile."""
        return parameters_of(self.entry) | self.user_parameters()

    def request(self) -> Request:
        """Returns the request for the next answer."""
        system: list[Message] = (
            [{"role": "system", "content": self.system_text}]
            if self.system_text
            else []
        )
        return Request(
            messages=(*system, *self.messages),
            format=self.format,
            think=self.think,
            template=self.entry.template,
            shift=self.context_shift,
            repeat_limit=REPEAT_LIMIT,
            sampling=sampling_with(Sampling(), self.all_parameters()),
        )


def of_loading(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that take effect only when a model is loaded."""
    return {
        name: value for name, value in parameters.items() if name in LOAD_PARAMETERS
    }
