"""Pieces of an answer on their way out of a worker: joined while they come fast, at once while they come slowly.

Knows no sockets and no models: what is due is given to `send`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moegguf.generate.request import Piece

# Each message wakes the server and its client, on processors that the model's threads need: at 1,700 tokens/s a message
# per token would cost a share of them, and nobody reads faster than 50 times a second.
INTERVAL_S = 0.02


def join(pieces: list[Piece]) -> Piece:
    """One piece with all of it, in order."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        text="".join(piece.text for piece in pieces),
        thinking="".join(piece.thinking for piece in pieces),
        tool_calls=tuple(call for piece in pieces for call in piece.tool_calls),
        chances=tuple(chance for piece in pieces for chance in piece.chances),
    )


class Outbox:
    """For one answer. `interval_s` is the least time between two pieces sent; `math.inf` sends one, at the end."""

    def __init__(
        self, send: Callable[[Piece], None], interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._clock = clock
        self._waiting: list[Piece] = []
        self._next_s = 0.0 if interval_s < float("inf") else interval_s

    def put(self, piece: Piece) -> None:
        """Sends it, with those that wait, or keeps it until the next one that is due."""
        # Thinking comes before its answer: joined into one piece, they are still in that order.
        self._waiting.append(piece)
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + self._interval_s
            self.flush()

    def flush(self) -> None:
        """Sends what waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._send(join(waiting))
