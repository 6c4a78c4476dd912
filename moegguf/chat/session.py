"""An answer on the screen, which Ctrl-C cancels, and images in messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moegguf.chat.printer import Printer
from moegguf.errors import MoeggufError, OptionError
from moegguf.generate.images import MAX_IMAGE_BYTES, read_image
from moegguf.terminal.keyboard import cancel_on_interrupt
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import Spinner, prompt_text

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.chat.model import ChatModel
    from moegguf.generate.request import PromptProgress, Timing

CANCEL_TIMEOUT_S = 0.5  # a cancellation that takes longer is explained

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
        name, path = _file(match)
        if path is None:
            return match[0]
        try:
            with path.open("rb") as file:
                images.append(file.read(MAX_IMAGE_BYTES + 1))
            read_image(images[-1])
        except OSError as error:
            raise OptionError(f"the image '{path}' cannot be read ({error}); check the file.") from None
        except OptionError as error:
            raise OptionError(f"'{path}': {error}") from None
        print_message(f"Added image '{name}'")
        return ""

    rest = _PATH.sub(replaced, text)
    return (rest.strip() if images else text), images


def begins_with_image(text: str) -> bool:
    """Whether the first word is the path of a file that ends like an image."""
    match = _PATH.match(text.lstrip())
    return match is not None and _file(match)[1] is not None


def _file(match: re.Match[str]) -> tuple[str, Path | None]:
    """The path as it was meant, and the file there, if there is one."""
    name = match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])
    path = Path(name).expanduser()
    try:
        return name, path if path.is_file() else None
    except (OSError, ValueError):
        return name, None


@dataclass(frozen=True)
class Reply:
    """The outcome of an answer. `error`: what ended it early, or None."""

    text: str
    thinking: str
    timing: Timing
    interrupted: bool
    error: MoeggufError | None = None


def print_answer(
    model: ChatModel, conversation: Conversation, spinner: Spinner, end: str = "\n", exit_timeout_s: float | None = None
) -> Reply:
    """Prints the answer to the last message, `end` after it, and below it what was left out of the context. Ctrl-C
    cancels it; a second one, or `exit_timeout_s` seconds, end the process."""
    spinner.show("")
    printer = Printer(wrap=conversation.word_wrap, hide_thinking=conversation.hide_thinking)
    answer, error = model.answer(conversation), None

    def on_progress(now: PromptProgress) -> None:
        spinner.show(prompt_text(now.n_tokens, now.n_cached, now.n_done, now.seconds))

    def cancel() -> None:
        if not answer.cancel(CANCEL_TIMEOUT_S):
            print_message("\nstopping after the current pass; Ctrl + c again ends moegguf")

    with cancel_on_interrupt(cancel, exit_timeout_s) as interrupted:
        try:
            for delta in answer.deltas(on_progress):
                spinner.close()
                printer.show(delta)
        except MoeggufError as fault:
            error = fault
        finally:
            spinner.close()
    timing = answer.timing
    if error is None or printer.text or printer.thinking:
        printer.end("\n" if error or interrupted.is_set() else end)
        counts = ((timing.cut_messages, "message"), (timing.cut_tokens, "token"))
        if parts := [f"{n:,} {word}{'s' * (n != 1)}" for n, word in counts if n]:
            print_message(f"prompt cut: {', '.join(parts)} left out")
        if n := timing.n_shifts:
            times = "" if n == 1 else f" {n} times"
            print_message(f"the context was full{times}: the model no longer knows the older half")
    return Reply(printer.text, printer.thinking, timing, interrupted.is_set(), error)
