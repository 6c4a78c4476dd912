"""Reverse-mode differentiation of the operations that the predictors' networks consist of.

A node holds a value, and the function that turns the gradient of this value into the gradients of
the node's inputs. tests/pure/test_gradients.py compares each operation with finite differences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.integer]
Back = Callable[[Floats], tuple[Floats | None, ...]]


class Node:
    """A value in a computation.

    inputs: the nodes that the value was computed from.

    back: returns the gradients of the inputs, from the gradient of the value.

    learns: True where a gradient is needed: for parameters and everything computed from them.

    grad: the sum of gradients, once `backward` has been called.
    """

    def __init__(
        self, value: Floats, inputs: tuple[Node, ...] = (), back: Back | None = None, learns: bool = False
    ) -> None:
        self.value = value
        self.inputs = inputs
        self.back = back
        self.learns: bool = learns or any(node.learns for node in inputs)
        self.grad: Floats | None = None


def backward(last: Node, gradient: Floats) -> None:
    """Adds to `grad` of every node that `last` was computed from, given the gradient of `last`."""
    last.grad = gradient
    for node in reversed(_in_order(last)):
        if node.back is None or node.grad is None:
            continue
        for source, part in zip(node.inputs, node.back(node.grad), strict=True):
            if part is not None and source.learns:
                source.grad = part if source.grad is None else source.grad + part


def _in_order(last: Node) -> list[Node]:
    """Returns the nodes that `last` was computed from, each behind its inputs."""
    order: list[Node] = []
    seen: set[int] = set()

    def visit(node: Node) -> None:
        if id(node) in seen or not node.learns:
            return
        seen.add(id(node))
        for source in node.inputs:
            visit(source)
        order.append(node)

    visit(last)
    return order


def add(a: Node, b: Node) -> Node:
    """Returns a + b; the one of fewer axes is repeated along the first axes."""
    return Node(a.value + b.value, (a, b), lambda g: (_summed(g, a), _summed(g, b)))


def times(a: Node, b: Node) -> Node:
    """Returns a * b, element by element; the one of fewer axes is repeated along the first axes."""

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        of_a = _summed(gradient * b.value, a) if a.learns else None
        return of_a, _summed(gradient * a.value, b) if b.learns else None

    return Node(a.value * b.value, (a, b), back)


def _summed(gradient: Floats, node: Node) -> Floats:
    """Returns the gradient of a node whose value was repeated along the first axes."""
    shape = node.value.shape
    return gradient if gradient.shape == shape else gradient.reshape(-1, *shape).sum(axis=0)


def product(x: Node, w: Node) -> Node:
    """Returns x @ w of x (..., n_in) and a matrix w (n_in, n_out)."""
    n_in, n_out = w.value.shape
    rows = x.value.reshape(-1, n_in)

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        of_rows = gradient.reshape(-1, n_out)
        of_x = (of_rows @ w.value.T).reshape(x.value.shape) if x.learns else None
        return of_x, rows.T @ of_rows

    return Node((rows @ w.value).reshape(*x.value.shape[:-1], n_out), (x, w), back)


def matmul(a: Node, b: Node) -> Node:
    """Returns a @ b of a (..., n, m) and b (..., m, k) with equal first axes."""

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        return gradient @ b.value.swapaxes(-1, -2), a.value.swapaxes(-1, -2) @ gradient

    return Node(a.value @ b.value, (a, b), back)


def relu(x: Node) -> Node:
    """Returns max(x, 0)."""
    positive = x.value > 0
    return Node(x.value * positive, (x,), lambda g: (g * positive,))


def softmax(x: Node) -> Node:
    """Returns e^x, scaled to add up to 1 along the last axis."""
    shares = shares_of(x.value)

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        mean = (gradient * shares).sum(axis=-1, keepdims=True)
        return (shares * (gradient - mean),)

    return Node(shares, (x,), back)


def shares_of(x: Floats) -> Floats:
    """Returns e^x, scaled to add up to 1 along the last axis, of plain numbers."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def rms_norm(x: Node, eps: float) -> Node:
    """Returns x over its root mean square along the last axis: T5's norm without its gain."""
    scale = 1 / np.sqrt((x.value * x.value).mean(axis=-1, keepdims=True) + eps)
    normed = x.value * scale

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        along = (gradient * normed).mean(axis=-1, keepdims=True)
        return (scale * (gradient - normed * along),)

    return Node(normed, (x,), back)


def standardize(x: Node, eps: float) -> Node:
    """Returns x (n, n_value) with mean 0 and variance 1 in each column: a batch norm without its
    gain and bias."""
    scale = 1 / np.sqrt(x.value.var(axis=0) + eps)
    normed = (x.value - x.value.mean(axis=0)) * scale

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        along = (gradient * normed).mean(axis=0)
        return (scale * (gradient - gradient.mean(axis=0) - normed * along),)

    return Node(normed, (x,), back)


def rows_of(table: Node, ids: Integers) -> Node:
    """Returns table[ids], the rows of a matrix."""

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        of_table = np.zeros_like(table.value)
        np.add.at(of_table, ids, gradient)
        return (of_table,)

    return Node(table.value[ids], (table,), back)


def reshape(x: Node, *shape: int) -> Node:
    """Returns x with another shape."""
    return Node(x.value.reshape(shape), (x,), lambda g: (g.reshape(x.value.shape),))


def transpose(x: Node, *axes: int) -> Node:
    """Returns x with its axes in another order."""
    back_axes = np.argsort(axes)
    return Node(x.value.transpose(axes), (x,), lambda g: (g.transpose(back_axes),))
