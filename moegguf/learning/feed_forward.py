"""Fits networks of dense layers with ReLUs between them, such as ProMoE's and
DuoServe-MoE's, to samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moegguf.learning.fitting import Batch, Trainee, n_right
from moegguf.learning.gradients import Floats, Node, product, relu, standardize
from moegguf.native.events import Bools, Int64s

NORM_EPS = 1e-5
MOMENTUM = 0.1  # weight of one batch in a batch norm's running mean and variance
# Maximum number of validation samples; if there are more, only every k-th is used.
MOST_VALIDATION = 8192
VALIDATION_BATCH = 2048

Indices = Int64s
Loss = Callable[[Node, Floats], Batch]


@dataclass(frozen=True)
class Samples:
    """Samples for training and validation. Samples are numbered from 0 to n - 1."""

    # (n,) True: the sample is only used to measure the accuracy after each epoch.
    validation: Bools
    # Function of m sample numbers; returns inputs (m, n_in) and choices (m, n_expert),
    # 0 or 1
    read: Callable[[Indices], tuple[Floats, Floats]]


class FeedForward:
    """A network of dense layers. `sizes` lists the widths, from the input to the
    logits.

    `dropout` is the probability that a training step sets a hidden value to 0. If
    `norms` is True, a batch norm follows each hidden layer's matrix.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rng: np.random.Generator,
        dropout: float = 0.0,
        norms: bool = False,
    ) -> None:
        self.n_layers = len(sizes) - 1
        self.dropout = dropout
        # Parameters, and the running means and variances of batch norms.
        self.nodes: dict[str, Node] = {}
        for i, (n_in, n_out) in enumerate(pairwise(sizes)):
            most = 1 / np.sqrt(n_in)
            weight = rng.uniform(-most, most, (n_in, n_out))
            bias = rng.uniform(-most, most, n_out)
            self._add(f"layers.{i}.weight", weight)
            self._add(f"layers.{i}.bias", bias)
            if norms and i < self.n_layers - 1:
                self._add(f"norms.{i}.gain", np.ones(n_out))
                self._add(f"norms.{i}.bias", np.zeros(n_out))
                self._add(f"norms.{i}.mean", np.zeros(n_out), learns=False)
                self._add(f"norms.{i}.variance", np.ones(n_out), learns=False)

    def _add(self, name: str, value: Floats, learns: bool = True) -> None:
        value = value.astype(np.float32)
        self.nodes[name] = Node(value, learns=learns)

    def training_logits(self, inputs: Floats, rng: np.random.Generator) -> Node:
        """Returns the logits (n, n_expert) for `inputs` in a training step. Batch norms
        use the means and variances of these inputs."""
        x = Node(inputs)
        for i in range(self.n_layers):
            weight = self.nodes[f"layers.{i}.weight"]
            x = product(x, weight) + self.nodes[f"layers.{i}.bias"]
            if i == self.n_layers - 1:
                return x
            x = relu(self._normed(i, x))
            if self.dropout:
                factors = dropped(x.value.shape, self.dropout, rng)
                x = x * Node(factors)
        return x

    def _normed(self, i: int, x: Node) -> Node:
        gain = self.nodes.get(f"norms.{i}.gain")
        if gain is None:
            return x
        n = len(x.value)
        unbias = n / max(1, n - 1)
        variance = x.value.var(axis=0) * unbias
        found = {"mean": x.value.mean(axis=0), "variance": variance}
        for name, values in found.items():
            running = self.nodes[f"norms.{i}.{name}"]
            change = np.float32(MOMENTUM) * (values - running.value)
            running.value = running.value + change
        return standardize(x, NORM_EPS) * gain + self.nodes[f"norms.{i}.bias"]

    def matrices(self) -> list[tuple[Floats, Floats]]:
        """Returns each layer's matrix W (n_out, n_in) and bias. A batch norm that
        follows a layer is folded into them."""
        values = {name: node.value for name, node in self.nodes.items()}
        found = []
        for i in range(self.n_layers):
            weight = values[f"layers.{i}.weight"].T
            bias = values[f"layers.{i}.bias"]
            if f"norms.{i}.gain" in values:
                spread = np.sqrt(values[f"norms.{i}.variance"] + NORM_EPS)
                gain = values[f"norms.{i}.gain"] / spread
                weight = weight * gain[:, np.newaxis]
                bias = (bias - values[f"norms.{i}.mean"]) * gain
                bias = bias + values[f"norms.{i}.bias"]
            found.append((weight, bias))
        return found


def dropped(shape: tuple[int, ...], share: float, rng: np.random.Generator) -> Floats:
    """Returns random factors for dropout: 0 for about `share` of the values, and 1 / (1
    - share) for the others, so the expected value stays the same."""
    is_kept = rng.random(shape, np.float32) >= share
    return is_kept / np.float32(1 - share)


class FeedForwardTrainee(Trainee):
    """A feed-forward network with the samples that it is fitted to. Each epoch draws up
    to `most` training samples at random. If `most` is 0, an epoch uses all of them."""

    def __init__(
        self,
        network: FeedForward,
        samples: Samples,
        loss: Loss,
        batch: int,
        most: int,
        rng: np.random.Generator,
    ) -> None:
        self.network = network
        self.nodes = list(network.nodes.values())
        self._samples = samples
        self._loss = loss
        self._train = np.flatnonzero(~samples.validation)
        validation = np.flatnonzero(samples.validation)
        step = max(1, -(-len(validation) // MOST_VALIDATION))
        self._validation = validation[::step]
        n_train = len(self._train)
        self._most = min(most or n_train, n_train)
        self._batch = max(1, min(batch, self._most))
        self._rng = rng

    @property
    def n_batches(self) -> int:
        """The number of batches in an epoch. All batches have the same size."""
        return self._most // self._batch

    def batches(self, rng: np.random.Generator) -> Iterator[Batch]:
        """Yields the logits, loss and gradient of each batch of an epoch. The samples
        are in random order; samples that do not fill a batch are left out."""
        n_used = self.n_batches * self._batch
        order = rng.permutation(self._train)[:n_used]
        for part in order.reshape(self.n_batches, self._batch):
            inputs, chosen = self._samples.read(part)
            logits = self.network.training_logits(inputs, self._rng)
            yield self._loss(logits, chosen)

    def validate(self) -> float:
        """Returns the accuracy on up to MOST_VALIDATION validation samples; 0 if there
        are none."""
        *hidden, (last, last_bias) = self.network.matrices()
        right = total = 0
        n = len(self._validation)
        for start in range(0, n, VALIDATION_BATCH):
            numbers = self._validation[start : start + VALIDATION_BATCH]
            x, chosen = self._samples.read(numbers)
            for weight, bias in hidden:
                x = np.maximum(x @ weight.T + bias, 0)
            logits = x @ last.T + last_bias
            n_hit, n_chosen = n_right(logits, chosen)
            right += n_hit
            total += n_chosen
        return right / max(1, total)
