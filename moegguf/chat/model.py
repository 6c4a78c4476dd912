"""The one client of a model that answers, for `run` and the chat: what it loads, asks and tells is the same wherever
the model is, in a worker of this program's own (own_worker.py) or in a running server (running_server.py)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moegguf.errors import MoeggufError
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.chat.answers import Answer
    from moegguf.chat.conversation import Conversation
    from moegguf.chat.own_worker import OwnWorker
    from moegguf.chat.running_server import RunningServer
    from moegguf.generate.request import Timing
    from moegguf.models.entry import NamedModel
    from moegguf.terminal.progress import Spinner

BUSY = 503  # a server's status


class ChatModel:
    """A model behind a connection, which `load` exchanges; it answers one conversation at a time. Methods raise
    MoeggufError."""

    def __init__(self, connection: OwnWorker | RunningServer) -> None:
        self.connection = connection
        self._loaded: Mapping[str, Any] | None = None  # the options that it was loaded with by `load`
        self._load_s = 0.0  # of that, since the last answer
        self._counts_uses = False
        self._answer: Answer

    def load(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the conversation's model; where that fails, the parameters of loading that were set in the chat go."""
        start_s, options = time.perf_counter(), self.connection.options(conversation)
        try:
            self.connection.load(conversation.entry, options, spinner)
        except BaseException as error:  # also an interrupt: the chat goes on with the model before
            if getattr(error, "status", None) != BUSY:  # nothing is wrong with them then
                conversation.reset_load_parameters()
            raise
        self._loaded, self._load_s = options, time.perf_counter() - start_s

    def prepare(self, conversation: Conversation, spinner: Spinner) -> None:
        """Loads the model again when a parameter asks for another context, cache or number of threads, and when its
        process has ended."""
        if self.connection.ended or self.connection.options(conversation) != self._loaded:
            self.load(conversation, spinner)

    def answer(self, conversation: Conversation) -> Answer:
        """The answer to the last message; its `load_s` and `decisions` are those of the model."""
        self._answer = self.connection.answer(conversation)
        self._answer.load_s, self._load_s = self._load_s, 0.0
        return self._answer

    def with_context(self, entry: NamedModel, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """`parameters` with the model's own context length for `--ctx 0`."""
        own = {"num_ctx": self.connection.details(entry).n_ctx_train} if parameters.get("num_ctx") == 0 else {}
        return {**parameters, **own}

    def thinks(self, entry: NamedModel) -> bool:
        """Whether a model supports thinking; one whose header cannot be read may."""
        with suppress(MoeggufError):
            return "thinking" in self.connection.details(entry).capabilities
        return True

    def facts(self) -> list[str]:
        """Context size, whether it reads images, the number of expert slots, and which server has it."""
        n_ctx, stats, url = self.connection.n_ctx, self.connection.stats, self.connection.url
        facts = [f"context of {n_ctx:,} tokens"] if n_ctx else []
        if self.connection.reads_images:
            facts.append("reads images")
        if stats and stats.n_experts:
            first, n_ram = stats.tiers[0].n_slots, sum(tier.n_slots for tier in stats.tiers[1:])
            where = " in VRAM" * stats.in_vram + f", {n_ram:,} in RAM" * (n_ram > 0)
            facts.append(f"slots for {first:,} of {stats.n_experts:,} experts{where}")
        return [*facts, f"in the server at {url}"] if url else facts

    def statistics(self, timing: Timing, *, with_load: bool) -> list[str]:
        """Lines about the last answer, and about a load before it."""
        from moegguf.terminal.statistics import LABEL_WIDTH, statistics

        load_s, url = self._answer.load_s if with_load else 0.0, self.connection.url
        lines = statistics(timing, load_s, self._answer.decisions, self.connection.placement)
        return [*lines, f"{'answered by:':<{LABEL_WIDTH}}{url}"] if url else lines

    def totals(self) -> list[str]:
        """Lines about all answers since the load, where they are this program's."""
        from moegguf.terminal.statistics import total_lines

        return total_lines(self.connection.stats) if self.connection.stats else []

    def print_experts(self) -> None:
        """A map of the experts: which are in memory, and which were used and loaded of late."""
        from moegguf.terminal.heatmap import print_map

        found, url = self.connection.experts(), self.connection.url
        if found is None or not found.layers:
            there = "The server has no experts of this model in memory."
            print_message(there if url else "This model has no experts.")
            return
        print_map(found.model, (found.state, found.uses, found.loads), found.layers, found.n_expert, found.stats)
        if url:
            print_message(f"It is in the server at {url}; `moegguf top` shows its experts live.")
        elif not self._counts_uses and not any(found.uses):
            print_message("Uses are counted from the next answer on.")
        self._counts_uses = True
