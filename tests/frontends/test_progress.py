"""Progress lines and bars."""

from __future__ import annotations

import re

import pytest

from moegguf.models.entry import PullStatus
from moegguf.terminal import progress
from moegguf.terminal.progress import PullProgress, Spinner, loading_text, prompt_text, short_duration


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0s"), (59.4, "59s"), (59.6, "1m0s"), (171, "2m51s"), (3600, "1h0m"), (90061, "1d1h"),
])  # fmt: skip
def test_times_have_two_units(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text


def test_progress_of_a_load_and_of_a_prompt() -> None:
    assert loading_text("demo", None, 0, 0) == "loading demo"
    assert loading_text("demo", 0.43, 6_100_000_000, 2.0) == "loading demo 43% of 6.1 GB · 1.3 GB/s"
    assert prompt_text(6300, 0, 1024, 22.75) == "reading the prompt 1,024/6,300 tokens · 45 t/s · 1m57s left"
    assert prompt_text(6300, 1000, 1000, 0) == "reading the prompt 1,000/6,300 tokens"


STEPS = [
    PullStatus("pulling manifest"),
    PullStatus("pulling aaa", "sha256:aaa", "a.gguf", 100),
    PullStatus("pulling bbb", "sha256:bbb", "b.gguf", 300),
    PullStatus("pulling aaa", "sha256:aaa", "a.gguf", 100, 100),
    PullStatus("pulling bbb", "sha256:bbb", "b.gguf", 300, 150),
    PullStatus("success"),
]


def test_nothing_is_written_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with PullProgress() as shown, Spinner() as spinner:
        spinner.show("waiting")
        for step in STEPS:
            shown.report(step)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_line_for_each_file_and_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty:
        def isatty(self) -> bool:
            return True

        written = ""

        def write(self, text: str) -> int:
            Tty.written += text
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(progress.sys, "stderr", Tty())
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with PullProgress() as shown:
        for step in STEPS:
            shown.report(step)
    written = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", Tty.written)
    assert written.index("pulling manifest") < written.index("pulling aaa:") < written.index("success")
    last = written[written.rindex("pulling aaa:") :]
    assert re.search(r"aaa: 100% .* 100/100 bytes .*bbb: +50% .* 150/300 bytes .*all 2 files: +62%", last, re.DOTALL)
