"""Prints one answer: progress while the prompt is read, then the text; Ctrl-C cancels it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moegguf.errors import MoeggufError
from moegguf.generate.answer import Answer, AnyAnswer, BackgroundAnswer
from moegguf.terminal.keyboard import cancel_on_interrupt
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import prompt_text

if TYPE_CHECKING:
    from moegguf.chat.printer import Printer
    from moegguf.engine.llama import Llama
    from moegguf.generate.request import GenerationRequest, PromptProgress, Timing
    from moegguf.terminal.progress import Spinner


CANCEL_TIMEOUT_S = 0.5  # a cancellation that takes longer is explained


@dataclass(frozen=True)
class Reply:
    """The outcome of an answer. `error`: what ended it early, or None."""

    timing: Timing
    interrupted: bool
    error: MoeggufError | None = None


def print_error(error: Exception) -> None:
    """One line on stderr."""
    print_message(f"error: {' '.join(str(error).split())}")


def write_answer(
    llm: Llama, request: GenerationRequest, printer: Printer, spinner: Spinner, *, exit_timeout_s: float | None = None
) -> Reply:
    """Prints the answer of a model to `request`, as `print_answer` does.

    Raises what makes a request impossible: ContextError, SchemaError, ... An error during the answer is in the reply.
    """
    return print_answer(Answer(llm, request), printer, spinner, exit_timeout_s=exit_timeout_s)


def print_answer(
    answer: AnyAnswer, printer: Printer, spinner: Spinner, *, exit_timeout_s: float | None = None
) -> Reply:
    """Prints an answer. Ctrl-C cancels it; a second one, or `exit_timeout_s` seconds, end the process."""
    if n_cut := answer.timing.cut_messages:
        print_message(f"prompt cut: {n_cut} message{'s' * (n_cut != 1)} left out")
    spinner.show("")

    def on_progress(now: PromptProgress) -> None:
        spinner.show(prompt_text(now.n_tokens, now.n_cached, now.n_done, now.seconds))

    def cancel() -> None:
        if not background.cancel(CANCEL_TIMEOUT_S):
            print_message("\nstopping after the current pass; Ctrl + c again ends moegguf")

    background, error = BackgroundAnswer(answer, on_progress), None
    with cancel_on_interrupt(cancel, exit_timeout_s) as interrupts:
        try:
            for delta in background:
                spinner.close()
                printer.show(delta)
        except MoeggufError as fault:
            error = fault
        finally:
            spinner.close()
    return Reply(answer.timing, interrupts.count > 0, error)
