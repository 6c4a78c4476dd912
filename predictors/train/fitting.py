"""One way to fit a network to choices of experts: AdamW, batches by random order, stopped when it no longer helps.

Knows tensors, not traces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Schedule:
    """How long and how fast; the rate is annealed over all epochs.

    patience: epochs without a better validation accuracy before it stops; 0: it runs them all.
    """

    epochs: int = 12
    batch: int = 512
    lr: float = 1e-3
    weight_decay: float = 0.01
    patience: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Samples:
    """Inputs (n, n_in) and choices (n, n_expert) of 0 and 1; validation says which samples are for stopping only."""

    inputs: Tensor
    chosen: Tensor
    validation: Tensor


@dataclass(frozen=True)
class Fitted:
    """The course of a training: validation accuracy after each epoch. The network is left at the best one."""

    curve: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """The best epoch's."""
        return max(self.curve)

    def __str__(self) -> str:
        return f"{self.accuracy:.1%} on validation after {len(self.curve)} epochs"


def accuracy(scores: Tensor, chosen: Tensor) -> float:
    """ProMoE's ACCURACY (section 4.1): share of the most probable experts that are right, as many as a token uses."""
    k = max(1, int(chosen.sum(dim=1).max()))
    picked = torch.zeros_like(chosen).scatter_(1, scores.topk(k, dim=1).indices, 1.0)
    return float((picked * chosen).sum() / chosen.sum())


def fit(
    network: nn.Module, samples: Samples, loss_of: Callable[[Tensor, Tensor], Tensor], schedule: Schedule
) -> Fitted:
    """Trains the network in place, and leaves it at its best epoch."""
    generator = torch.Generator().manual_seed(schedule.seed)
    train = torch.nonzero(~samples.validation).ravel()
    batch = min(schedule.batch, len(train))
    steps = schedule.epochs * (len(train) // batch)
    optimizer = torch.optim.AdamW(network.parameters(), lr=schedule.lr, weight_decay=schedule.weight_decay)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.lr, total_steps=steps + 1)
    curve = list[float]()
    best_epoch = 0
    state = network.state_dict()
    for epoch in range(schedule.epochs):
        network.train()
        order = train[torch.randperm(len(train), generator=generator)]
        for part in order.split(batch)[: len(train) // batch]:
            optimizer.zero_grad()
            loss_of(network(samples.inputs[part]), samples.chosen[part]).backward()
            optimizer.step()
            rates.step()
        curve.append(validate(network, samples))
        if curve[epoch] > max(curve[:epoch], default=-1.0):
            best_epoch = epoch
            state = copy.deepcopy(network.state_dict())
        elif schedule.patience and epoch - best_epoch >= schedule.patience:
            break
    network.load_state_dict(state)
    network.eval()
    return Fitted(tuple(curve))


@torch.no_grad()
def validate(network: nn.Module, samples: Samples) -> float:
    """Accuracy on the validation samples."""
    network.eval()
    return accuracy(network(samples.inputs[samples.validation]), samples.chosen[samples.validation])
