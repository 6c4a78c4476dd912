"""Computes a trained model's loss on held-out text: in torch, together with the loads
of the experts, or with llama.cpp from a GGUF file. Also generates answers with
llama.cpp."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moegguf.native import library
from recipes.demo.data import Corpus, Tokens
from recipes.demo.model import DemoModel
from recipes.demo.train import loss_of

LOSS_CTX = 512  # tokens per window
# Minimum number of windows to evaluate for each kind of text, if the text has that
# many. If a text has at least twice that many, only every n-th window is evaluated.
LEAST_WINDOWS = 10


@dataclass(frozen=True)
class KindLoss:
    """The mean loss over one kind of held-out text, computed in windows that do not
    overlap."""

    tokens: int  # length of the held-out text in tokens
    nats_per_token: float
    bits_per_byte: float


def windows(tokens: Tokens, n_ctx: int) -> NDArray[np.int64]:
    """Returns rows of n_ctx + 1 tokens, spread over the whole text. Tokens at the end
    that do not fill a row are left out. Raises ValueError if the text does not even
    fill one row."""
    n_rows = (len(tokens) - 1) // n_ctx
    if n_rows == 0:
        raise ValueError(
            f"{len(tokens)} held-out tokens do not fill one window of {n_ctx}"
        )
    step = max(1, n_rows // LEAST_WINDOWS)
    return np.stack(
        [tokens[i * n_ctx : (i + 1) * n_ctx + 1] for i in range(0, n_rows, step)]
    ).astype(np.int64)


def kind_loss(
    total: float, rows: NDArray[np.int64], n_tokens: int, n_bytes: int
) -> KindLoss:
    """Returns the mean loss per token and per byte. `total` is the summed loss of the
    rows, which were cut from a text of `n_tokens` tokens and `n_bytes` bytes."""
    scored = rows[:, 1:].size
    mean = total / scored
    return KindLoss(n_tokens, mean, mean * n_tokens / (n_bytes * math.log(2)))


@torch.no_grad()
def torch_losses(
    model: DemoModel, corpus: Corpus, n_ctx: int = LOSS_CTX
) -> tuple[dict[str, KindLoss], torch.Tensor]:
    """Returns the loss by kind of text. Also returns each expert's share of the
    router's choices: (n_layer, n_expert); each row sums to 1."""
    losses = {}
    load = torch.zeros(model.shape.n_layer, model.shape.n_expert)
    for kind, tokens in corpus.heldout.items():
        rows = windows(tokens, n_ctx)
        total = 0.0
        for chunk in torch.split(torch.from_numpy(rows), 8):
            total += (
                float(loss_of(model(chunk[:, :-1]), chunk[:, 1:]))
                * chunk[:, 1:].numel()
            )
            load += torch.stack([m.load for m in model.mixtures()]) * len(chunk)
        losses[kind] = kind_loss(total, rows, len(tokens), corpus.heldout_bytes[kind])
    return losses, load / load.sum(dim=1, keepdim=True)


def open_gguf(path: Path, n_ctx: int) -> Any:
    """Opens the file with llama.cpp on the CPU, and keeps the logits of every token."""
    options = {"n_ctx": n_ctx, "n_batch": n_ctx, "n_threads": 2, "n_gpu_layers": 0}
    return library.llama_cpp().Llama(
        str(path), logits_all=True, verbose=False, **options
    )


def mean_loss(llm: Any, rows: NDArray[np.int64]) -> float:
    """Returns the mean loss of rows of tokens, in nats per token. Each row is evaluated
    in an empty context."""

    def loss(row: NDArray[np.int64]) -> float:
        llm.n_tokens = 0
        llm.eval(row[:-1].tolist())
        logits = torch.from_numpy(np.array(llm.scores[: len(row) - 1]))
        return float(loss_of(logits[None], torch.from_numpy(row[None, 1:])))

    return float(np.mean([loss(row) for row in rows]))


def gguf_losses(
    path: Path, corpus: Corpus, n_ctx: int = LOSS_CTX
) -> dict[str, KindLoss]:
    """Returns the loss by kind of text, computed by llama.cpp over the same windows as
    in `torch_losses`."""
    llm = open_gguf(path, n_ctx)
    losses = {}
    for kind, tokens in corpus.heldout.items():
        rows = windows(tokens, n_ctx)
        total = mean_loss(llm, rows) * rows[:, 1:].size
        losses[kind] = kind_loss(total, rows, len(tokens), corpus.heldout_bytes[kind])
    return losses


def answers(path: Path, questions: list[str], n_ctx: int) -> dict[str, str]:
    """Returns {question: llama.cpp's greedy answer of at most 120 tokens}. Uses the
    file's chat template. Marks an answer that was cut off with " [cut]" at its end."""
    llm = open_gguf(path, n_ctx)
    found = {}
    for question in questions:
        reply = llm.create_chat_completion(
            [{"role": "user", "content": question}], temperature=0, max_tokens=120
        )
        choice = reply["choices"][0]
        cut = " [cut]" if choice["finish_reason"] == "length" else ""
        found[question] = str(choice["message"]["content"]) + cut
    return found
