"""`moegguf` with a scripted model: the prompt determines the answer, for tests of the screen.

`think: THINKING|TEXT` thinks first; `slowly TEXT` repeats TEXT until cancelled, `stubborn TEXT` cannot be cancelled;
`fail` raises an error; `messages` and `settings` print the request; any other prompt is echoed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from typing import Any

from moegguf.chat import local_model
from moegguf.cli import app as cli
from moegguf.errors import ContextError, ExpertIOError
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Timing


class EchoAnswer:
    """Replaces `Answer`."""

    def __init__(self, _llm: Any, request: GenerationRequest) -> None:
        assert request.messages is not None
        self.request = request
        self.timing = Timing(prompt_tokens=1, answer_tokens=2, prompt_s=0.25, answer_s=0.5, total_s=0.75)
        self.prompt = str(request.messages[-1]["content"])
        self._stopped = threading.Event()
        if self.prompt == "too long":
            raise ContextError("the prompt has too many tokens.")
        if self.prompt == "crash":
            raise ZeroDivisionError("so it goes")
        if self.prompt == "cut":
            self.timing.cut_messages = 3

    def cancel(self) -> None:
        self._stopped.set()

    def deltas(self, on_progress: Any = None) -> Generator[Delta, None, None]:
        first, _, rest = self.prompt.partition(" ")
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
            yield Delta(" ".join(f"[{m['role']}: {m['content']}]" for m in self.request.messages or ()))
        elif first == "settings":
            yield Delta(f"{self.request.sampling} format={self.request.format} think={self.request.think}")
        elif first == "fail":
            yield Delta("half an answer ")
            raise ExpertIOError("the disk is gone.")
        else:
            for letter in self.prompt:
                yield Delta(letter)

    def _slowly(self, text: str) -> Generator[Delta, None, None]:
        while not self._stopped.wait(0.02):
            yield Delta(f"{text} ")
        self.timing.finish = "cancelled"


local_model.Answer = EchoAnswer  # type: ignore[misc, assignment]

if __name__ == "__main__":
    sys.exit(cli.main())
