"""What is being waited for, on a terminal's stderr: downloads as Ollama shows them, and one line for all else.

Silent where stderr is no terminal, or one that cannot take back what it shows. Knows words and bars, asks nobody for
facts.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moegguf.terminal.units import size

if TYPE_CHECKING:
    from moegguf.models.entry import PullStatus

BAR_CELLS = 30
LEAST_BAR_CELLS = 6
RATE_WINDOW_S = 10.0


def _can_show() -> bool:
    """Whether stderr is a terminal whose cursor can be moved."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def short_span(seconds: float | None) -> str:
    """A time to wait in its two largest units: "2m51s", "1h4m", "12s"; nothing when unknown."""
    if seconds is None:
        return ""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour}h"
    if hours:
        return f"{hours}h{minute}m"
    return f"{minute}m{second}s" if minutes else f"{second}s"


def bar(share: float, cells: int) -> str:
    """ "▕████      ▏", as wide as `cells` between its ends."""
    filled = round(min(max(share, 0.0), 1.0) * cells)
    return f"▕{'█' * filled}{' ' * (cells - filled)}▏"


def file_line(status: str, done: int, total: int, rate: float | None, left_s: float | None, width: int) -> str:
    """One download: "pulling 3f4a...:  43% ▕████      ▏ 1.2 GB/ 17 GB   95 MB/s   2m51s"."""
    share = done / total if total else 1.0
    head = f"{status}: {share:4.0%} "
    amounts = f" {size(done):>6}/{size(total):>6}" if share < 1 else f" {size(total):>6}"
    speed = f" {size(rate) + '/s':>9} {short_span(left_s):>7}" if rate and share < 1 else ""
    room = width - len(head) - 2
    for tail in (amounts + speed, amounts, ""):
        if room - len(tail) >= LEAST_BAR_CELLS:
            return f"{head}{bar(share, min(BAR_CELLS, room - len(tail)))}{tail}"
    return head.rstrip()


class PullProgress:
    """A line for each step of a download and each file, and one for all files when there are several."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}
        self._sum: Any = None

    def __enter__(self) -> PullProgress:
        if _can_show():
            self._progress = _file_progress()
            self._progress.start()
        return self

    def report(self, status: PullStatus) -> None:
        """Shows a step; may be called from several threads."""
        if self._progress is None:
            return
        if not status.total_bytes:
            self._step(status.status)
            return
        key = status.digest or status.file or status.status
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(status.status, total=status.total_bytes)
            self._keep_sum_last()
        self._progress.update(self._tasks[key], completed=status.completed_bytes or 0)
        if self._sum is not None:
            files = [task for task in self._progress.tasks if task.id in self._tasks.values() and task.total]
            total, done = sum(task.total for task in files), sum(task.completed for task in files)
            self._progress.update(self._sum, total=total, completed=done)

    def _step(self, words: str) -> None:
        if words not in self._tasks:
            self._tasks[words] = self._progress.add_task(words, total=None)

    def _keep_sum_last(self) -> None:
        """Tasks are shown in the order they were added: the sum is added anew below each new file."""
        if self._sum is not None:
            self._progress.remove_task(self._sum)
        n_files = sum(1 for task in self._progress.tasks if task.total)
        self._sum = self._progress.add_task(f"all {n_files} files", total=1) if n_files > 1 else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _file_progress() -> Any:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task
    from rich.text import Text

    console = Console(stderr=True, highlight=False)

    class Line(ProgressColumn):
        def render(self, task: Task) -> Text:
            if task.total is None:
                return Text(task.description)
            done, total = int(task.completed), int(task.total)
            line = file_line(task.description, done, total, task.speed, task.time_remaining, console.width - 1)
            return Text(line, no_wrap=True, overflow="crop")

    return Progress(Line(), console=console, speed_estimate_period=RATE_WINDOW_S, refresh_per_second=10)


class Spinner:
    """One line that says what is being waited for, gone without a trace when closed. It can be shown again."""

    def __init__(self) -> None:
        self._status: Any = None
        self._terminal = _can_show()

    def show(self, words: str) -> None:
        """`words` after a turning wheel."""
        if not self._terminal:
            return
        if self._status is None:
            from rich.console import Console
            from rich.status import Status

            self._status = Status("", console=Console(stderr=True, highlight=False), spinner="dots")
            self._status.start()
        from rich.text import Text

        self._status.update(Text(words, no_wrap=True, overflow="ellipsis"))

    def close(self) -> None:
        """Clears the line. Twice is harmless."""
        status, self._status = self._status, None
        if status is not None:
            status.stop()

    def __enter__(self) -> Spinner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def loading_words(name: str, share: float | None, n_bytes: int, seconds: float) -> str:
    """A load: "loading demo 43% of 6.1 GB · 1.2 GB/s"."""
    if share is None:
        return f"loading {name}"
    rate = f" · {size(share * n_bytes / seconds)}/s" if seconds > 0.2 and share > 0 else ""
    return f"loading {name} {share:.0%} of {size(n_bytes)}{rate}"


def prompt_words(n_tokens: int, n_cached: int, n_done: int, seconds: float) -> str:
    """A prompt being read: "reading the prompt 1,024/6,300 tokens · 45 t/s · 1m57s left"."""
    text = f"reading the prompt {n_done:,}/{n_tokens:,} tokens"
    fresh = n_done - n_cached
    if fresh <= 0 or seconds <= 0:
        return text
    rate = fresh / seconds
    left = (n_tokens - n_done) / rate
    return f"{text} · {rate:,.0f} t/s · {short_span(left)} left"
