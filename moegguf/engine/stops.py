"""Stop strings: the text before the first of them, and no letter of one, however tokens cut it. Pure text."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Stops:
    """Lets text through up to the first stop string; `found` afterwards. Empty stop strings are ignored."""

    def __init__(self, stops: Iterable[str]) -> None:
        wanted = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self.found = False
        self._pattern = re.compile("|".join(map(re.escape, wanted))) if wanted else None
        self._beginnings = {stop[:n] for stop in wanted for n in range(1, len(stop))}
        self._longest = max((len(stop) for stop in wanted), default=0) - 1
        self._held = ""

    def __bool__(self) -> bool:
        return self._pattern is not None

    @property
    def n_held(self) -> int:
        """Characters that were fed and may be the beginning of a stop string."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """What is surely no part of a stop string, of what was held and `text`; nothing once one was found."""
        if self._pattern is None:
            return text
        if self.found:
            return ""
        text = self._held + text
        match = self._pattern.search(text)
        if match:
            self.found, self._held = True, ""
            return text[: match.start()]
        n = next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._beginnings), 0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def end(self) -> str:
        """What was held, once no more text comes."""
        text, self._held = self._held, ""
        return text
