"""Sizes and times as users of Ollama read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from moegguf.terminal.units import human_bytes, human_duration, human_time, processor_split

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (4_700_000_000, "4.7 GB"),
        (17_300_000_000, "17 GB"),
        (274_000_000, "274 MB"),
        (2_500_000_000_000, "2.5 TB"),
    ],
)
def test_size(n_bytes: int, text: str) -> None:
    assert human_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.3, "Less than a second"),
        (1, "1 second"),
        (59, "59 seconds"),
        (61, "About a minute"),
        (240, "4 minutes"),
        (3600, "About an hour"),
        (47 * 3600, "47 hours"),
        (3 * 86400, "3 days"),
        (15 * 86400, "2 weeks"),
        (70 * 86400, "2 months"),
        (800 * 86400, "2 years"),
    ],
)
def test_span(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_moment() -> None:
    assert human_time(NOW - timedelta(days=3), NOW) == "3 days ago"
    assert human_time(NOW + timedelta(minutes=4, seconds=10), NOW) == "4 minutes from now"
    assert human_time(None) == "Forever"


@pytest.mark.parametrize(
    ("size_bytes", "vram_bytes", "text"),
    [(10, 0, "100% CPU"), (10, 10, "100% GPU"), (10, 12, "Unknown"), (0, 3, "Unknown"), (100, 52, "48%/52% CPU/GPU")],
)
def test_processor(size_bytes: int, vram_bytes: int, text: str) -> None:
    assert processor_split(size_bytes, vram_bytes) == text
