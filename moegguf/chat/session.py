"""What a chat's commands act on: the model, the conversation, and answers on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moegguf.chat.image_files import begins_with_image, extract_images
from moegguf.chat.printer import Printer
from moegguf.chat.turn import print_answer, print_error
from moegguf.errors import ModelNotFoundError, MoeggufError
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import Spinner

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation, Snapshot
    from moegguf.chat.history import InputHistory
    from moegguf.chat.model import ChatModel


class ChatSession:
    """A conversation with one model at a time. `history`: of what was typed."""

    def __init__(self, model: ChatModel, conversation: Conversation, history: InputHistory) -> None:
        self.model = model
        self.conversation = conversation
        self.history = history

    def print_model_line(self) -> None:
        """The model's name, and its context size, experts, ..."""
        print_message(f"{self.conversation.entry.name}: {', '.join(self.model.facts())}")

    def answer(self, snapshot: Snapshot) -> None:
        """Answers the conversation's last message; restores `snapshot` when there was no text at all."""
        conversation = self.conversation
        printer = Printer(wrap=conversation.word_wrap, hide_thinking=conversation.hide_thinking)
        try:
            with Spinner() as spinner:
                self.model.prepare(conversation, spinner)
                reply = print_answer(self.model.answer(conversation), printer, spinner)
        except MoeggufError as error:
            conversation.restore(snapshot)
            print_error(error)
            return
        cut = reply.interrupted or reply.error is not None
        printer.end("\n" if cut else "\n\n")
        if reply.error is not None:
            print_error(reply.error)
        for note in reply.notes:
            print_message(note)
        if printer.text or printer.thinking or not cut:
            conversation.add_answer(printer.text, printer.thinking, cut=cut)
        else:
            conversation.restore(snapshot)
        conversation.last_timing = reply.timing
        if conversation.verbose:
            print_message("\n".join([*self.model.statistics(reply.timing, with_load=True), ""]))

    def with_images(self, text: str) -> tuple[str, list[bytes]]:
        """A message's text and the images whose paths were in it. Raises OptionError."""
        return extract_images(text) if self.model.reads_images else (text, [])

    def is_image(self, text: str) -> bool:
        """Whether a message that begins with / begins with the path of an image, not with a command."""
        return self.model.reads_images and begins_with_image(text)

    def load_model(self, name: str) -> None:
        """Switches to another model; keeps the present one when that cannot be found or loaded."""
        try:
            entry = self.model.find(name)
        except ModelNotFoundError:
            print_message(f"Couldn't find model '{name}'")
            return
        print_message(f"Loading model '{name}'")
        old_entry, old_messages = self.conversation.entry, self.conversation.messages
        self.conversation.switch_model(entry)
        try:
            with Spinner() as spinner:
                self.model.load(self.conversation, spinner)
        except BaseException:  # also an interrupt
            self.conversation.entry, self.conversation.messages = old_entry, old_messages
            raise
        self.print_model_line()

    def check_thinking(self) -> bool:
        """Whether the model supports thinking; prints a warning when not."""
        if self.model.thinks():
            return True
        print_message(f"warning: model '{self.conversation.entry.name}' does not support thinking output")
        return False
