"""The tokens to fit on and those held out: free texts of this machine, and conversations of the dense model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moegguf.native import library
from predictors.models.demo import corpus
from predictors.models.moefication import talks

N_CTX = 512
KINDS = ("manual", "pydoc", "licence", "perl")
DOCUMENT_CHARS, PROMPT_CHARS = 4000, 200
N_HELDOUT = 40  # documents and conversations
HELDOUT_ROWS = 8  # of each, whose loss is measured
ANSWER_TOKENS = 192

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """Rows of N_CTX tokens; held-out ones by kind, and prompts of other lengths from the same held-out texts."""

    fit: Rows
    heldout: dict[str, Rows]
    prompts: list[dict[str, Any]]


def load(model: Path, talks_path: Path, n_text_rows: int, n_talks: int) -> Text:
    """So many rows of documents, evenly of each kind, and all rows of the conversations."""
    conversations = talks.load_or_make(talks_path, model, N_HELDOUT + n_talks)
    documents = [document for document in corpus.select(corpus.gather()) if document.kind in KINDS]
    heldout = {
        "text": [document.text[:DOCUMENT_CHARS] for document in documents if document.heldout][:N_HELDOUT],
        "talk": conversations[:N_HELDOUT],
    }
    llm = library.llama_cpp().Llama(str(model), vocab_only=True, verbose=False)

    def rows(texts: Iterable[str], at_most: int) -> Rows:
        tokens: list[int] = []
        for text in texts:
            tokens += llm.tokenize(text.encode(), add_bos=False, special=True)
            if len(tokens) >= at_most * N_CTX:
                break
        n_rows = min(len(tokens) // N_CTX, at_most)
        return np.array(tokens[: n_rows * N_CTX], np.int64).reshape(n_rows, N_CTX)

    def fitted(kind: str) -> Iterable[str]:
        return (d.text[:DOCUMENT_CHARS] for d in documents if d.kind == kind and not d.heldout)

    fit = [rows(fitted(kind), n_text_rows // len(KINDS)) for kind in KINDS]
    fit.append(rows(conversations[N_HELDOUT:], n_talks))
    measured = {kind: rows(texts, HELDOUT_ROWS) for kind, texts in heldout.items()}
    return Text(np.concatenate(fit), measured, [*map(continued, heldout["text"]), *map(asked, heldout["talk"])])


def continued(text: str) -> dict[str, Any]:
    """A prompt whose answer is the document itself, as `moegguf trace record` reads it."""
    end = N_CTX * 3
    return {"prompt": text[:PROMPT_CHARS], "completion": text[PROMPT_CHARS:end], "label": "text"}


def asked(conversation: str) -> dict[str, Any]:
    """A prompt with the conversation's question, which the model answers itself."""
    return {"prompt": talks.question(conversation), "n_predict": ANSWER_TOKENS, "label": "talk"}
