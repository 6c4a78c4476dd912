"""`moegguf` whose model says what it is asked to: for tests of the screen, where every word has to be known.

`think: WORDS|TEXT` check_thinking first; `slowly WORDS` says them again and again, `stubborn WORDS` too and then cannot be
stopped; `fail` ends in a fault; `messages` and `settings` say what the model was asked; the rest is said again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from typing import Any

from moegguf.chat import turn
from moegguf.cli import app as cli
from moegguf.errors import ContextError, ExpertIOError
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing


class EchoAnswer:
    """Stands in for `Answer`."""

    def __init__(self, _llm: Any, ask: GenerationRequest) -> None:
        assert ask.messages is not None
        self.ask = ask
        self.timing = Timing(prompt_tokens=1, answer_tokens=2, prompt_s=0.25, answer_s=0.5, total_s=0.75)
        self.words = str(ask.messages[-1]["content"])
        self._stopped = threading.Event()
        if self.words == "too long":
            raise ContextError("the prompt has too many tokens.")
        if self.words == "crash":
            raise ZeroDivisionError("so it goes")
        if self.words == "cut":
            self.timing.cut_messages = 3

    def cancel(self) -> None:
        self._stopped.set()

    def deltas(self, on_progress: Any = None) -> Generator[Delta, None, None]:
        first, _, rest = self.words.partition(" ")
        if first in ("slowly", "stubborn"):
            yield from self._slowly(rest)
            threading.Event().wait(None if first == "stubborn" else 0)
        elif first == "think:":
            thinking, _, text = rest.partition("|")
            yield Delta(thinking=thinking)
            yield Delta(text=text)
        elif first == "progress":
            on_progress(PromptProgress(6300, 0, 1024, 22.0))
            self._stopped.wait()
        elif first == "messages":
            yield Delta(" ".join(f"[{m['role']}: {m['content']}]" for m in self.ask.messages or ()))
        elif first == "settings":
            yield Delta(f"{self.ask.sampling} format={self.ask.format} think={self.ask.think}")
        elif first == "fail":
            yield Delta("half an answer ")
            raise ExpertIOError("the disk is gone.")
        else:
            for letter in self.words:
                yield Delta(letter)

    def _slowly(self, words: str) -> Generator[Delta, None, None]:
        while not self._stopped.wait(0.02):
            yield Delta(f"{words} ")
        self.timing.finish = "cancelled"


turn.Answer = EchoAnswer  # type: ignore[misc, assignment]

if __name__ == "__main__":
    sys.exit(cli.main())
