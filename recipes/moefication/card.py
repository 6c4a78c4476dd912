"""The model's card, as JSON and as text: how the model was made, and its loss compared
with the dense model. The JSON also names the model's source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.demo.evaluate import mean_loss, open_gguf
from recipes.moefication.convert import Split
from recipes.moefication.network import Network
from recipes.moefication.text import N_CTX, Rows

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Give me three tips for learning a language.",
    "Explain what a computer program is.",
)


@dataclass(frozen=True)
class Card:
    """The facts about one converted model. Losses are on held-out text, in nats per
    token, computed by llama.cpp from the files."""

    made_from: str
    licence: str
    split: Split
    n_layer: int
    quant: str
    file_bytes: int
    expert_bytes: int
    fit_tokens: int
    trained_tokens: int
    heldout_tokens: Mapping[str, int]
    loss_dense: Mapping[str, float]
    loss: Mapping[str, float]
    unevenness: list[float]
    answers: Mapping[str, str]
    seconds: Mapping[str, float]

    def save(self, path: Path) -> None:
        """Writes the card as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def summary(self) -> str:
        """Returns the figures as a few lines of text."""
        split = self.split
        n_active = split.n_shared + split.n_expert_used * split.n_ff_exp
        n_neurons = split.n_shared + split.n_expert * split.n_ff_exp
        lines = [
            f"{self.n_layer} layers of {split.n_expert} experts, {split.n_expert_used} used,"
            f" {self.expert_bytes:,} bytes each ({self.quant});"
            f" {n_active} of {n_neurons} neurons active, {split.n_shared} shared; {self.file_bytes / 1e6:.1f} MB",
            f"fitted on {self.fit_tokens:,} tokens, trained on {self.trained_tokens:,}",
            *(
                f"held-out loss, {kind}: {self.loss[kind]:.3f} nats per token (dense: {dense:.3f})"
                for kind, dense in self.loss_dense.items()
            ),
            f"load of the experts, coefficient of variation: {np.mean(self.unevenness):.2f}"
            f" (layers: {min(self.unevenness):.2f} to {max(self.unevenness):.2f})",
            "seconds: "
            + ", ".join(
                f"{step} {seconds:.0f}" for step, seconds in self.seconds.items()
            ),
            *(f"> {question}\n{answer}" for question, answer in self.answers.items()),
        ]
        return "\n".join(lines)


def losses(path: Path, heldout: Mapping[str, Rows]) -> dict[str, float]:
    """Returns the mean loss of a GGUF file by kind of text, in nats per token."""
    llm = open_gguf(path, N_CTX)
    return {kind: mean_loss(llm, rows) for kind, rows in heldout.items()}


@torch.no_grad()
def unevenness(network: Network, heldout: Mapping[str, Rows]) -> list[float]:
    """Returns, for each layer, the coefficient of variation of the experts' loads,
    computed over the held-out rows."""
    loads: list[Tensor] = []
    counted = [
        layer.ffn.register_forward_pre_hook(
            lambda ffn, inputs: loads.append((ffn.weights(inputs[0]) > 0).sum((0, 1)))
        )
        for layer in network.layers
    ]
    for rows in heldout.values():
        network.hidden(torch.from_numpy(rows))
    for hook in counted:
        hook.remove()
    totals = torch.stack(loads).unflatten(0, (len(heldout), -1)).sum(dim=0).float()
    return [round(float(load.std(correction=0) / load.mean()), 3) for load in totals]
