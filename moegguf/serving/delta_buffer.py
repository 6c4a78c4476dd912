"""Limits how often a worker sends parts of an answer: deltas that come faster than the interval are joined.

Does not know sockets or models: `DeltaBuffer` passes what is due to `send`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from moegguf.generate.request import Delta

# Each message wakes the server and its client on processors that the model's threads need: at 1,700 tokens/s a message
# per token would cost a share of them; 50 updates a second are enough for a display.
INTERVAL_S = 0.02


def join(deltas: Sequence[Delta]) -> Delta:
    """One delta with the content of all, in order."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        thinking="".join(delta.thinking for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )


class DeltaBuffer:
    """The deltas of one answer. `interval_s`: minimum time between two calls of `send`; `math.inf` sends once, at the
    final `flush`."""

    def __init__(
        self, send: Callable[[Delta], None], interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._clock = clock
        self._pending: list[Delta] = []
        self._next_s = 0.0 if interval_s < float("inf") else interval_s

    def put(self, delta: Delta) -> None:
        """Sends `delta` with all pending ones when the interval has passed, else keeps it."""
        # Thinking comes before its answer: joined into one delta, the two are still in that order.
        self._pending.append(delta)
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self.flush()

    def flush(self) -> None:
        """Sends all pending deltas."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._send(join(pending))
