"""Shows progress on stderr: a bar for each file of a download, and one line for
everything else.

Shows nothing if stderr is not a terminal with cursor control.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Any, Self

from moegguf.quantities import human_bytes

if TYPE_CHECKING:
    from moegguf.models.entry import PullStatus

RATE_WINDOW_S = 10.0
STDOUT = 1  # file descriptor of stdout


def _is_ansi_terminal() -> bool:
    """Returns True if stderr is a terminal with cursor control."""
    return (
        sys.stderr is not None
        and sys.stderr.isatty()
        and os.environ.get("TERM") != "dumb"
    )


def duration(seconds: float) -> str:
    """Formats seconds as Go's time.Duration does: "412.5µs", "1.234ms", "4.9s",
    "2m3.5s", "1h0m5s"."""
    ns = round(seconds * 1e9)
    for unit, name in ((1_000, "ns"), (1_000_000, "µs"), (1_000_000_000, "ms")):
        if 0 < ns < unit:
            return f"{_decimal(ns, unit // 1000)}{name}"
    minutes, ns = divmod(ns, 60 * 10**9)
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(ns, 10**9)}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _decimal(ns: int, unit: int) -> str:
    return f"{ns / unit:.9f}".rstrip("0").rstrip(".")


class _Display:
    """A live display on stderr, created by the package rich. Leaving the `with` block
    closes the display."""

    _live: Any = None  # rich's Progress or Status while it is shown, else None

    def close(self) -> None:
        """Ends the display. A second call does nothing."""
        live = self._live
        self._live = None
        if live is not None:
            live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PullProgress(_Display):
    """Shows a download: a line for each step, a bar for each file, and a bar for all
    files if there are several."""

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}  # {file: its task in rich's Progress}
        self._all_files: Any = None
        if _is_ansi_terminal():
            from rich import progress as bars
            from rich.console import Console

            self._live = bars.Progress(
                bars.TextColumn("{task.description}:"), bars.TaskProgressColumn(), bars.BarColumn(None),
                bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn(compact=True),
                console=Console(stderr=True, highlight=False), expand=True, speed_estimate_period=RATE_WINDOW_S,
            )  # fmt: skip
            self._live.start()

    def report(self, status: PullStatus) -> None:
        """Shows a status of the download. The caller must report each file once before
        it reports received bytes of any file."""
        if self._live is None:
            return
        if not status.total_bytes:
            self._live.console.print(status.status)
            return
        if status.file not in self._files:
            self._files[status.file] = self._live.add_task(
                status.status, total=status.total_bytes
            )
        self._live.update(
            self._files[status.file], completed=status.completed_bytes or 0
        )
        if status.completed_bytes is None or len(self._files) == 1:
            return
        files = [task for task in self._live.tasks if task.id in self._files.values()]
        # Added after all files, so that rich shows it as the last line.
        if self._all_files is None:
            total = sum(task.total for task in files)
            self._all_files = self._live.add_task(
                f"all {len(files)} files", total=total
            )
        self._live.update(
            self._all_files, completed=sum(task.completed for task in files)
        )


class Spinner(_Display):
    """One line on stderr that names the current step. `close` clears the line, and
    `show` shows it again.

    Shows nothing if stdout is a pipe, since a pager at the pipe's other end uses the
    same terminal.
    """

    def __init__(self) -> None:
        self.visible = _is_ansi_terminal() and not stat.S_ISFIFO(
            os.fstat(STDOUT).st_mode
        )

    def show(self, text: str, share: float | None = None) -> None:
        """Shows `text`. If `share` (0 to 1) is given, shows it as a percentage before
        the text."""
        if not self.visible:
            return
        from rich.text import Text

        if self._live is None:
            from rich.console import Console
            from rich.status import Status

            self._live = Status(
                "", console=Console(stderr=True, highlight=False), spinner="dots"
            )
            self._live.start()
        done = "" if share is None else f"{share:4.0%} "
        self._live.update(Text(done + text, no_wrap=True, overflow="ellipsis"))


def loading_text(name: str, share: float, n_bytes: int, seconds: float) -> str:
    """Returns the progress of a load: "loading demo 43% of 6.1 GB · 1.2 GB/s". `share`
    is from 0 to 1."""
    rate = (
        f" · {human_bytes(share * n_bytes / seconds)}/s"
        if seconds > 0.2 and share > 0
        else ""
    )
    return f"loading {name} {share:.0%} of {human_bytes(n_bytes)}{rate}"


def prompt_text(n_tokens: int, n_cached: int, n_done: int, seconds: float) -> str:
    """Returns the progress of a prompt: "reading the prompt 1,024/6,300 tokens · 45 t/s
    · 1m57s left"."""
    text = f"reading the prompt {n_done:,}/{n_tokens:,} tokens"
    n_evaluated = n_done - n_cached
    if n_evaluated <= 0 or seconds <= 0:
        return text
    rate = n_evaluated / seconds
    left = (n_tokens - n_done) / rate
    return f"{text} · {rate:,.0f} t/s · {duration(round(left))} left"
