"""Reverse-mode differentiation of the operations in the predictors' networks.

A node holds a value. A node that was computed from other nodes (its inputs) also holds
the function that computes the inputs' gradients from the node's own gradient. The tests
in tests/pure/test_gradients.py compare each operation with finite differences.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.integer]
Gradients = tuple[Floats | None, ...]  # one for each input of a node
Back = Callable[[Floats], Gradients]


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

    def __add__(self, other: Node) -> Node:
        """Returns the sum. An operand with fewer axes is repeated along the leading
        axes of the other operand."""

        def back(gradient: Floats) -> Gradients:
            return _summed(gradient, self), _summed(gradient, other)

        total = self.value + other.value
        return Node(total, (self, other), back)

    def __mul__(self, other: Node) -> Node:
        """Returns the product, element by element. An operand with fewer axes is
        repeated along the leading axes of the other operand."""

        def back(gradient: Floats) -> Gradients:
            of_self = None
            of_other = None
            if self.learns:
                of_self = _summed(gradient * other.value, self)
            if other.learns:
                of_other = _summed(gradient * self.value, other)
            return of_self, of_other

        product = self.value * other.value
        return Node(product, (self, other), back)


def backward(last: Node, gradient: Floats) -> None:
    """Computes the gradient of each node that learns and that `last` depends on, and
    adds the gradient to the node's `grad`. `gradient` is the gradient of `last`
    itself."""
    last.grad = gradient
    for node in reversed(_in_order(last)):
        if node.back is None:
            continue
        if node.grad is None:
            continue
        parts = node.back(node.grad)
        for source, part in zip(node.inputs, parts, strict=True):
            if part is None:
                continue
            if not source.learns:
                continue
            if source.grad is not None:
                part = source.grad + part
            source.grad = part


def _in_order(last: Node) -> list[Node]:
    """Returns `last` and the nodes that it depends on, each after its inputs. Nodes
    that do not learn are left out."""
    order: list[Node] = []
    seen: set[int] = set()

    def visit(node: Node) -> None:
        if id(node) in seen:
            return
        if not node.learns:
            return
        seen.add(id(node))
        for source in node.inputs:
            visit(source)
        order.append(node)

    visit(last)
    return order


def _summed(gradient: Floats, node: Node) -> Floats:
    """Returns the gradient of an operand. If the operand's value was repeated along
    leading axes, the gradient is the sum over these axes."""
    shape = node.value.shape
    if gradient.shape == shape:
        return gradient
    repeated = gradient.reshape(-1, *shape)
    return repeated.sum(axis=0)


def einsum(axes: str, a: Node, b: Node) -> Node:
    """Returns the sum of products that `axes` describes, such as "ni,oi->no", as
    numpy's einsum does. Each axis of an operand is also an axis of the other operand or
    of the result."""
    of_a, of_b, of_result = re.split(",|->", axes)

    def back(gradient: Floats) -> Gradients:
        to_a = None
        to_b = None
        if a.learns:
            axes_a = f"{of_result},{of_b}->{of_a}"
            to_a = _contracted(axes_a, gradient, b.value)
        if b.learns:
            axes_b = f"{of_a},{of_result}->{of_b}"
            to_b = _contracted(axes_b, a.value, gradient)
        return to_a, to_b

    found = _contracted(axes, a.value, b.value)
    return Node(found, (a, b), back)


def _contracted(axes: str, a: Floats, b: Floats) -> Floats:
    """Returns numpy's einsum, computed with a matrix product, in C order.

    The operands change places, because numpy 2.4 multiplies the second one by the
    first, and then need not copy a result into C order.
    """
    operands, result = axes.split("->")
    of_a, of_b = operands.split(",")
    swapped = f"{of_b},{of_a}->{result}"
    found: Floats = np.einsum(swapped, b, a, optimize=True, order="C")
    return found


def relu(x: Node) -> Node:
    """Returns max(x, 0)."""
    positive = x.value > 0

    def back(gradient: Floats) -> Gradients:
        return (gradient * positive,)

    kept = x.value * positive
    return Node(kept, (x,), back)


def softmax(x: Node) -> Node:
    """Returns the softmax of x: e^x, scaled so that the last axis sums to 1."""
    shares = shares_of(x.value)

    def back(gradient: Floats) -> Gradients:
        products = gradient * shares
        mean = products.sum(axis=-1, keepdims=True)
        centred = gradient - mean
        return (shares * centred,)

    return Node(shares, (x,), back)


def shares_of(x: Floats) -> Floats:
    """Returns the softmax of an array: e^x, scaled so that the last axis sums to 1."""
    largest = x.max(axis=-1, keepdims=True)
    powers = np.exp(x - largest)
    return powers / powers.sum(axis=-1, keepdims=True)


def rms_norm(x: Node, eps: float) -> Node:
    """Returns x divided by its root mean square along the last axis: T5's norm without
    its gain."""
    values = x.value
    squares = values * values
    mean_square = squares.mean(axis=-1, keepdims=True)
    scale = 1 / np.sqrt(mean_square + eps)
    normed = values * scale

    def back(gradient: Floats) -> Gradients:
        products = gradient * normed
        along = products.mean(axis=-1, keepdims=True)
        across = gradient - normed * along
        return (scale * across,)

    return Node(normed, (x,), back)


def standardize(x: Node, eps: float) -> Node:
    """Returns x (n, n_value) with mean 0 and variance 1 in each column: a batch norm
    without its gain and bias."""
    values = x.value
    variance = values.var(axis=0)
    scale = 1 / np.sqrt(variance + eps)
    centred = values - values.mean(axis=0)
    normed = centred * scale

    def back(gradient: Floats) -> Gradients:
        products = gradient * normed
        along = products.mean(axis=0)
        without_mean = gradient - gradient.mean(axis=0)
        across = without_mean - normed * along
        return (scale * across,)

    return Node(normed, (x,), back)


def rows_of(table: Node, ids: Integers) -> Node:
    """Returns table[ids], the rows of a matrix."""

    def back(gradient: Floats) -> Gradients:
        of_table = np.zeros_like(table.value)
        np.add.at(of_table, ids, gradient)
        return (of_table,)

    return Node(table.value[ids], (table,), back)
