"""Fits networks of dense layers with ReLUs between them, such as ProMoE's and
DuoServe-MoE's, to samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.random import Generator

from moegguf.learning.fitting import Batch, Trainee, accuracy
from moegguf.learning.gradients import Floats, Node, einsum, relu, standardize
from moegguf.native.events import Bools, Int64s

NORM_EPS = 1e-5
MOMENTUM = 0.1  # weight of one batch in a batch norm's running mean and variance
# Maximum number of validation samples; if there are more, only every k-th is used.
MOST_VALIDATION = 8192
VALIDATION_BATCH = 2048

Indices = Int64s
Examples = tuple[Floats, Floats]  # inputs (m, n_in) and choices (m, n_expert), 0 or 1
Layer = tuple[Node, Node]  # a matrix (n_in, n_out) and a bias (n_out,)
Matrix = tuple[Floats, Floats]  # a matrix (n_out, n_in) and a bias (n_out,)
# A function of the output of a layer and the layer's number. It computes the input of
# the next layer.
Between = Callable[[Node, int], Node]
Loss = Callable[[Node, Floats], Batch]


@dataclass(frozen=True)
class Samples:
    """Samples for training and validation. Samples are numbered from 0 to n - 1."""

    # (n,) True: the sample is only used to measure the accuracy after each epoch.
    validation: Bools
    # Function of m sample numbers; returns their inputs and choices.
    read: Callable[[Indices], Examples]


def dense(x: Node, layers: Sequence[Layer], between: Between) -> Node:
    """Returns the outputs (n, n_out) of dense layers for inputs `x` (n, n_in)."""
    for i, layer in enumerate(layers):
        if i > 0:
            x = between(x, i - 1)
        weight, bias = layer
        x = einsum("ni,io->no", x, weight) + bias
    return x


class BatchNorm:
    """A batch norm of `n` values, with the running means and variances of its
    inputs."""

    def __init__(self, n: int) -> None:
        ones = np.ones(n, np.float32)
        zeros = np.zeros(n, np.float32)
        self.gain = Node(ones.copy(), learns=True)
        self.bias = Node(zeros.copy(), learns=True)
        self.mean = Node(zeros)
        self.variance = Node(ones)
        self.nodes = [self.gain, self.bias, self.mean, self.variance]

    def __call__(self, x: Node) -> Node:
        """Returns x (n_samples, n) after the norm in a training step, and updates the
        running means and variances."""
        values = x.value
        n = len(values)
        unbias = n / max(1, n - 1)
        mean = values.mean(axis=0)
        variance = values.var(axis=0) * unbias
        updates = (self.mean, mean), (self.variance, variance)
        for running, found in updates:
            distance = found - running.value
            change = np.float32(MOMENTUM) * distance
            running.value = running.value + change
        normed = standardize(x, NORM_EPS)
        return normed * self.gain + self.bias

    def fold(self, weight: Floats, bias: Floats) -> Matrix:
        """Returns the matrix and bias of a layer that computes both the given layer and
        this norm of the layer's output."""
        spread = np.sqrt(self.variance.value + NORM_EPS)
        gain = self.gain.value / spread
        weight = weight * gain[:, np.newaxis]
        centred = bias - self.mean.value
        bias = centred * gain
        return weight, bias + self.bias.value


class FeedForward:
    """A network of dense layers. `sizes` lists the widths, from the input to the
    logits.

    `dropout` is the probability that a training step sets a hidden value to 0. If
    `norms` is True, a batch norm follows each hidden layer's matrix.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rng: Generator,
        dropout: float = 0.0,
        norms: bool = False,
    ) -> None:
        self._dropout = dropout
        self._rng = rng
        self._layers: list[Layer] = []
        for n_in, n_out in pairwise(sizes):
            most = 1 / np.sqrt(n_in)
            size = n_in, n_out
            weight = rng.uniform(-most, most, size)
            bias = rng.uniform(-most, most, n_out)
            layer = (
                Node(weight.astype(np.float32), learns=True),
                Node(bias.astype(np.float32), learns=True),
            )
            self._layers.append(layer)
        hidden = sizes[1:-1]
        if not norms:
            hidden = ()
        self._norms = [BatchNorm(n) for n in hidden]
        # All values that training changes.
        self.nodes: list[Node] = []
        for layer in self._layers:
            self.nodes += layer
        for norm in self._norms:
            self.nodes += norm.nodes

    def training_logits(self, inputs: Floats) -> Node:
        """Returns the logits (n, n_expert) for `inputs` in a training step. Batch norms
        use the means and variances of these inputs."""

        def between(x: Node, i: int) -> Node:
            if self._norms:
                x = self._norms[i](x)
            return dropped(relu(x), self._dropout, self._rng)

        return dense(Node(inputs), self._layers, between)

    def matrices(self) -> list[Matrix]:
        """Returns each layer's matrix W (n_out, n_in) and bias. A batch norm that
        follows a layer is folded into them."""
        found = [(weight.value.T, bias.value) for weight, bias in self._layers]
        for i, norm in enumerate(self._norms):
            found[i] = norm.fold(*found[i])
        return found


def logits(inputs: Floats, matrices: Sequence[Matrix]) -> Floats:
    """Returns the logits (n, n_expert) of a network, given as `FeedForward.matrices`
    returns it."""
    layers = []
    for weight, bias in matrices:
        layer = Node(weight.T), Node(bias)
        layers.append(layer)
    found = dense(Node(inputs), layers, lambda x, i: relu(x))
    return found.value


def dropped(x: Node, share: float, rng: Generator) -> Node:
    """Returns x after dropout: 0 for about `share` of the values. The others are
    divided by 1 - share, so the expected value stays the same."""
    if not share:
        return x
    drawn = rng.random(x.value.shape, np.float32)
    is_kept = drawn >= share
    factors = is_kept / np.float32(1 - share)
    return x * Node(factors)


class FeedForwardTrainee(Trainee):
    """A feed-forward network with the samples that it is fitted to. Each epoch draws up
    to `most` training samples at random. If `most` is 0, an epoch uses all of them."""

    def __init__(
        self,
        network: FeedForward,
        samples: Samples,
        loss: Loss,
        batch: int,
        most: int = 0,
    ) -> None:
        self.network = network
        self.nodes = network.nodes
        self._samples = samples
        self._loss = loss
        self._train = np.flatnonzero(~samples.validation)
        validation = np.flatnonzero(samples.validation)
        step = max(1, -(-len(validation) // MOST_VALIDATION))
        self._validation = validation[::step]
        n_train = len(self._train)
        self._most = min(most or n_train, n_train)
        self._batch = max(1, min(batch, self._most))

    @property
    def n_batches(self) -> int:
        """The number of batches in an epoch. All batches have the same size."""
        return self._most // self._batch

    def batches(self, rng: Generator) -> Iterator[Batch]:
        """Yields the logits, loss and gradient of each batch of an epoch. The samples
        are in random order; samples that do not fill a batch are left out."""
        n_batches = self.n_batches
        n_used = n_batches * self._batch
        order = rng.permutation(self._train)[:n_used]
        for part in order.reshape(n_batches, self._batch):
            inputs, chosen = self._samples.read(part)
            logits = self.network.training_logits(inputs)
            yield self._loss(logits, chosen)

    def validate(self) -> float:
        """Returns the accuracy on up to MOST_VALIDATION validation samples; 0 if there
        are none."""
        matrices = self.network.matrices()
        validation = self._validation
        n = len(validation)

        def found() -> Iterator[tuple[Floats, Floats]]:
            for start in range(0, n, VALIDATION_BATCH):
                end = start + VALIDATION_BATCH
                numbers = validation[start:end]
                inputs, chosen = self._samples.read(numbers)
                yield logits(inputs, matrices), chosen

        return accuracy(found())
