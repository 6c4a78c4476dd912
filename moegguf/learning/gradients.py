"""Reverse-mode differentiation of the operations in the predictors' networks.

A node holds a value. A node that was computed from other nodes (its inputs) also holds
the function that computes the inputs' gradients from the node's own gradient. The tests
in tests/pure/test_gradients.py compare each operation with finite differences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.integer]
Back = Callable[[Floats], tuple[Floats | None, ...]]


class Node:
    """A value in a differentiable computation."""

    def __init__(
        self,
        value: Floats,
        inputs: tuple[Node, ...] = (),
        back: Back | None = None,
        learns: bool = False,
    ) -> None:
        self.value = value
        self.inputs = inputs  # nodes from which the value was computed
        # Computes the gradients of the inputs from the gradient of the value.
        self.back = back
        # Needs a gradient.
        self.learns: bool = learns or any(node.learns for node in inputs)
        # Sum of the gradients from all uses of the node; None: not computed.
        self.grad: Floats | None = None


def backward(last: Node, gradient: Floats) -> None:
    """Computes the gradient of each node that learns and that `last` depends on, and
    adds the gradient to the node's `grad`. `gradient` is the gradient of `last`
    itself."""
    last.grad = gradient
    for node in reversed(_in_order(last)):
        if node.back is None or node.grad is None:
            continue
        for source, part in zip(node.inputs, node.back(node.grad), strict=True):
            if part is not None and source.learns:
                source.grad = part if source.grad is None else source.grad + part


def _in_order(last: Node) -> list[Node]:
    """Returns `last` and the nodes that it depends on, each after its inputs. Nodes
    that do not learn are left out."""
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
    """Returns a + b. An operand with fewer axes is repeated along the leading axes of
    the other operand."""
    return Node(a.value + b.value, (a, b), lambda g: (_summed(g, a), _summed(g, b)))


def times(a: Node, b: Node) -> Node:
    """Returns a * b, element by element. An operand with fewer axes is repeated along
    the leading axes of the other operand."""

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        of_a = _summed(gradient * b.value, a) if a.learns else None
        return of_a, _summed(gradient * a.value, b) if b.learns else None

    return Node(a.value * b.value, (a, b), back)


def _summed(gradient: Floats, node: Node) -> Floats:
    """Returns the gradient of an operand. If the operand's value was repeated along
    leading axes, the gradient is the sum over these axes."""
    shape = node.value.shape
    return (
        gradient
        if gradient.shape == shape
        else gradient.reshape(-1, *shape).sum(axis=0)
    )


def product(x: Node, w: Node) -> Node:
    """Returns x @ w for x (..., n_in) and a matrix w (n_in, n_out)."""
    n_in, n_out = w.value.shape
    rows = x.value.reshape(-1, n_in)

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        of_rows = gradient.reshape(-1, n_out)
        of_x = (of_rows @ w.value.T).reshape(x.value.shape) if x.learns else None
        return of_x, rows.T @ of_rows

    return Node((rows @ w.value).reshape(*x.value.shape[:-1], n_out), (x, w), back)


def matmul(a: Node, b: Node) -> Node:
    """Returns a @ b for a (..., n, m) and b (..., m, k) with equal leading axes."""

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        return gradient @ b.value.swapaxes(-1, -2), a.value.swapaxes(-1, -2) @ gradient

    return Node(a.value @ b.value, (a, b), back)


def relu(x: Node) -> Node:
    """Returns max(x, 0)."""
    positive = x.value > 0
    return Node(x.value * positive, (x,), lambda g: (g * positive,))


def softmax(x: Node) -> Node:
    """Returns the softmax of x: e^x, scaled so that the last axis sums to 1."""
    shares = shares_of(x.value)

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        mean = (gradient * shares).sum(axis=-1, keepdims=True)
        return (shares * (gradient - mean),)

    return Node(shares, (x,), back)


def shares_of(x: Floats) -> Floats:
    """Returns the softmax of an array: e^x, scaled so that the last axis sums to 1."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def rms_norm(x: Node, eps: float) -> Node:
    """Returns x divided by its root mean square along the last axis: T5's norm without
    its gain."""
    scale = 1 / np.sqrt((x.value * x.value).mean(axis=-1, keepdims=True) + eps)
    normed = x.value * scale

    def back(gradient: Floats) -> tuple[Floats | None, ...]:
        along = (gradient * normed).mean(axis=-1, keepdims=True)
        return (scale * (gradient - normed * along),)

    return Node(normed, (x,), back)


def standardize(x: Node, eps: float) -> Node:
    """Returns x (n, n_value) with mean 0 and variance 1 in each column: a batch norm
    without its gain and bias."""
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
    """Returns x with a different shape."""
    return Node(x.value.reshape(shape), (x,), lambda g: (g.reshape(x.value.shape),))


def transpose(x: Node, *axes: int) -> Node:
    """Returns x with its axes in a different order."""
    back_axes = np.argsort(axes)
    return Node(x.value.transpose(axes), (x,), lambda g: (g.transpose(back_axes),))
