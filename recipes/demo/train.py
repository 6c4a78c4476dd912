"""The training loop for all stages. A stage has a budget of wall time, which also
determines its learning rate."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.demo.data import IGNORED, Batch
from recipes.demo.model import DemoModel, with_rounded_weights

BALANCE_WEIGHT = 0.01
CHECKPOINT_SECONDS = 150.0
LOG_EVERY_STEPS = 20


@dataclass(frozen=True)
class Stage:
    """A stage of training: its data, its duration and its peak learning rate."""

    name: str
    minutes: float
    peak_lr: float
    batch: Callable[[int], Batch]
    rounded: bool = False  # True: trains with the weights rounded as in Q4_0


@dataclass
class Progress:
    """A stage's progress, which is saved in the stage's checkpoint and finally reported
    in the model card."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def learning_rate(stage: Stage, seconds: float) -> float:
    """Returns the learning rate. It rises linearly over the first 2 % of the stage's
    time, then falls linearly to 3 % of the peak."""
    done = min(1.0, seconds / (60 * stage.minutes))
    return stage.peak_lr * min(1.0, (done + 1e-4) / 0.02, 0.03 + 0.97 * (1 - done))


def optimiser(model: nn.Module) -> torch.optim.AdamW:
    """Returns an AdamW optimiser that applies weight decay only to matrices."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats per token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Writes a checkpoint to a temporary file, then replaces the old checkpoint with
    it."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
    }
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Loads a checkpoint if there is one, and returns the stage's progress so far."""
    if not path.exists():
        return Progress()
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def log_line(
    path: Path, model: DemoModel, progress: Progress, loss: Tensor, lr: float
) -> None:
    """Appends a line to the log: progress, loss, learning rate, speed, and how unevenly
    each layer's load is spread over its experts (coefficient of variation)."""
    uneven = [float(m.load.std(correction=0) / m.load.mean()) for m in model.mixtures()]
    line = {
        **asdict(progress),
        "loss": round(float(loss), 4),
        "lr": lr,
        "uneven": [round(u, 3) for u in uneven],
        "tokens_per_s": round(progress.tokens / progress.seconds, 1),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def run(stage: Stage, model: DemoModel, folder: Path) -> Progress:
    """Trains until the stage's minutes are used up. Resumes from `folder`/STAGE.pt if
    that file exists."""
    checkpoint, log = folder / f"{stage.name}.pt", folder / f"{stage.name}.jsonl"
    optimizer = optimiser(model)
    progress = resume(checkpoint, model, optimizer)
    forward = with_rounded_weights(model) if stage.rounded else model
    saved_at = progress.seconds
    while progress.seconds < 60 * stage.minutes:
        started = time.monotonic()
        lr = learning_rate(stage, progress.seconds)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = stage.batch(progress.steps)
        wanted = batch.targets != IGNORED
        loss = functional.cross_entropy(
            forward(batch.ids, batch.mask, batch.positions, wanted),
            batch.targets[wanted],
        )
        balance = torch.stack([m.balance_loss for m in model.mixtures()]).sum()
        torch.autograd.backward(loss + BALANCE_WEIGHT * balance)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.steps += 1
        progress.tokens += batch.ids.numel()
        progress.seconds += time.monotonic() - started
        if progress.steps % LOG_EVERY_STEPS == 0:
            log_line(log, model, progress, loss.detach(), lr)
        if progress.seconds - saved_at > CHECKPOINT_SECONDS:
            save(checkpoint, model, optimizer, progress)
            saved_at = progress.seconds
    save(checkpoint, model, optimizer, progress)
    return progress
