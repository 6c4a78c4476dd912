"""What a chat's commands act on: the model, the conversation, images in messages, and answers on the screen, which
Ctrl-C cancels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moegguf.chat.printer import Printer
from moegguf.errors import ModelNotFoundError, MoeggufError, OptionError
from moegguf.generate.images import MAX_IMAGE_BYTES, read_image
from moegguf.terminal.keyboard import cancel_on_interrupt
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import Spinner, prompt_text

if TYPE_CHECKING:
    from moegguf.chat.answers import Answer
    from moegguf.chat.conversation import Conversation, Snapshot
    from moegguf.chat.model import ChatModel
    from moegguf.chat.reader import InputHistory
    from moegguf.generate.request import PromptProgress, Timing

_EXTENSION = r"\.(?:png|jpe?g|gif|webp|bmp)"
_START = r"(?:~|\.{1,2})?/"
_PATH = re.compile(
    rf"""(?P<quote>["'])(?P<quoted>{_START}[^"'\n]*?{_EXTENSION})(?P=quote)"""
    rf"|(?<!\S)(?P<bare>{_START}(?:\\.|[^\s\\])*?{_EXTENSION})(?![\w/])",
    re.IGNORECASE,
)


def extract_images(text: str) -> tuple[str, list[bytes]]:
    """`text` without the paths of images, as `ollama run` finds them (typed, or dragged onto the terminal), and these
    files, each named on stderr. A path begins with /, ./, ../ or ~/ and ends with a known extension; spaces in it are
    escaped, or it is in quotes. What names no file stays text.

    Raises OptionError for a file that cannot be read, or is no image that can be used.
    """
    images: list[bytes] = []

    def replaced(match: re.Match[str]) -> str:
        name = _name(match)
        data = _read(Path(name).expanduser())
        if data is None:
            return match[0]
        images.append(data)
        print_message(f"Added image '{name}'")
        return ""

    rest = _PATH.sub(replaced, text)
    return (rest.strip() if images else text), images


def begins_with_image(text: str) -> bool:
    """Whether the first word is the path of a file that ends like an image."""
    match = _PATH.match(text.lstrip())
    return match is not None and _is_file(Path(_name(match)).expanduser())


def _name(match: re.Match[str]) -> str:
    return match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _read(path: Path) -> bytes | None:
    """The file's bytes; None when there is no such file."""
    if not _is_file(path):
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise OptionError(f"the image '{path}' cannot be read ({error}); check the file.") from None
    try:
        read_image(data)
    except OptionError as error:
        raise OptionError(f"'{path}': {error}") from None
    return data


CANCEL_TIMEOUT_S = 0.5  # a cancellation that takes longer is explained


@dataclass(frozen=True)
class Reply:
    """The outcome of an answer. `notes`: what is to be told below it; `error`: what ended it early, or None."""

    timing: Timing
    interrupted: bool
    notes: tuple[str, ...] = ()
    error: MoeggufError | None = None


def print_error(error: Exception) -> None:
    """One line on stderr."""
    print_message(f"error: {' '.join(str(error).split())}")


def _notes(timing: Timing) -> Iterator[str]:
    """What of the prompt was left out to fit the context, and that a full context lost its older half."""
    counts = ((timing.cut_messages, "message"), (timing.cut_tokens, "token"))
    if parts := [f"{n:,} {word}{'s' * (n != 1)}" for n, word in counts if n]:
        yield f"prompt cut: {', '.join(parts)} left out"
    if n := timing.n_shifts:
        times = "" if n == 1 else f" {n} times"
        yield f"the context was full{times}: the model no longer knows the older half"


def print_answer(answer: Answer, printer: Printer, spinner: Spinner, *, exit_timeout_s: float | None = None) -> Reply:
    """Prints an answer. Ctrl-C cancels it; a second one, or `exit_timeout_s` seconds, end the process."""
    spinner.show("")

    def on_progress(now: PromptProgress) -> None:
        spinner.show(prompt_text(now.n_tokens, now.n_cached, now.n_done, now.seconds))

    def cancel() -> None:
        if not answer.cancel(CANCEL_TIMEOUT_S):
            print_message("\nstopping after the current pass; Ctrl + c again ends moegguf")

    error = None
    with cancel_on_interrupt(cancel, exit_timeout_s) as interrupted:
        try:
            for delta in answer.deltas(on_progress):
                spinner.close()
                printer.show(delta)
        except MoeggufError as fault:
            error = fault
        finally:
            spinner.close()
    return Reply(answer.timing, interrupted.is_set(), tuple(_notes(answer.timing)), error)


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
        return extract_images(text) if self.model.connection.reads_images else (text, [])

    def is_image(self, text: str) -> bool:
        """Whether a message that begins with / begins with the path of an image, not with a command."""
        return self.model.connection.reads_images and begins_with_image(text)

    def load_model(self, name: str) -> None:
        """Switches to another model; keeps the present one when that cannot be found or loaded."""
        try:
            entry = self.model.connection.names.find(name)
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
        if self.model.thinks(self.conversation.entry):
            return True
        print_message(f"warning: model '{self.conversation.entry.name}' does not support thinking output")
        return False
