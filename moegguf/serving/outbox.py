"""What a worker writes to its server's socket: whole lines from several threads, no more often than is worth it.

Each call of the system, and each message, wakes the server and its client on processors that the model's threads need,
and lets go of the interpreter. At 1,700 tokens/s a message per token would cost a share of them; 50 updates a second
are enough for a display. With 16 answers at once a call for each of their tokens took a tenth of the time between two
passes.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moegguf.generate.request import Delta, PromptProgress, Timing, join

DELTA_S = 0.02  # between two messages with an answer's text
PROGRESS_S = 0.1  # between two messages of progress


class Outbox:
    """Sends lines over `connection` at once, in the order they were put; those of a `one_call` block at its end, in one
    call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._held: list[bytes] | None = None  # inside a block

    def put(self, line: bytes) -> None:
        """Sends a line, after all that were put before. Raises OSError when the socket is closed."""
        with self._lock:
            if self._held is None:
                self._connection.sendall(line)
            else:
                self._held.append(line)

    @property
    def holds(self) -> bool:
        """Whether a block is open."""
        return self._held is not None

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """A block, of one thread at a time and short: lines of other threads wait for its end, too. Raises OSError when
        the socket is closed."""
        with self._lock:
            self._held = []
        try:
            yield
        finally:
            with self._lock:
                held, self._held = self._held, None
                if held:
                    self._connection.sendall(b"".join(held))


class Events:
    """Sends an answer's events, in the manner of `AnswerEvents`: deltas that come faster than DELTA_S are joined;
    without `stream` there is one, last. `sent_first` is called after the first delta of a stream."""

    def __init__(
        self,
        request_id: int,
        *,
        stream: bool,
        send: Callable[[int, Delta | PromptProgress], None],
        sent_first: Callable[[], None],
        end: Callable[[int, Timing, Exception | None], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._id = request_id
        self._stream = stream
        self._send = send
        self._sent_first = sent_first
        self._end = end
        self._pending: list[Delta] = []
        self._is_first = True
        self._delta_is_due = every(DELTA_S, -math.inf, clock)
        self._progress_is_due = every(PROGRESS_S, clock(), clock)

    def on_progress(self, progress: PromptProgress) -> None:
        """Sends it, unless the last one is recent."""
        if self._stream and (self._progress_is_due() or progress.n_done == progress.n_tokens):
            self._send(self._id, progress)

    def on_delta(self, delta: Delta) -> None:
        """Sends it with those that wait, or keeps it for a moment."""
        self._pending.append(delta)
        if self._stream and self._delta_is_due():
            self._flush()
        if self._stream and self._is_first:
            self._sent_first()
        self._is_first = False

    def on_end(self, timing: Timing, error: Exception | None) -> None:
        """Sends what is left, and the end."""
        if error is None:
            self._flush()
        self._end(self._id, timing, error)

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            self._send(self._id, join(pending))


def every(interval_s: float, last_s: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """A function that is True at most once per interval. `last_s`: when it counts as True before."""

    def is_due() -> bool:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s < interval_s:
            return False
        last_s = now_s
        return True

    return is_due
