"""Fits networks of dense layers with ReLUs between them, such as ProMoE's and
DuoServe-MoE's, to samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moegguf.learning.fitting import Batch, Trainee, n_right
from moegguf.learning.gradients import (
    Floats,
    Node,
    add,
    product,
    relu,
    standardize,
    times,
)

NORM_EPS = 1e-5
MOMENTUM = 0.1  # weight of one batch in a batch norm's running mean and variance
# Maximum number of validation samples; if there are more, only every k-th is used.
MOST_VALIDATION = 8192
VALIDATION_BATCH = 2048

Indices = npt.NDArray[np.int64]
Loss = Callable[[Node, Floats], Batch]


@dataclass(frozen=True)
class Samples:
    """Samples for training and validation. Samples are numbered from 0 to n - 1."""

    # (n,) True: the sample is only used to measure the accuracy after each epoch.
    validation: npt.NDArray[np.bool_]
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
        self.parameters: dict[str, Node] = {}
        self.n_layers = len(sizes) - 1
        self.dropout = dropout
        # {name: running mean or variance of a batch norm}.
        self.running: dict[str, Floats] = {}
        for i, (n_in, n_out) in enumerate(pairwise(sizes)):
            most = 1 / np.sqrt(n_in)
            for name, size in (
                (f"layers.{i}.weight", (n_in, n_out)),
                (f"layers.{i}.bias", (n_out,)),
            ):
                self.parameters[name] = Node(
                    rng.uniform(-most, most, size).astype(np.float32), learns=True
                )
            if norms and i < self.n_layers - 1:
                self.parameters[f"norms.{i}.gain"] = Node(
                    np.ones(n_out, np.float32), learns=True
                )
                self.parameters[f"norms.{i}.bias"] = Node(
                    np.zeros(n_out, np.float32), learns=True
                )
                self.running[f"norms.{i}.mean"] = np.zeros(n_out, np.float32)
                self.running[f"norms.{i}.variance"] = np.ones(n_out, np.float32)

    def training_logits(self, inputs: Floats, rng: np.random.Generator) -> Node:
        """Returns the logits (n, n_expert) for `inputs` in a training step. Batch norms
        use the means and variances of these inputs."""
        x = Node(inputs)
        for i in range(self.n_layers):
            x = add(
                product(x, self.parameters[f"layers.{i}.weight"]),
                self.parameters[f"layers.{i}.bias"],
            )
            if i < self.n_layers - 1:
                x = relu(self._normed(i, x))
                if self.dropout:
                    x = times(x, Node(dropped(x.value.shape, self.dropout, rng)))
        return x

    def _normed(self, i: int, x: Node) -> Node:
        gain = self.parameters.get(f"norms.{i}.gain")
        if gain is None:
            return x
        n = len(x.value)
        found = {
            "mean": x.value.mean(axis=0),
            "variance": x.value.var(axis=0) * (n / max(1, n - 1)),
        }
        for name, values in found.items():
            running = self.running[f"norms.{i}.{name}"]
            self.running[f"norms.{i}.{name}"] = running + np.float32(MOMENTUM) * (
                values - running
            )
        return add(
            times(standardize(x, NORM_EPS), gain), self.parameters[f"norms.{i}.bias"]
        )

    def matrices(self) -> list[tuple[Floats, Floats]]:
        """Returns each layer's matrix W (n_out, n_in) and bias. A batch norm that
        follows a layer is folded into them."""
        found = []
        for i in range(self.n_layers):
            weight = self.parameters[f"layers.{i}.weight"].value.T
            bias = self.parameters[f"layers.{i}.bias"].value
            if f"norms.{i}.gain" in self.parameters:
                variance = self.running[f"norms.{i}.variance"]
                gain = self.parameters[f"norms.{i}.gain"].value / np.sqrt(
                    variance + NORM_EPS
                )
                weight = weight * gain[:, np.newaxis]
                bias = (
                    bias - self.running[f"norms.{i}.mean"]
                ) * gain + self.parameters[f"norms.{i}.bias"].value
            found.append((weight, bias))
        return found


def dropped(shape: tuple[int, ...], share: float, rng: np.random.Generator) -> Floats:
    """Returns random factors for dropout: 0 for about `share` of the values, and 1 / (1
    - share) for the others, so the expected value stays the same."""
    return (rng.random(shape, np.float32) >= share) / np.float32(1 - share)


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
        self.parameters = network.parameters
        self._samples = samples
        self._loss = loss
        self._train = np.flatnonzero(~samples.validation)
        validation = np.flatnonzero(samples.validation)
        self._validation = validation[:: max(1, -(-len(validation) // MOST_VALIDATION))]
        self._most = min(most or len(self._train), len(self._train))
        self._batch = max(1, min(batch, self._most))
        self._rng = rng

    @property
    def n_batches(self) -> int:
        """The number of batches in an epoch. All batches have the same size."""
        return self._most // self._batch

    def batches(self, rng: np.random.Generator) -> Iterator[Batch]:
        """Yields the logits, loss and gradient of each batch of an epoch. The samples
        are in random order; samples that do not fill a batch are left out."""
        order = rng.permutation(self._train)[: self.n_batches * self._batch]
        for part in order.reshape(self.n_batches, self._batch):
            inputs, chosen = self._samples.read(part)
            yield self._loss(self.network.training_logits(inputs, self._rng), chosen)

    def validate(self) -> float:
        """Returns the accuracy on up to MOST_VALIDATION validation samples; 0 if there
        are none."""
        matrices = self.network.matrices()
        right = total = 0
        for start in range(0, len(self._validation), VALIDATION_BATCH):
            x, chosen = self._samples.read(
                self._validation[start : start + VALIDATION_BATCH]
            )
            for i, (weight, bias) in enumerate(matrices):
                x = x @ weight.T + bias
                x = np.maximum(x, 0) if i < len(matrices) - 1 else x
            n, of = n_right(x, chosen)
            right += n
            total += of
        return right / max(1, total)

    def state(self) -> dict[str, Floats]:
        """Returns a copy of the parameters and of the batch norms' means and
        variances."""
        return super().state() | dict(self.network.running)

    def restore(self, state: dict[str, Floats]) -> None:
        """Sets parameters, means and variances to a state that `state()` returned."""
        super().restore(state)
        self.network.running = {name: state[name] for name in self.network.running}
