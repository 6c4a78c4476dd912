"""Loads the tokens to fit on and the held-out tokens, from texts that any machine can
fetch (`predictors/texts.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moegguf.native import library
from predictors import texts

N_CTX = 256
DOCUMENT_CHARS = 2000
HELDOUT_ROWS = 4  # number of held-out rows of each kind of text

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """Rows of N_CTX tokens each."""

    fit: Rows  # rows of tokens to fit on, taken from each kind of text in turn
    heldout: dict[str, Rows]  # held-out rows, {kind of text: rows}


def load(model: Path, folder: Path, n_rows: int) -> Text:
    """Returns the tokens of the text, with at most n_rows rows to fit on. Raises
    ValueError if a text cannot be fetched."""
    found = texts.load(folder)
    llm = library.llama_cpp().Llama(str(model), vocab_only=True, verbose=False)

    def rows(documents: Iterable[str], at_most: int) -> Rows:
        tokens: list[int] = []
        for document in documents:
            tokens += llm.tokenize(
                document[:DOCUMENT_CHARS].encode(), add_bos=False, special=True
            )
            if len(tokens) >= at_most * N_CTX:
                break
        n_rows = min(len(tokens) // N_CTX, at_most)
        return np.array(tokens[: n_rows * N_CTX], np.int64).reshape(n_rows, N_CTX)

    fit = [rows(kind.fit, -(-n_rows // len(found))) for kind in found.values()]
    longest = max(map(len, fit))
    mixed = [part[at] for at in range(longest) for part in fit if at < len(part)]
    heldout = {name: rows(kind.heldout, HELDOUT_ROWS) for name, kind in found.items()}
    return Text(np.stack(mixed[:n_rows]), heldout)
