"""The chat: reads a message, obeys it or answers it, until the person leaves."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moegguf.chat.commands import completions, obey
from moegguf.chat.history import InputHistory, history_path
from moegguf.chat.parameters import OPENING
from moegguf.chat.printer import Printer
from moegguf.chat.reading import Reader, is_quoted, unquoted
from moegguf.chat.turn import say_error, write_answer
from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.settings import read_settings
from moegguf.terminal.keyboard import quiet_keyboard
from moegguf.terminal.loading import OpenOptions, load
from moegguf.terminal.messages import say
from moegguf.terminal.progress import Spinner

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.engine.llama import Llama
    from moegguf.generate.request import Message
    from moegguf.models.entry import ModelEntry


Saved = tuple[list["Message"], str]


class Chat:
    """One conversation at a terminal, with one model at a time, which it closes at the end."""

    def __init__(self, llm: Llama, conversation: Conversation, load_s: float = 0.0) -> None:
        self.llm = llm
        self.conversation = conversation
        self.reader = Reader(InputHistory(history_path(), on=read_settings().history), completions())
        self.activity_before: tuple[Any, Any] = (0, 0)
        self.watching = False
        self._opened = conversation.opening()
        self._load_s = load_s  # told with the first answer after a load

    def talk(self) -> int:
        """Until the person leaves. Returns the exit code."""
        if self.conversation.think and not self.thinks():
            self.conversation.think = None
        self._introduce()
        try:
            with quiet_keyboard():
                while True:
                    self._next()
        except EOFError:
            return 0
        finally:
            self.llm.close()

    def _introduce(self) -> None:
        """What the model has to work with: its context, and how many of its experts are in memory."""
        facts = [f"context of {self.llm.n_ctx():,} tokens"]
        stats = self.llm.stats()
        if stats.n_experts:
            facts.append(f"room for {stats.n_slots:,} of {stats.n_experts:,} experts")
        say(f"{self.conversation.entry.name}: {', '.join(facts)}")

    def _next(self) -> None:
        try:
            typed = self.reader.read()
        except KeyboardInterrupt:
            if not self.reader.left:
                say("\nUse Ctrl + d or /bye to exit.")
            return
        text = unquoted(typed)
        if not text.strip():
            return
        saved = self.conversation.saved()
        try:
            if text.lstrip().startswith("/") and not is_quoted(typed):
                obey(self, typed.strip())
            else:
                self.conversation.say(text)
                self.answer(saved)
        except KeyboardInterrupt:  # while neither the prompt nor an answer was there to take it
            self.conversation.restore(saved)
            say("")
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # a mistake of ours must not cost the conversation
            if os.environ.get("MOEGGUF_DEBUG", "") not in ("", "0"):
                raise
            self.conversation.restore(saved)
            say(f"error: unexpected {type(error).__name__}: {' '.join(str(error).split())}")

    def answer(self, saved: Saved) -> None:
        """Answers the conversation's last message; without a word of an answer, the conversation is as `saved`."""
        conversation = self.conversation
        printer = Printer(wrap=conversation.word_wrap, hide_thinking=conversation.hide_thinking)
        try:
            with Spinner() as spinner:
                self._open_as_set(spinner)
                self._note_activity()
                reply = write_answer(self.llm, conversation.request(), printer, spinner)
        except MoeggufError as error:
            conversation.restore(saved)
            say_error(error)
            return
        cut = reply.interrupted or reply.error is not None
        printer.end("\n" if cut else "\n\n")
        if reply.error is not None:
            say_error(reply.error)
        if printer.text or printer.thinking or not cut:
            conversation.hear(printer.text, printer.thinking, cut=cut)
        else:
            conversation.restore(saved)
        conversation.last = reply.timing
        if conversation.verbose:
            self._say_statistics()
        self._load_s = 0.0

    def _say_statistics(self) -> None:
        from moegguf.terminal.statistics import statistics

        assert self.conversation.last is not None
        say("\n".join([*statistics(self.conversation.last, self._load_s, self.llm.decisions()), ""]))

    def _note_activity(self) -> None:
        """Where the experts' counts stand before an answer."""
        if self.llm.session is not None:
            if self.watching:  # not before someone looks: it costs a fully resident pool some of its speed
                self.llm.session.store.watch(True)
            self.activity_before = self.llm.session.store.activity()

    def _open_as_set(self, spinner: Spinner) -> None:
        """Opens the model again when a parameter asks for another context, cache or number of threads."""
        wanted = self.conversation.opening()
        if wanted != self._opened:
            self._reopen(self.conversation.entry, wanted, spinner)

    def load_model(self, name: str) -> None:
        """Talks with another model from now on; when it cannot be found or opened, with the same as before."""
        from moegguf.models.catalog import Catalog

        try:
            entry = Catalog().find(name)
        except ModelNotFoundError:
            say(f"Couldn't find model '{name}'")
            return
        say(f"Loading model '{name}'")
        before, said = self.conversation.entry, self.conversation.messages
        self.conversation.begin(entry)
        try:
            with Spinner() as spinner:
                self._reopen(entry, self.conversation.opening(), spinner, before)
        except BaseException:
            self.conversation.entry, self.conversation.messages = before, said
            raise
        self._introduce()

    def _reopen(
        self, entry: ModelEntry, options: OpenOptions, spinner: Spinner, before: ModelEntry | None = None
    ) -> None:
        """Closes the model first, because memory may not hold two; what cannot be opened leaves the old one open."""
        self.llm.close()
        try:
            self.llm, self._load_s = load(entry.path, options, spinner)
            self._opened = options
        except BaseException:
            self.conversation.parameters = {
                name: value for name, value in self.conversation.parameters.items() if name not in OPENING
            }
            self.llm, self._load_s = load((before or entry).path, self._opened, spinner)
            raise
        finally:
            self.activity_before = (0, 0)

    def thinks(self) -> bool:
        """Whether the model can think; says so when it cannot."""
        from moegguf.models.details import details

        with suppress(MoeggufError):
            if "thinking" not in details(self.conversation.entry).capabilities:
                say(f"warning: model '{self.conversation.entry.name}' does not support thinking output")
                return False
        return True
