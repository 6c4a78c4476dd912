"""Which request and which phase the next tokens belong to: what llama.cpp does not say and gates are filed under."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from moegguf.native.events import Phase

Step = TypeVar("Step")


class RequestCounter:
    """Counts requests of one context.

    A request is one call that generates: its first evaluation is the prompt, all later ones decode. Without such a
    call, an evaluation from an empty context begins a request, single tokens after it decode.
    """

    def __init__(self) -> None:
        self.sequence = -1
        self._fresh = False
        self._generating = False

    def hold(self, steps: Generator[Step, Any, None]) -> Generator[Step, Any, None]:
        """The same steps, as one request."""
        self._fresh = self._generating = True
        try:
            yield from steps
        finally:
            self._fresh = self._generating = False

    def begin(self) -> int:
        """A request that is none of these, such as an embedding, begins; returns its number."""
        self.sequence += 1
        return self.sequence

    def next_phase(self, n_past: int, n_tokens: int) -> Phase:
        """The phase of the next `n_tokens` after `n_past`; `sequence` says in which request."""
        if self._fresh or (n_past == 0 and not self._generating) or self.sequence < 0:
            self._fresh = False
            self.sequence += 1
            return Phase.PREFILL
        return Phase.DECODE if self._generating or n_tokens == 1 else Phase.PREFILL
