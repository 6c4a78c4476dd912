"""Pieces of an answer on their way out of a worker: joined while they come fast, at once while they come slowly.

Knows no sockets and no models: what is due is given to `send`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moegguf.generate.request import Delta

# Each message wakes the server and its client, on processors that the model's threads need: at 1,700 tokens/s a message
# per token would cost a share of them, and nobody reads faster than 50 times a second.
INTERVAL_S = 0.02


def join(deltas: list[Delta]) -> Delta:
    """One piece with all of it, in order."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        thinking="".join(delta.thinking for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )


class DeltaBuffer:
    """For one answer. `interval_s` is the least time between two pieces sent; `math.inf` sends one, at the end."""

    def __init__(
        self, send: Callable[[Delta], None], interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._clock = clock
        self._waiting: list[Delta] = []
        self._next_s = 0.0 if interval_s < float("inf") else interval_s

    def put(self, delta: Delta) -> None:
        """Sends it, with those that wait, or keeps it until the next one that is due."""
        # Thinking comes before its answer: joined into one piece, they are still in that order.
        self._waiting.append(delta)
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + self._interval_s
            self.flush()

    def flush(self) -> None:
        """Sends what waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._send(join(waiting))
