"""A gate for drafts that does not depend on measured times, so that tests repeat
exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moegguf.generate.drafting import Acceptance, DraftGate

WIDTH = 6  # maximum number of tokens in a draft


class Eager(DraftGate):
    """A gate that always allows WIDTH drafted tokens from each source, for each
    answer."""

    def begin_pass(self) -> bool:
        return True

    def widths(self, answers: Sequence[Sequence[Acceptance]]) -> list[list[int]]:
        return [[WIDTH] * len(of_answer) for of_answer in answers]

    def note_pass(self, *_: Any) -> None:
        pass
