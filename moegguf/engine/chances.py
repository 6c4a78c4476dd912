"""How likely the model held a token, and which others: natural logarithms, from its logits before sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moegguf.engine.ask import TokenChance

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama


def chance_of(token: int, llm: Llama, n_top: int) -> TokenChance:
    """The chance of `token` after the last pass, and of the `n_top` likeliest tokens (it may be among them)."""
    logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
    most = logits.max()
    log_total = most + np.log(np.exp(logits - most, dtype=np.float64).sum())
    top = np.argpartition(logits, -n_top)[-n_top:] if n_top else np.empty(0, np.intp)
    top = top[np.argsort(-logits[top], kind="stable")]
    text = llm.vocabulary.text
    likeliest = tuple((text(int(other)), float(logits[other] - log_total)) for other in top)
    return TokenChance(text(token), float(logits[token] - log_total), likeliest)
