"""Shorter trials for tests of the prefetching watchdog."""

from __future__ import annotations

import pytest

from moegguf.controller import watchdog


def set_trials(monkeypatch: pytest.MonkeyPatch, **values: float) -> None:
    """Sets the watchdog's constants of these names, in lower case."""
    for name, value in values.items():
        monkeypatch.setattr(watchdog, name.upper(), value)
