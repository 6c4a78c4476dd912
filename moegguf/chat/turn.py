"""Prints one answer: progress while the prompt is read, then the text; Ctrl-C cancels it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moegguf.errors import MoeggufError
from moegguf.terminal.keyboard import cancel_on_interrupt
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import prompt_text

if TYPE_CHECKING:
    from moegguf.chat.answer import RemoteAnswer
    from moegguf.chat.printer import Printer
    from moegguf.generate.request import PromptProgress, Timing
    from moegguf.terminal.progress import Spinner


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


def cut_text(timing: Timing) -> str:
    """What of the prompt was left out to fit the context; "" for nothing."""
    counts = ((timing.cut_messages, "message"), (timing.cut_tokens, "token"))
    parts = [f"{n:,} {word}{'s' * (n != 1)}" for n, word in counts if n]
    return f"prompt cut: {', '.join(parts)} left out" if parts else ""


def shift_text(timing: Timing) -> str:
    """That a full context lost its older half; "" when none did."""
    n = timing.n_shifts
    times = "" if n == 1 else f" {n} times"
    return f"the context was full{times}: the model no longer knows the older half" if n else ""


def print_answer(
    answer: RemoteAnswer, printer: Printer, spinner: Spinner, *, exit_timeout_s: float | None = None
) -> Reply:
    """Prints an answer. Ctrl-C cancels it; a second one, or `exit_timeout_s` seconds, end the process."""
    spinner.show("")

    def on_progress(now: PromptProgress) -> None:
        spinner.show(prompt_text(now.n_tokens, now.n_cached, now.n_done, now.seconds))

    def cancel() -> None:
        if not answer.cancel(CANCEL_TIMEOUT_S):
            print_message("\nstopping after the current pass; Ctrl + c again ends moegguf")

    error = None
    with cancel_on_interrupt(cancel, exit_timeout_s) as interrupts:
        try:
            for delta in answer.deltas(on_progress):
                spinner.close()
                printer.show(delta)
        except MoeggufError as fault:
            error = fault
        finally:
            spinner.close()
    notes = tuple(filter(None, (cut_text(answer.timing), shift_text(answer.timing))))
    return Reply(answer.timing, interrupts.count > 0, notes, error)
