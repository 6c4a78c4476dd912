"""Fits a network to expert choices with AdamW. Training can stop early if the
validation accuracy stops rising.

This module does not use traces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng

from moegguf.learning.gradients import Floats, Node, backward, shares_of
from moegguf.native.events import Bools

Choices = Floats | Bools
"""1 or True for the experts that a router chose."""

Report = Callable[[str, float], object]
"""Receives a description of the step that was just finished or begun, and the finished
share of the training (0 to 1)."""

WARM_SHARE = 0.1  # share of the steps in which the learning rate rises
# Maximum joint norm of all gradients; gradients with a larger joint norm are scaled
# down.
MOST_NORM = 1.0
BETAS = (0.9, 0.999)  # decay rates of Adam's two running averages
EPS = 1e-8


def no_report(step: str, share: float) -> None:
    """Ignores a report."""


@dataclass(frozen=True)
class Schedule:
    """The length of a training run and its learning rate. The rate rises at first and
    then falls until the last epoch (`rate_at`)."""

    epochs: int = 12
    batch: int = 512  # samples in a batch
    lr: float = 1e-3  # largest learning rate
    weight_decay: float = 0.01
    # Epochs without a better validation accuracy before the training stops; 0: runs all
    # epochs.
    patience: int = 3
    seed: int = 0


class Batch(NamedTuple):
    """The logits of a batch, with the loss and the loss's gradient with respect to the
    logits."""

    logits: Node
    loss: float
    gradient: Floats


class Trainee(ABC):
    """A network with the samples that it is fitted to."""

    nodes: list[Node]  # all values that training changes

    @property
    @abstractmethod
    def n_batches(self) -> int:
        """An upper bound on the number of batches in an epoch."""

    @abstractmethod
    def batches(self, rng: Generator) -> Iterator[Batch]:
        """Yields the batches of an epoch. Each batch is computed when it is reached,
        with the parameters at that time."""

    @abstractmethod
    def validate(self) -> float:
        """Returns the accuracy on validation samples, which are not used for
        training."""


@dataclass
class Fitted:
    """The losses and accuracies of a training run, epoch by epoch."""

    losses: list[float] = field(default_factory=list)  # mean loss of each epoch
    # Validation accuracy after each epoch.
    accuracies: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The best validation accuracy over all epochs; 0 before the first epoch."""
        return max(self.accuracies, default=0.0)

    @property
    def epochs(self) -> int:
        """The number of epochs that were run."""
        return len(self.accuracies)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the training run, for the header of a predictor's file."""
        return {
            "validation": round(self.best, 4),
            "epochs_run": self.epochs,
            "curve": [round(accuracy, 4) for accuracy in self.accuracies],
        }


class AdamW:
    """The optimizer AdamW (Adam with decoupled weight decay) for `parameters`."""

    def __init__(self, parameters: Iterable[Node], weight_decay: float) -> None:
        # Each parameter, with running averages of its gradient and of the gradient's
        # square.
        self._parameters = [
            (node, np.zeros_like(node.value), np.zeros_like(node.value))
            for node in parameters
        ]
        self._weight_decay = weight_decay
        self._n_steps = 0

    def step(self, rate: float) -> None:
        """Moves each parameter that has a gradient by one step at the learning rate
        `rate`, and clears the gradient. Gradients are first scaled down if their joint
        norm exceeds MOST_NORM."""
        self._n_steps += 1
        first, second = BETAS
        n_steps = self._n_steps
        rise = rate / (1 - first**n_steps)
        unbias = 1 / (1 - second**n_steps)
        scale = self._clipping()
        for node, mean, square in self._parameters:
            if node.grad is None:
                continue
            gradient = node.grad * scale
            change = gradient - mean
            mean += (1 - first) * change
            gradient *= gradient
            change = gradient - square
            square += (1 - second) * change
            node.value *= 1 - rate * self._weight_decay
            spread = np.sqrt(square * unbias)
            spread += EPS
            node.value -= rise * mean / spread
            node.grad = None

    def _clipping(self) -> np.float32:
        """Returns the factor for all gradients that limits their joint norm to
        MOST_NORM; 1 if the norm is at most MOST_NORM."""
        squares = sum(
            float(np.vdot(node.grad, node.grad))
            for node, _, _ in self._parameters
            if node.grad is not None
        )
        norm = max(squares**0.5, EPS)
        return np.float32(min(1.0, MOST_NORM / norm))


def rate_at(share: float) -> float:
    """Returns the factor of the learning rate after `share` of all steps. The factor
    rises from 0 to 1 over the first tenth, and then falls to 0 along half a cosine."""
    if share < WARM_SHARE:
        return share / WARM_SHARE
    angle = np.pi * (share - WARM_SHARE)
    angle /= 1 - WARM_SHARE
    return 0.5 + 0.5 * float(np.cos(angle))


def fit(trainee: Trainee, schedule: Schedule, report: Report = no_report) -> Fitted:
    """Trains the network in place. Leaves the network in the state of the first epoch
    with the best validation accuracy, or, if there are no validation samples, in the
    state of the last epoch."""
    rng = default_rng(schedule.seed)
    optimizer = AdamW(trainee.nodes, schedule.weight_decay)
    epochs = schedule.epochs
    patience = schedule.patience
    n_steps = epochs * trainee.n_batches
    fitted = Fitted()
    if n_steps == 0:
        return fitted
    done = 0
    for epoch in range(epochs):
        losses = []
        for batch in trainee.batches(rng):
            backward(batch.logits, batch.gradient)
            done += 1
            factor = rate_at(done / n_steps)
            optimizer.step(schedule.lr * factor)
            losses.append(batch.loss)
        mean_loss = float(np.mean(losses))
        fitted.losses.append(mean_loss)
        found = trainee.validate()
        # Always 0 without validation samples; the last epoch is then used.
        if found > fitted.best or fitted.best == 0:
            best_epoch = epoch
            best = [node.value.copy() for node in trainee.nodes]
        fitted.accuracies.append(found)
        share = (epoch + 1) / epochs
        report(f"epoch {epoch + 1}, {found:.1%} right on validation", share)
        n_worse = epoch - best_epoch
        if patience and n_worse >= patience:
            break
    for node, value in zip(trainee.nodes, best, strict=True):
        node.value = value
    return fitted


def n_right(scores: Floats, chosen: Choices) -> tuple[int, int]:
    """Returns (number of predicted experts that were chosen, number of chosen experts).
    Their ratio is ProMoE's ACCURACY (section 4.1).

    A sample's k highest-scoring experts are treated as predicted, where k is the
    largest number of experts chosen in any of the samples. `scores` and `chosen` are
    (n, n_expert).
    """
    total = int(chosen.sum())
    if total == 0:
        return 0, 0
    n_chosen = chosen.sum(axis=-1)
    k = int(n_chosen.max())
    ordered = np.argpartition(scores, -k, axis=-1)
    picked = ordered[..., -k:]
    is_right = np.take_along_axis(chosen, picked, axis=-1)
    return int(is_right.sum()), total


def accuracy(batches: Iterable[tuple[Floats, Choices]]) -> float:
    """Returns ProMoE's ACCURACY over batches of (scores, chosen); 0 if no expert was
    chosen. `n_right` defines it for one batch."""
    right = 0
    total = 0
    for scores, chosen in batches:
        n_hit, n_chosen = n_right(scores, chosen)
        right += n_hit
        total += n_chosen
    return right / max(1, total)


def cross_entropy(logits: Node, chosen: Floats) -> Batch:
    """Returns the cross-entropy of a softmax, averaged over samples. In the target, the
    chosen experts have equal shares.

    On two pairs of layers of a small model (one seed), this loss gave a higher accuracy
    than two other losses. The accuracy was 1 to 2 percentage points higher than with
    the KL divergence from the router's probabilities, and 2 to 4 points higher than
    with binary cross-entropy.
    """
    n_chosen = chosen.sum(axis=1, keepdims=True)
    wanted = chosen / n_chosen
    shares = shares_of(logits.value)
    terms = wanted * np.log(shares + 1e-12)
    sums = terms.sum(axis=1)
    loss = -sums.mean()
    n = np.float32(len(chosen))
    gradient = (shares - wanted) / n
    return Batch(logits, float(loss), gradient)


def binary_cross_entropy(
    logits: Node, chosen: Choices, known: Bools | None = None
) -> Batch:
    """Returns the binary cross-entropy of one sigmoid for each expert, averaged over
    experts and samples. If `known` is given, only samples for which `known` is True are
    used."""
    x = logits.value
    decay = np.exp(-np.abs(x))
    losses = np.maximum(x, 0) - x * chosen
    losses += np.log1p(decay)
    sigmoid = np.where(x >= 0, 1, decay)
    sigmoid /= 1 + decay
    gradient = sigmoid - chosen
    n = x.size
    if known is not None:
        is_used = known[..., np.newaxis]
        losses *= is_used
        gradient *= is_used
        n_known = max(1, int(known.sum()))
        n = n_known * x.shape[-1]
    loss = float(losses.sum() / n)
    gradient = gradient / np.float32(n)
    return Batch(logits, loss, gradient.astype(x.dtype))
