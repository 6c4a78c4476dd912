"""Turns between clients: who sends many requests at once does not hold up who sends one.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with requests of equal cost: a request's turn is one after the
last of its client, or the turn that is being served where that is later. Requests are served by turn, within a turn in
order of arrival, so that nobody waits for more than one request of each other client per request of its own.
"""

from __future__ import annotations

MOST_CLIENTS = 1024  # of one turn: who comes later is of the next


class Turns:
    """The turns of one queue. It remembers the clients that were served in the present turn."""

    def __init__(self) -> None:
        self._served = 0
        self._in_turn: set[str] = set()

    def take(self, client: str, last: int | None) -> int:
        """The turn of a request that has just arrived. last: the last turn of the client's requests that still wait;
        None: there is none. So requests that were cancelled while they waited cost no turns."""
        least = self._served + (client in self._in_turn)
        return least if last is None else max(least, last + 1)

    def serve(self, client: str, turn: int) -> None:
        """A request of this client and turn is served."""
        if turn > self._served:
            self._served = turn
            self._in_turn.clear()
        if turn == self._served:
            self._in_turn.add(client)
        if len(self._in_turn) > MOST_CLIENTS:
            self._served += 1
            self._in_turn.clear()
