"""Turns between the clients of a queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moegguf.serving.turns import Turns


def test_one_request_comes_after_the_first_of_many() -> None:
    turns = Turns()
    many = [turns.take("many") for _ in range(60)]
    turns.serve(many[0])
    one = turns.take("one")
    assert many[0] <= one < many[1]
    turns.serve(one)
    assert turns.take("one") == many[1], "its next one has its turn beside the next of the other"


def test_a_client_that_was_idle_has_no_turns_saved() -> None:
    turns = Turns()
    turns.take("idle")
    for _ in range(20):
        turns.serve(turns.take("busy"))
    assert turns.take("idle") == 19 == turns.take("third")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60))
def test_nobody_waits_for_more_than_one_request_of_each_other_client_per_own(steps: list[tuple[int, int]]) -> None:
    turns, waiting, n_overtaken = Turns(), list[tuple[int, int, int]](), dict[int, dict[int, int]]()
    for ticket, (client, n_served) in enumerate(steps):
        own = sum(of == client for _, _, of in waiting)
        waiting.append((turns.take(str(client)), ticket, client))
        n_overtaken[ticket] = dict.fromkeys(range(5), own + 1)
        for _ in range(n_served):
            if waiting:
                first = min(waiting)
                waiting.remove(first)
                turns.serve(first[0])
                for _, other, of in waiting:
                    if of != first[2]:
                        n_overtaken[other][first[2]] -= 1
                        assert n_overtaken[other][first[2]] >= -1


def test_only_clients_that_are_ahead_are_remembered() -> None:
    turns = Turns()
    for i in range(1000):
        turns.serve(turns.take(str(i)))
        turns.serve(turns.take(str(i)))
    assert len(turns._last) <= 2
