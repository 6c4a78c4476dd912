"""Belady's bound on examples small enough to check by hand, and against every choice of victims."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import hand_made
from traces import random_trace

from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.trace.belady import Lookups, belady
from moegguf.trace.trace import Trace


def trace_of(passes: Sequence[Sequence[Sequence[int]]], n_expert: int = 4) -> Trace:
    """passes[p][row]: the experts of one token in each layer."""
    n_row, k = len(passes[0]), len(passes[0][0])
    path = [[list(layer) for layer in token] for token in passes]
    return hand_made(MoeShape(n_row, n_expert, k, tuple(range(n_row))), [path])


def test_the_experts_of_an_event_are_needed_together() -> None:
    lookups = Lookups.of(trace_of([[[0, 1]], [[2, 3]], [[0, 1]]]))
    assert belady(lookups, 3).hits == 1
    assert belady(lookups, 4).hits == 2
    with pytest.raises(OptionError, match="needs 2 experts"):
        belady(lookups, 1)


def test_lookups_are_distinct_experts_in_order_of_first_choice() -> None:
    trace = random_trace(n_sequences=1, n_prefill=5, n_decode=2)
    lookups = Lookups.of(trace)
    n_expert = trace.shape.n_expert
    for row in range(len(trace.shape.layers)):
        ids = trace.expert_ids[row, :5].ravel()
        expected = list(dict.fromkeys(ids[ids >= 0].tolist()))
        assert (lookups.keys[lookups.start[row] : lookups.start[row + 1]] - row * n_expert).tolist() == expected
    assert lookups.decode.tolist() == [False] * 5 + [True] * 10


def test_a_shorter_last_layer_is_counted() -> None:
    trace = random_trace(n_sequences=3, n_prefill=6, n_decode=5)
    counted = belady(Lookups.of(trace), 20)
    assert counted.decode_lookups == 3 * 5 * 5 * 2


def optimum(trace: Trace, n_slots: int) -> int:
    """The most hits, by trying every choice of victims."""
    lookups = Lookups.of(trace)
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for start, end in zip(lookups.start[:-1], lookups.start[1:], strict=True):
        event = frozenset(lookups.keys[start:end].tolist())
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            others = sorted(resident - event)
            for kept in combinations(others, min(len(others), n_slots - len(event))):
                state = event | frozenset(kept)
                after[state] = max(after.get(state, 0), hits + len(event & resident))
        best = after
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.sets(st.integers(0, 3), min_size=2, max_size=2)] * 2), min_size=1, max_size=10),
    st.integers(2, 6),
)
def test_belady_is_the_optimum(passes: list[tuple[set[int], set[int]]], n_slots: int) -> None:
    trace = trace_of([[sorted(layer) for layer in one] for one in passes])
    bound = belady(Lookups.of(trace), n_slots)
    assert bound.hits == optimum(trace, n_slots)
    assert bound.hits <= bound.lookups
