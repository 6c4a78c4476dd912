"""The model of a conversation, for `run` and the chat.

`ChatModel` has one interface for a model in this program (`local.py`) and for a model
in a running server (`served.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moegguf.chat.conversation import of_loading
from moegguf.errors import MoeggufError
from moegguf.generate.request import AnswerSummary, Delta, Event
from moegguf.options import LOAD_PARAMETERS
from moegguf.quantities import format_bytes
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.chat.local import LocalModel
    from moegguf.chat.served import ServedModel

BUSY = 503  # HTTP status of a server that has no room for the model


@dataclass
class Answer:
    """One answer, with the text received so far."""

    load_s: float  # seconds spent on loading the model before the answer
    summary: AnswerSummary = field(
        default_factory=lambda: AnswerSummary(finish="cancelled")
    )
    text: str = ""
    thinking: str = ""
    error: MoeggufError | None = None  # the error that ended the answer early
    is_interrupted: bool = False

    def add(self, event: Event) -> None:
        """Adds an event's text or summary to the answer."""
        if isinstance(event, Delta):
            self.text += event.text
            self.thinking += event.thinking
        elif isinstance(event, AnswerSummary):
            self.summary = event
            self.load_s += event.load_s


class ChatModel:
    """A model that answers one conversation at a time, in this program or in a server.
    Methods may raise MoeggufError."""

    def __init__(self, connection: LocalModel | ServedModel) -> None:
        self.connection = connection
        self.spinner = connection.spinner
        self._last: Answer | None = None  # None: no answer since the last load
        # Loading parameters of the last load that succeeded, if any.
        self._loaded: Mapping[str, Any] | None = None
        # Seconds that the last load took; 0 once an answer has begun.
        self._load_s = 0.0

    def load(self, conversation: Conversation) -> None:
        """Loads the conversation's model. If the load fails, removes the loading
        parameters that were set in the chat, unless the server was only busy."""
        start_s = time.perf_counter()
        try:
            self.connection.load(conversation)
        except BaseException as error:
            # Also on an interrupt: the chat continues with the previous model.
            # If the server is busy, the parameters may be valid.
            if getattr(error, "status", None) != BUSY:
                kept = conversation.parameters.items()
                conversation.parameters = {
                    name: value for name, value in kept if name not in LOAD_PARAMETERS
                }
            raise
        self._loaded = of_loading(self.connection.parameters(conversation))
        self._load_s = time.perf_counter() - start_s
        self._last = None

    def prepare(self, conversation: Conversation) -> None:
        """Loads the model if it is not loaded, or reloads it if a loading parameter has
        changed."""
        if (
            self.connection.must_load
            or of_loading(self.connection.parameters(conversation)) != self._loaded
        ):
            self.load(conversation)

    def begin_answer(self) -> Answer:
        """Returns a new, empty answer. From then on, `statistics` describes this
        answer."""
        self._last = Answer(self._load_s)
        self._load_s = 0.0
        return self._last

    def print_line(self, conversation: Conversation) -> None:
        """Prints one line with the model's name and `facts`."""
        print_message(f"{conversation.entry.name}: {', '.join(self.facts())}")

    def facts(self) -> list[str]:
        """Returns short phrases about the model: its memory, context length, number of
        expert slots, and the server's address. Omits unknown facts."""
        n_ctx, url = self.connection.n_ctx, self.connection.url
        loaded = self.connection.loaded
        stats = loaded.stats if loaded else None
        size_bytes = self.connection.size_bytes
        facts = [f"takes {format_bytes(size_bytes)}"] if size_bytes else []
        if n_ctx:
            facts.append(f"context of {n_ctx:,} tokens")
        if self.connection.reads_images:
            facts.append("reads images")
        if stats and stats.n_experts:
            first, n_ram = (
                stats.tiers[0].n_slots,
                sum(tier.n_slots for tier in stats.tiers[1:]),
            )
            where = " in VRAM" * stats.in_vram + f", {n_ram:,} in RAM" * (n_ram > 0)
            facts.append(f"slots for {first:,} of {stats.n_experts:,} experts{where}")
        return [*facts, f"in the server at {url}"] if url else facts

    def statistics(self, *, with_load: bool) -> list[str]:
        """Returns lines about the last answer, or [] if there has been no answer since
        the model was loaded. `with_load`: True to include the time of a load that
        preceded the answer."""
        from moegguf.terminal.statistics import LABEL_WIDTH, statistics

        if (answer := self._last) is None:
            return []
        load_s = answer.load_s if with_load else 0.0
        lines = statistics(answer.summary, load_s, self.connection.placement)
        url = self.connection.url
        return [*lines, f"{'answered by:':<{LABEL_WIDTH}}{url}"] if url else lines

    def print_experts(self) -> None:
        """Prints a map of the experts: which are in memory, and which were used and
        loaded recently. Prints a message instead if the model is not loaded or has no
        expert store."""
        from moegguf.chat.experts import print_map

        found = self.connection.experts()
        if found is None or not found.layers:
            print_message(
                "The model is not loaded."
                if found is None
                else "This model has no experts."
            )
            return
        print_map(found)
        if url := self.connection.url:
            print_message(
                f"It is in the server at {url}. The map shows where experts are; `moegguf top` also shows which experts"
                " answers use."
            )
        elif not any(found.uses):
            print_message(
                "No use of an expert is counted yet. Uses are counted from now on: ask again after the next answer."
            )
