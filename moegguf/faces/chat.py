"""A small chat in the terminal: turns, a few commands, Ctrl-C stops the answer, Ctrl-D leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from moegguf.errors import MoeggufError
from moegguf.faces.messages import say
from moegguf.faces.run import write

if TYPE_CHECKING:
    from moegguf.engine.answer import Message, Sampling, Timing
    from moegguf.engine.llama import Llama

HELP = """\
  /clear   forget the conversation
  /stats   figures of the last answer
  /?       this list
  /bye     leave (Ctrl-D does too)
Ctrl-C stops the answer."""


def line_reader() -> Callable[[], str]:
    """Reads a line with editing and history; plain input() where prompt_toolkit cannot be had."""
    try:
        from prompt_toolkit import PromptSession

        session: PromptSession[str] = PromptSession(placeholder="Send a message (/? for help)")
    except Exception:  # not installed, or a terminal it cannot use
        return lambda: input(">>> ")
    return lambda: session.prompt(">>> ")


def kept(reply: Iterable[str], texts: list[str]) -> Iterator[str]:
    """The texts of `reply`, each put in `texts` before it is passed on."""
    for text in reply:
        texts.append(text)
        yield text


class Chat:
    """One conversation with one model, which it closes at the end."""

    def __init__(self, llm: Llama, name: str, sampling: Sampling, *, verbose: bool = False) -> None:
        self.llm = llm
        self.name = name
        self.sampling = sampling
        self.verbose = verbose
        self.messages: list[Message] = []
        self.last: Timing | None = None

    def talk(self) -> int:
        """Until the person leaves. Returns the exit code."""
        read = line_reader()
        with self.llm:
            while True:
                try:
                    line = read().strip()
                except KeyboardInterrupt:
                    say("Use Ctrl-D or /bye to leave.")
                    continue
                except EOFError:
                    return 0
                if line in ("/bye", "/exit"):
                    return 0
                if line:
                    self._command(line) if line.startswith("/") else self._turn(line)

    def _command(self, line: str) -> None:
        if line == "/clear":
            self.messages.clear()
            say("Cleared the conversation.")
        elif line in ("/?", "/help"):
            say(HELP)
        elif line == "/stats":
            self._say_statistics()
        else:
            say(f"Unknown command {line.split()[0]!r}. Type /? for help.")

    def _turn(self, line: str) -> None:
        """One question and its answer, which stays in the conversation even when it was stopped half-way."""
        from moegguf.engine.answer import Answer

        self.messages.append({"role": "user", "content": line})
        texts: list[str] = []
        try:
            reply = Answer(self.llm, self.messages, self.sampling)
        except MoeggufError as error:
            self.messages.pop()
            say(f"error: {error} /clear starts a new conversation.")
            return
        try:
            write(kept(reply, texts))
        except KeyboardInterrupt:
            write(["\n"], end="")
            if reply.running:
                say("stopping after the pass that is being computed...")
                reply.cancel()
        except MoeggufError as error:
            say(f"error: {error}")
        self.messages.append({"role": "assistant", "content": "".join(texts)})
        self.last = reply.timing
        if self.verbose:
            self._say_statistics()

    def _say_statistics(self) -> None:
        if self.last is None:
            say("There is no answer yet.")
            return
        from moegguf.faces.statistics import statistics

        say("\n".join(statistics(self.last, 0.0, self.llm.decisions())))
