"""Drafts that do not depend on time: a gate that always drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moegguf.generate.drafting import Acceptance, DraftGate

WIDTH = 6  # tokens of a draft


class Eager(DraftGate):
    """A gate that always drafts as many tokens as it may."""

    def is_due(self) -> bool:
        return True

    def widths(self, answers: Sequence[Sequence[Acceptance]]) -> list[list[int]]:
        return [[WIDTH] * len(of_answer) for of_answer in answers]

    def ran(self, *_: Any) -> None:
        pass
