"""One answer on the screen: what is waited for, the text as it comes, Ctrl-C in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moegguf.errors import MoeggufError
from moegguf.generate.answer import Answer, BackgroundAnswer
from moegguf.terminal.keyboard import stopping
from moegguf.terminal.messages import say
from moegguf.terminal.progress import prompt_words

if TYPE_CHECKING:
    from moegguf.chat.printer import Printer
    from moegguf.engine.llama import Llama
    from moegguf.generate.request import GenerationRequest, PromptProgress, Timing
    from moegguf.terminal.progress import Spinner


PATIENCE_S = 0.5  # for a model that stops: not worth a word


@dataclass(frozen=True)
class Reply:
    """How an answer went. `error`: what ended it, if something did."""

    timing: Timing
    interrupted: bool
    error: MoeggufError | None = None


def say_error(error: Exception) -> None:
    """One line about what went wrong; the chat goes on."""
    say(f"error: {' '.join(str(error).split())}")


def write_answer(
    llm: Llama, request: GenerationRequest, printer: Printer, spinner: Spinner, *, patience_s: float | None = None
) -> Reply:
    """Writes the answer to `ask`; Ctrl-C stops it, twice or after `patience_s` the process ends.

    Raises what makes a request impossible: ContextError, SchemaError, ... A fault in the midst of an answer is in the
    reply.
    """
    answer = Answer(llm, request)
    if left_out := answer.timing.cut_messages:
        say(f"prompt cut: {left_out} message{'s' * (left_out != 1)} left out")
    spinner.show("")

    def on_progress(now: PromptProgress) -> None:
        spinner.show(prompt_words(now.n_tokens, now.n_cached, now.n_done, now.seconds))

    def stop() -> None:
        if not background.cancel(PATIENCE_S):
            say("\nstopping after what is being computed; Ctrl + c again ends moegguf")

    background, error = BackgroundAnswer(answer, on_progress), None
    with stopping(stop, patience_s) as interrupts:
        try:
            for delta in background:
                spinner.close()
                printer.show(delta)
        except MoeggufError as fault:
            error = fault
        finally:
            spinner.close()
    return Reply(answer.timing, interrupts.count > 0, error)
