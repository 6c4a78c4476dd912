"""Turns between clients: who sends many requests at once does not hold up who sends one.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with requests of equal cost: a request's turn is one after the
last of its client, or the turn that is being served where that is later. Requests are served by turn, within a turn in
order of arrival, so that nobody waits for more than one request of each other client per request of its own.
"""

from __future__ import annotations

from contextvars import ContextVar

current_client: ContextVar[str] = ContextVar("current_client", default="")
"""Who sends the request that is being handled; frontends set it. Empty: nobody that they know."""


class Turns:
    """The turns of one queue. What it remembers is no more than the clients that are ahead of the others."""

    def __init__(self) -> None:
        self._served = 0
        self._last: dict[str, int] = {}

    def take(self, client: str) -> int:
        """The turn of a request that has just arrived."""
        turn = self._last[client] = max(self._served, self._last.get(client, -1) + 1)
        return turn

    def serve(self, turn: int) -> None:
        """A request of this turn is served."""
        if turn > self._served:
            self._served = turn
            self._last = {client: last for client, last in self._last.items() if last >= turn}
