"""Stores the tokens of the corpus on disk, and builds training batches. The batch for a
given step number is the same in every run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from recipes.demo import corpus
from recipes.demo.tokenizer import END_OF_TEXT, special_id

IGNORED = -100
Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens for one training step."""

    ids: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    # (B, 1, T, T), True where a token attends to another token; None: causal attention.
    mask: Tensor | None = None
    positions: Tensor | None = None  # (B, T); None: 0, 1, 2 and so on


@dataclass(frozen=True)
class Corpus:
    """The tokens to train on, in one array for all kinds of text, and the held-out
    tokens of each kind. The keys of the dictionaries are kinds of text."""

    train: Tokens
    train_tokens: dict[str, int]  # number of tokens
    heldout: dict[str, Tokens]
    heldout_bytes: dict[str, int]  # size of the held-out text of each kind, in bytes


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokens:
    """Returns the concatenated tokens of all texts, with END_OF_TEXT after each
    text."""
    end = special_id(tokenizer, END_OF_TEXT)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return np.array(
        [i for encoding in encodings for i in (*encoding.ids, end)], dtype=np.uint16
    )


def load(path: Path) -> Corpus:
    """Reads the file that `save` wrote."""
    arrays = np.load(path)
    kinds = [kind for kind in corpus.KINDS if f"heldout.{kind}" in arrays]
    return Corpus(
        train=arrays["train"],
        train_tokens={kind: int(arrays[f"train_tokens.{kind}"]) for kind in kinds},
        heldout={kind: arrays[f"heldout.{kind}"] for kind in kinds},
        heldout_bytes={kind: int(arrays[f"heldout_bytes.{kind}"]) for kind in kinds},
    )


def save(
    path: Path, tokenizer: Tokenizer, documents: Sequence[corpus.Document]
) -> None:
    """Tokenises the corpus and saves it as one .npz file. A kind of text without
    held-out documents is left out."""
    arrays: dict[str, NDArray[Any]] = {}
    train = []
    for kind in corpus.KINDS:
        heldout = [d.text for d in documents if d.kind == kind and d.heldout]
        if not heldout:
            continue
        tokens = encode(
            tokenizer, [d.text for d in documents if d.kind == kind and not d.heldout]
        )
        train.append(tokens)
        arrays[f"train_tokens.{kind}"] = np.array(len(tokens))
        arrays[f"heldout.{kind}"] = encode(tokenizer, heldout)
        arrays[f"heldout_bytes.{kind}"] = np.array(
            sum(len(text.encode()) for text in heldout)
        )
    np.savez(path, allow_pickle=False, train=np.concatenate(train), **arrays)


class Windows:
    """The training tokens cut into windows. Each window occurs once per epoch, in a
    random order that the seed determines."""

    def __init__(self, tokens: Tokens, n_ctx: int, seed: int = 0) -> None:
        self.rows = tokens[: (len(tokens) - 1) // n_ctx * n_ctx + 1]
        self.n_ctx, self.seed = n_ctx, seed
        self.n_windows = (len(tokens) - 1) // n_ctx
        self.epoch, self.order = -1, np.arange(0)

    def window(self, index: int) -> Tokens:
        """Returns the window (n_ctx + 1 tokens) at `index` in an endless sequence of
        epochs."""
        epoch, position = divmod(index, self.n_windows)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(
                self.n_windows
            )
        start = int(self.order[position]) * self.n_ctx
        return self.rows[start : start + self.n_ctx + 1]

    def batch(self, step: int, n_rows: int) -> Batch:
        """Returns the `n_rows` windows of this step as a batch."""
        rows = [self.window(step * n_rows + i).astype(np.int64) for i in range(n_rows)]
        ids = (
            torch.from_numpy(np.stack(rows))
            if rows
            else torch.zeros(0, self.n_ctx + 1, dtype=torch.int64)
        )
        return Batch(ids[:, :-1], ids[:, 1:])


class Lengths:
    """Builds batches of windows. The length and number of the windows change from step
    to step."""

    def __init__(self, tokens: Tokens, steps: Sequence[tuple[int, int]]) -> None:
        self.steps = steps
        self.windows = {n_ctx: Windows(tokens, n_ctx) for n_ctx, _ in steps}

    def batch(self, step: int) -> Batch:
        """Returns the batch of this step. `steps` lists pairs (row length, number of
        rows), which are used in turn."""
        n_ctx, n_rows = self.steps[step % len(self.steps)]
        return self.windows[n_ctx].batch(step, n_rows)
