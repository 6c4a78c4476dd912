"""Trains the converted network towards the dense network's probabilities, with weights
rounded as in the file.

This is knowledge distillation (Hinton et al., 2015). Only the down matrices learn, so
that they compensate for the experts that were not chosen. The routers do not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.moefication.convert import Rounding
from recipes.moefication.network import Network

LOG_EVERY_STEPS = 4


@dataclass(frozen=True)
class Schedule:
    """The duration and learning rate of a training run. The rate first rises, then
    falls to zero."""

    minutes: float
    n_rows: int = 2  # number of text rows in a step
    peak_lr: float = 3e-4
    save_every_steps: int = 8

    def learning_rate(self, seconds: float) -> float:
        """Returns the learning rate. It rises linearly over the first 5 % of the time,
        then falls linearly to zero."""
        done = min(1.0, seconds / max(60 * self.minutes, 1e-9))
        return self.peak_lr * min(1.0, (done + 1e-3) / 0.05, 1.0 - done)


def distil(
    network: Network,
    dense: Network,
    rows: Tensor,
    rounded: Rounding,
    schedule: Schedule,
    progress: Callable[[str], None],
    checkpoint: Path | None = None,
) -> int:
    """Trains until the schedule's minutes are used up; returns the number of tokens
    trained on. rows: (n_rows, T).

    checkpoint: a file that is updated during the training. If it exists at the start,
    the training continues from it, and the earlier minutes and tokens are included in
    the counts.
    """
    trained = {
        name: parameter
        for name, parameter in network.named_parameters()
        if name.endswith(".ffn.ffn.down")
    }
    optimizer = torch.optim.AdamW(trained.values(), betas=(0.9, 0.95), weight_decay=0.0)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        step, before_s = _resume(checkpoint, trained, optimizer)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    start = time.monotonic() - before_s
    while (seconds := time.monotonic() - start) < 60 * schedule.minutes:
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(seconds)
        ids = rows[
            order[
                torch.arange(step * schedule.n_rows, (step + 1) * schedule.n_rows)
                % len(rows)
            ]
        ]
        loss = divergence(
            network, dense, {n: rounded(p) for n, p in trained.items()}, ids
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        step += 1
        if step % LOG_EVERY_STEPS == 0:
            n_tokens = step * schedule.n_rows * rows.shape[1]
            progress(
                f"{n_tokens} tokens, {seconds:.0f} s: divergence {float(loss.detach()):.3f}"
            )
        if checkpoint is not None and step % schedule.save_every_steps == 0:
            torch.save(
                {
                    "trained": trained,
                    "optimizer": optimizer.state_dict(),
                    "at": (step, seconds),
                },
                checkpoint,
            )
    network.requires_grad_(False)
    return step * schedule.n_rows * rows.shape[1]


def _resume(
    checkpoint: Path | None,
    trained: dict[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
) -> tuple[int, float]:
    """Loads the checkpoint if it exists. Returns the number of steps and seconds of
    training so far."""
    if checkpoint is None or not checkpoint.exists():
        return 0, 0.0
    saved = torch.load(checkpoint)
    for name, parameter in trained.items():
        parameter.copy_(saved["trained"][name].detach())
    optimizer.load_state_dict(saved["optimizer"])
    step, seconds = saved["at"]
    return int(step), float(seconds)


def divergence(
    network: Network, dense: Network, weights: dict[str, Tensor], ids: Tensor
) -> Tensor:
    """Returns the mean Kullback-Leibler divergence in nats between the next-token
    probabilities of `dense` and of this network.

    weights: parameters that replace parameters of `network`.
    """
    with torch.no_grad():
        wanted = dense(ids).log_softmax(dim=-1)
    given = torch.func.functional_call(network, weights, (ids,)).log_softmax(dim=-1)
    return functional.kl_div(
        given.flatten(0, 1),
        wanted.flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )
