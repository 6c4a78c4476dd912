"""Which drafts a model can have, and the second, smaller model that may write them: tokens guessed ahead, that the next
pass verifies (moegguf.generate.drafting)."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegguf.errors import AllocationError, ModelFormatError, ModelNotFoundError, OptionError
from moegguf.gguf.experts import read_layout
from moegguf.models.catalog import find_model
from moegguf.native import library
from moegguf.native.drafts import Drafts
from moegguf.options import DRAFTS

if TYPE_CHECKING:
    from moegguf.engine.upstream import UpstreamLlama

N_MAX = 24  # tokens of a draft
NGRAM_KEYS = (8, 3)  # tokens that repeat before what is drafted


class DraftModel:
    """A smaller model of the same vocabulary, on the CPU, loaded before the model whose tokens it guesses, so that the
    plan of that one knows what is left of the memory.

    Raises OptionError where there is no such model, ModelFormatError.
    """

    def __init__(self, model: str) -> None:
        self._bindings, self._model, self._context = library.llama_cpp(), None, None
        try:
            path = os.fspath(find_model(model))
        except ModelNotFoundError as error:
            raise OptionError(f"draft={model[:60]!r} is none of {', '.join(DRAFTS)}, nor a model: {error}") from None
        read_layout(path)
        params = self._bindings.llama_model_default_params()
        params.n_gpu_layers, params.use_mmap = 0, False
        self._model = self._bindings.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise ModelFormatError(f"draft: llama.cpp cannot load {Path(path).name}; verbose=True shows why.")

    def open_context(self, llm: UpstreamLlama, n_seq: int, n_threads: int) -> int:
        """The address of a context for the sequences of `llm`. Raises AllocationError."""
        bindings, params = self._bindings, self._bindings.llama_context_default_params()
        params.n_ctx = bindings.llama_n_ctx(llm.ctx) + n_seq * N_MAX
        params.n_seq_max, params.kv_unified, params.n_batch = n_seq, True, llm.n_batch
        params.n_threads = params.n_threads_batch = n_threads
        self._context = bindings.llama_init_from_model(self._model, params)
        if not self._context:
            raise AllocationError("draft: there is no memory for the context of the draft model; lower n_ctx.")
        return int(self._context)

    def close(self) -> None:
        """Twice is harmless."""
        if self._context:
            self._bindings.llama_free(self._context)
        if self._model:
            self._bindings.llama_model_free(self._model)
        self._context = self._model = None

    def __del__(self) -> None:
        self.close()


class ModelDrafts:
    """The drafts of one loaded model. draft: what was asked for, one of DRAFTS or a model. `in_use`: "ngram", "off", or
    the draft model. "auto" drafts where no bit of an answer depends on it.

    Raises what `DraftModel` raises; `open` MoeggufError, where the vocabularies differ.
    """

    def __init__(self, draft: str | os.PathLike[str]) -> None:
        self._chosen = os.fspath(draft)
        self._draft_model = None if self._chosen in DRAFTS else DraftModel(self._chosen)
        self.in_use = "off"
        self.drafts: Drafts | None = None

    def open(self, llm: Any, n_seq: int, batch_invariant: bool) -> None:
        """Once the model is loaded."""
        if self._chosen == "off" or llm._ctx.memory is None or (self._chosen == "auto" and not batch_invariant):
            return
        if llm._is_stateful:
            warnings.warn(
                "draft: this model's state cannot go back to before a token, so nothing is drafted.", stacklevel=3
            )
            return
        if not batch_invariant:
            warnings.warn(
                "draft: here the last bits of a token depend on what is computed beside it: an answer may differ from"
                " one without drafts.",
                stacklevel=3,
            )
        context = self._draft_model.open_context(llm, n_seq, llm.n_threads) if self._draft_model else 0
        self.drafts = Drafts(n_seq, N_MAX, NGRAM_KEYS, llm.ctx if context else 0, context)
        self.in_use = self._chosen if context else "ngram"

    def close(self) -> None:
        """Before the model is freed. Twice is harmless."""
        if self.drafts is not None:
            self.drafts.close()
        if self._draft_model is not None:
            self._draft_model.close()
