"""Compares gradients of each operation, of both losses and of the routing-path network
with finite differences."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from moegguf.learning import gradients as g
from moegguf.learning.fitting import binary_cross_entropy, cross_entropy
from moegguf.learning.gradients import Floats, Node
from moegguf.learning.routing_path import Options, PathModel, array_sizes

STEP = 1e-5
RNG = np.random.default_rng(0)


def draw(*shape: int) -> Floats:
    return RNG.standard_normal(shape)


OPERATIONS: dict[str, tuple[Callable[..., Node], list[Floats]]] = {
    "add": (operator.add, [draw(2, 3, 4), draw(2, 3, 4)]),
    "add of fewer axes": (operator.add, [draw(2, 3, 4), draw(3, 4)]),
    "times": (operator.mul, [draw(3, 4), draw(3, 4)]),
    "times of fewer axes": (operator.mul, [draw(2, 3, 4), draw(4)]),
    "einsum with a matrix": (
        partial(g.einsum, "ntf,fi->nti"),
        [draw(2, 3, 4), draw(4, 5)],
    ),
    "einsum with shared axes": (
        partial(g.einsum, "nhtd,nhsd->nhts"),
        [draw(2, 3, 4, 5), draw(2, 3, 2, 5)],
    ),
    "relu": (g.relu, [draw(3, 4)]),
    "softmax": (g.softmax, [draw(2, 3, 4)]),
    "rms_norm": (lambda x: g.rms_norm(x, 1e-6), [draw(2, 3, 4)]),
    "standardize": (lambda x: g.standardize(x, 1e-5), [draw(6, 4)]),
    "rows_of": (
        lambda table: g.rows_of(table, np.array([[0, 2], [2, 1]])),
        [draw(4, 3)],
    ),
    "a node that is used twice": (lambda x: g.relu(x) * g.softmax(x), [draw(3, 4)]),
}


def by_differences(of: Callable[[], float], values: Floats) -> Floats:
    """Returns the gradient of `of()`, a number, with respect to `values`, from finite
    differences.

    Each value is changed and restored.
    """
    found = np.zeros_like(values)
    for place in np.ndindex(values.shape):
        before = values[place]
        values[place] = before + STEP
        above = of()
        values[place] = before - STEP
        found[place] = (above - of()) / (2 * STEP)
        values[place] = before
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradient_of_each_operation_equals_finite_differences(name: str) -> None:
    operation, values = OPERATIONS[name]
    nodes = [Node(value, learns=True) for value in values]
    weights = draw(*operation(*nodes).value.shape)
    g.backward(operation(*nodes), weights)
    for node, value in zip(nodes, values, strict=True):
        expected = by_differences(
            lambda: float((operation(*map(Node, values)).value * weights).sum()), value
        )
        assert node.grad == pytest.approx(expected, abs=1e-6)


def test_backward_gives_no_gradient_to_constants() -> None:
    x, w = Node(draw(2, 3)), Node(draw(3, 4), learns=True)
    g.backward(g.einsum("ni,io->no", x, w), draw(2, 4))
    assert x.grad is None and w.grad is not None


@pytest.mark.parametrize("loss", [cross_entropy, binary_cross_entropy])
def test_gradient_of_each_loss_equals_finite_differences(
    loss: Callable[..., object],
) -> None:
    logits, chosen = draw(3, 5), (draw(3, 5) > 0.3).astype(float)
    chosen[:, 0] = 1
    found = loss(Node(logits), chosen)
    expected = by_differences(lambda: loss(Node(logits), chosen).loss, logits)
    assert found.gradient == pytest.approx(expected, abs=1e-6)


def test_unknown_layers_change_neither_loss_nor_gradient() -> None:
    logits, chosen = draw(3, 2, 5), draw(3, 2, 5) > 0.3
    known = np.array([[True, False], [True, True], [False, False]])
    found = binary_cross_entropy(Node(logits), chosen, known)
    expected = by_differences(
        lambda: binary_cross_entropy(Node(logits), chosen, known).loss, logits
    )
    assert found.gradient == pytest.approx(expected, abs=1e-6)
    assert found.loss == pytest.approx(
        binary_cross_entropy(Node(logits[known]), chosen[known]).loss
    )
    assert not found.gradient[~known].any()


def test_gradient_of_the_routing_path_equals_finite_differences() -> None:
    options = Options(n_embd=8, n_head=2, n_ff=6, window=3, chunk=2, dropout=0.0)
    arrays = {name: draw(*size) for name, size in array_sizes(options, 5, 2, 3).items()}
    model = PathModel(arrays, options, np.random.default_rng(1))
    # float32 is too coarse for finite differences.
    for name, node in model.parameters.items():
        node.value = arrays[name]
    windows, chunks = np.array([[4, 0, 1], [2, 3, 4]]), np.array([[1, 2], [0, 0]])
    paths, known = draw(2, 2, 2, 3) > 0, np.ones((2, 2, 2), np.bool_)

    def loss() -> float:
        return binary_cross_entropy(
            model.logits(windows, chunks, True), paths, known
        ).loss

    batch = binary_cross_entropy(model.logits(windows, chunks, True), paths, known)
    g.backward(batch.logits, batch.gradient)
    for name, node in model.parameters.items():
        assert node.grad == pytest.approx(by_differences(loss, node.value), abs=1e-6), (
            name
        )
