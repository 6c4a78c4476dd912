"""What a chat's commands act on: the loaded model, the conversation, and answers on the screen."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moegguf.chat.printer import Printer
from moegguf.chat.turn import print_error, shift_text, write_answer
from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.generate.options import LOAD_PARAMETERS
from moegguf.terminal.loading import LoadOptions, load
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import Spinner

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation, Snapshot
    from moegguf.chat.history import InputHistory
    from moegguf.engine.llama import Llama
    from moegguf.models.entry import ModelEntry


class ChatSession:
    """A conversation with one model at a time. `history`: of what was typed."""

    def __init__(self, llm: Llama, conversation: Conversation, history: InputHistory, load_s: float = 0.0) -> None:
        self.llm = llm
        self.conversation = conversation
        self.history = history
        self.activity_before: tuple[Any, Any] = (0, 0)  # (uses, loads) before the last answer
        self.counts_uses = False
        self._load_options = conversation.load_options()
        self._load_s = load_s  # shown with the first answer after a load

    def print_model_line(self) -> None:
        """Name, context size and number of expert slots."""
        facts = [f"context of {self.llm.n_ctx():,} tokens"]
        stats = self.llm.stats()
        if stats.n_experts:
            facts.append(f"slots for {stats.n_slots:,} of {stats.n_experts:,} experts")
        print_message(f"{self.conversation.entry.name}: {', '.join(facts)}")

    def answer(self, snapshot: Snapshot) -> None:
        """Answers the conversation's last message; restores `snapshot` when there was no text at all."""
        conversation = self.conversation
        printer = Printer(wrap=conversation.word_wrap, hide_thinking=conversation.hide_thinking)
        try:
            with Spinner() as spinner:
                self._reload_if_changed(spinner)
                self._record_activity()
                reply = write_answer(self.llm, conversation.request(), printer, spinner)
        except MoeggufError as error:
            conversation.restore(snapshot)
            print_error(error)
            return
        cut = reply.interrupted or reply.error is not None
        printer.end("\n" if cut else "\n\n")
        if reply.error is not None:
            print_error(reply.error)
        if shifted := shift_text(reply.timing):
            print_message(shifted)
        if printer.text or printer.thinking or not cut:
            conversation.add_answer(printer.text, printer.thinking, cut=cut)
        else:
            conversation.restore(snapshot)
        conversation.last_timing = reply.timing
        if conversation.verbose:
            self._print_statistics()
        self._load_s = 0.0

    def _print_statistics(self) -> None:
        from moegguf.terminal.statistics import statistics

        assert self.conversation.last_timing is not None
        lines = statistics(self.conversation.last_timing, self._load_s, self.llm.decisions())
        print_message("\n".join([*lines, ""]))

    def _record_activity(self) -> None:
        """Stores the experts' counts before an answer."""
        if self.llm.session is not None:
            if self.counts_uses:  # off before the first /experts: counting slows a fully resident pool
                self.llm.session.store.watch(True)
            self.activity_before = self.llm.session.store.activity()

    def _reload_if_changed(self, spinner: Spinner) -> None:
        """Loads the model again when a parameter asks for another context, cache or number of threads."""
        options = self.conversation.load_options()
        if options != self._load_options:
            self._reload(self.conversation.entry, options, spinner)

    def load_model(self, name: str) -> None:
        """Switches to another model; keeps the present one when that cannot be found or loaded."""
        from moegguf.models.catalog import Catalog

        try:
            entry = Catalog().find(name)
        except ModelNotFoundError:
            print_message(f"Couldn't find model '{name}'")
            return
        print_message(f"Loading model '{name}'")
        old_entry, old_messages = self.conversation.entry, self.conversation.messages
        self.conversation.switch_model(entry)
        try:
            with Spinner() as spinner:
                self._reload(entry, self.conversation.load_options(), spinner, old_entry)
        except BaseException:
            self.conversation.entry, self.conversation.messages = old_entry, old_messages
            raise
        self.print_model_line()

    def _reload(
        self, entry: ModelEntry, options: LoadOptions, spinner: Spinner, fallback: ModelEntry | None = None
    ) -> None:
        """Closes the model first, since memory may not hold two; loads the old one again when `entry` fails."""
        self.llm.close()
        try:
            self.llm, self._load_s = load(entry.path, options, spinner)
            self._load_options = options
        except BaseException:
            self.conversation.parameters = {
                name: value for name, value in self.conversation.parameters.items() if name not in LOAD_PARAMETERS
            }
            self.llm, self._load_s = load((fallback or entry).path, self._load_options, spinner)
            raise
        finally:
            self.activity_before = (0, 0)

    def check_thinking(self) -> bool:
        """Whether the model supports thinking; prints a warning when not."""
        from moegguf.models.details import details

        with suppress(MoeggufError):
            if "thinking" not in details(self.conversation.entry).capabilities:
                name = self.conversation.entry.name
                print_message(f"warning: model '{name}' does not support thinking output")
                return False
        return True
