"""Durations as Go prints them, because Ollama's users and their scripts read these lines."""

from __future__ import annotations

import pytest

from moegguf.engine.answer import Timing
from moegguf.faces.statistics import duration, statistics


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ns"), (3e-9, "3ns"), (412.5e-6, "412.5µs"), (1.234e-3, "1.234ms"), (4.9, "4.9s"), (60, "1m0s"),
        (123.5, "2m3.5s"), (3605, "1h0m5s"), (0.9999999999, "1s"), (298.000000001, "4m58.000000001s"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_one_token_has_no_rate() -> None:
    lines = statistics(Timing(prompt_tokens=3, answer_tokens=1, prompt_s=0.5, total_s=0.5), 0.1)
    assert lines[-1] == "eval count:           1 token(s)"
    assert not any(line.startswith("eval rate") for line in lines)
