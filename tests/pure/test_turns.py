"""Turns between the clients of a queue."""

from hypothesis import given
from hypothesis import strategies as st

from moegguf.serving.lease import MOST_CLIENTS, Turns


class Queue:
    """Requests that wait for one model, as (turn, ticket, client)."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.waiting: list[tuple[int, int, str]] = []
        self._n_tickets = 0

    def add(self, client: str) -> int:
        """The turn of a new request."""
        turn = self.turns.take(client, max((turn for turn, _, of in self.waiting if of == client), default=None))
        self.waiting.append((turn, self._n_tickets, client))
        self._n_tickets += 1
        return turn

    def serve(self) -> tuple[int, int, str]:
        """The request whose turn it is."""
        first = min(self.waiting)
        self.waiting.remove(first)
        self.turns.serve(first[2], first[0])
        return first


def test_a_client_that_was_idle_has_no_turns_saved() -> None:
    queue = Queue()
    queue.add("idle")
    queue.serve()
    for _ in range(20):
        queue.add("busy")
        queue.serve()
    assert queue.add("idle") == queue.add("third")


def test_requests_that_were_cancelled_cost_no_turns() -> None:
    queue = Queue()
    for _ in range(500):
        queue.add("hasty")
    queue.serve()
    queue.waiting.clear()
    again, other = queue.add("hasty"), queue.add("other")
    assert again - other == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60))
def test_nobody_waits_for_more_than_one_request_of_each_other_client_per_own(steps: list[tuple[int, int]]) -> None:
    queue, n_overtaken = Queue(), dict[int, dict[str, int]]()
    for ticket, (client, n_served) in enumerate(steps):
        own = sum(of == str(client) for _, _, of in queue.waiting)
        queue.add(str(client))
        n_overtaken[ticket] = dict.fromkeys(map(str, range(5)), own + 1)
        for _ in range(min(n_served, len(queue.waiting))):
            _, _, served = queue.serve()
            for _, other, of in queue.waiting:
                if of != served:
                    n_overtaken[other][served] -= 1
                    assert n_overtaken[other][served] >= -1


def test_clients_of_one_turn_are_remembered_and_not_without_end() -> None:
    queue = Queue()
    for i in range(10 * MOST_CLIENTS):
        queue.add(str(i))
        queue.serve()
    assert len(queue.turns._in_turn) <= MOST_CLIENTS
