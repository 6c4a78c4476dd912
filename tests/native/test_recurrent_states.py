"""Tests that operations on recurrent states write the new states into the cache, and
that this changes no value (patches/recurrent-states.patch)."""

import ctypes as c
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from tools.width_check import Array, Ggml, Graph

N_SEQ = 3
N_CELLS = 5  # cells of the cache, in each of its groups of earlier states
HEAD = 1  # the first cell of the pass
N_HEAD, D = 4, 32
STATE = N_HEAD * D * D  # number of values of a state
N_OUT = N_HEAD * D  # number of output values of a token
IN_PLACE = range(HEAD, HEAD + N_SEQ)

# Adds an operation to a graph. The arguments are the graph, the cache, the cells of the
# old states, the number of tokens and the number of states to return.
Operation = Callable[[Graph, c.c_void_p, Sequence[int], int, int], c.c_void_p]


def int64s(*values: int) -> list[c.c_int64]:
    return [c.c_int64(value) for value in values]


def sizes(*n_values: int) -> list[c.c_size_t]:
    """Returns the sizes of this many float32 values in bytes."""
    return [c.c_size_t(4 * n) for n in n_values]


def random_tokens(n_tokens: int, *shapes: Sequence[int]) -> Iterator[Array]:
    """Yields an array [N_SEQ, n_tokens, *shape] for each shape."""
    rng = np.random.default_rng(11)
    for shape in shapes:
        yield 0.3 * rng.standard_normal((N_SEQ, n_tokens, *shape)).astype(np.float32)


def add_delta_net(
    graph: Graph, cache: c.c_void_p, cells: Sequence[int], n_tokens: int, n_back: int
) -> c.c_void_p:
    inputs = random_tokens(
        n_tokens, (N_HEAD, D), (N_HEAD, D), (N_HEAD, D), (N_HEAD, 1), (N_HEAD, 1)
    )
    nodes = [graph.array(values) for values in inputs]
    if cells == IN_PLACE:
        rows = graph.op("view_2d", cache, *int64s(STATE, N_SEQ), *sizes(STATE, HEAD * STATE))  # fmt: skip
    else:
        ids = graph.array(np.array(cells, np.int32))
        rows = graph.op("get_rows", cache, ids)
    states = graph.op("reshape_4d", rows, *int64s(D, D, N_HEAD, N_SEQ))
    return graph.op("gated_delta_net", *nodes, states, c.c_int64(n_back))


def add_scan(
    graph: Graph, cache: c.c_void_p, cells: Sequence[int], n_tokens: int, n_back: int
) -> c.c_void_p:
    x, steps, b, c_ = random_tokens(n_tokens, (N_HEAD, D), (N_HEAD,), (1, D), (1, D))
    decay = -np.ones((N_HEAD, 1), np.float32)
    states = graph.op("reshape_4d", cache, *int64s(D, D, N_HEAD, n_back * N_CELLS))
    ids = np.array(cells, np.int32)
    nodes = [graph.array(values) for values in (x, steps, decay, b, c_, ids)]
    return graph.op("ssm_scan", states, *nodes, c.c_int64(n_back))


def add_copy(
    graph: Graph, node: c.c_void_p, cache: c.c_void_p, n_tokens: int, n_written: int
) -> c.c_void_p:
    """Copies the node's new states into the cells of the pass, in the first n_written
    groups of the cache."""
    shape = int64s(STATE, N_SEQ, n_written)
    n_outputs = N_SEQ * n_tokens * N_OUT
    new = graph.op("view_3d", node, *shape, *sizes(STATE, N_SEQ * STATE, n_outputs))
    to = graph.op("view_3d", cache, *shape, *sizes(STATE, N_CELLS * STATE, HEAD * STATE))  # fmt: skip
    return graph.op("cpy", new, to)


@pytest.mark.parametrize(("n_tokens", "n_back"), [(1, 1), (1, 3), (6, 1), (6, 3)])
@pytest.mark.parametrize(
    ("add", "cells", "acts"),
    [
        pytest.param(add_delta_net, IN_PLACE, True, id="delta-net-in-place"),
        pytest.param(add_delta_net, (3, 1, 2), True, id="delta-net-gathered"),
        pytest.param(add_scan, IN_PLACE, True, id="scan-in-place"),
        pytest.param(add_scan, (2, 1, 3), False, id="scan-of-swapped-cells"),
    ],
)
def test_new_states_are_written_into_the_cache(
    add: Operation, cells: Sequence[int], acts: bool, n_tokens: int, n_back: int
) -> None:
    """`acts`: the operation itself writes the new states into the cache, so that its
    own memory does not contain them."""
    before = np.random.default_rng(3).standard_normal((n_back * N_CELLS, STATE))
    before = before.astype(np.float32)
    n_written = min(n_tokens, n_back)
    shape = (N_SEQ * n_tokens * N_OUT + n_written * N_SEQ * STATE,)
    ggml = Ggml()

    alone = ggml.graph()
    node = add(alone, alone.array(before), cells, n_tokens, n_back)
    outputs, states = np.split(alone.compute(node, shape), [N_SEQ * n_tokens * N_OUT])
    alone.close()
    expected = before.copy()
    for n, group in enumerate(states.reshape(n_written, N_SEQ, STATE)):
        first = n * N_CELLS + HEAD
        expected[first : first + N_SEQ] = group

    graph = ggml.graph()
    cache = graph.array(before)
    node = add(graph, cache, cells, n_tokens, n_back)
    compute = graph.prepare(add_copy(graph, node, cache, n_tokens, n_written))
    graph.set(node, np.full(shape, np.nan, np.float32))
    compute()
    found = graph.values(node, shape)
    after = graph.values(cache, before.shape)
    graph.close()
    assert np.array_equal(found[: len(outputs)], outputs)
    assert np.array_equal(after, expected)
    assert np.array_equal(found[len(outputs) :], states) != acts
