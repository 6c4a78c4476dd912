"""What commands do before a model is loaded: find or pull it, choose its context."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.gguf.experts import ExpertLayout
    from moegguf.models.entry import ModelEntry


def find_or_pull(name: str) -> ModelEntry:
    """The entry called `name`; one of Hugging Face or of the library that is not on this machine is pulled first.

    Raises ModelNotFoundError, ModelNameError, PullError.
    """
    from moegguf.errors import ModelNotFoundError
    from moegguf.models.catalog import Catalog
    from moegguf.models.library import fetchable_name

    catalog = Catalog()
    try:
        return catalog.find(name)
    except ModelNotFoundError:
        if fetchable_name(name) is None:
            raise
    from moegguf.models.pull import pull
    from moegguf.terminal.progress import PullProgress

    with PullProgress() as progress:
        return pull(name, catalog, progress.report)


def silence_llama_log() -> None:
    """Turns off llama.cpp's log, which the bindings filter by this logger's level."""
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)


def warn_of_long_context(layout: ExpertLayout, requested: int | None) -> None:
    """Warns when more tokens are requested than the model was trained on."""
    trained = layout.hparams.n_ctx_train
    if requested and requested > trained:
        print_message(f"warning: a context of {requested} tokens is more than the {trained} the model was trained on.")


def context_size(layout: ExpertLayout, requested: int | None) -> int:
    """Tokens of context: as requested, else as planned; warns of a long one."""
    from moegguf.engine.load import plan_here

    warn_of_long_context(layout, requested)
    return requested or plan_here(layout).n_ctx
