"""Which drafts a model can have: tokens guessed ahead, that the next pass verifies (moegguf.generate.drafting)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from moegguf.settings import parse_choice

if TYPE_CHECKING:
    from moegguf.engine.upstream import UpstreamLlama


def drafts_in_use(llm: UpstreamLlama, draft: str, batch_invariant: bool) -> str:
    """What drafts for a loaded model: "ngram" or "off". draft: what was asked for. batch_invariant: of the model.

    "auto" drafts where no bit of an answer depends on it. Raises OptionError for an unknown name.
    """
    chosen = parse_choice("draft", draft)
    if chosen == "off" or llm._ctx.memory is None or (chosen == "auto" and not batch_invariant):
        return "off"
    if llm._is_stateful:
        warnings.warn(
            "draft: this model's state cannot go back to before a token, so nothing is drafted.", stacklevel=3
        )
        return "off"
    if not batch_invariant:
        warnings.warn(
            "draft: here the last bits of a token depend on what is computed beside it: an answer may differ from one"
            " without drafts.",
            stacklevel=3,
        )
    return "ngram"
