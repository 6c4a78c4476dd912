"""Which drafts a model can have, and what writes them where no text repeats: tokens guessed ahead, that the next pass
verifies (moegguf.generate.drafting). That is a second, smaller model, or the heads that the file has for more tokens
than the next one (multi-token prediction, MTP).
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegguf.engine.memory import HEADS_UBATCH_TOKENS
from moegguf.errors import AllocationError, ModelFormatError, ModelNotFoundError, OptionError
from moegguf.gguf.experts import HEADS_ARCHS, ExpertLayout, read_layout
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


def drafted(layout: ExpertLayout, draft: str | os.PathLike[str] | None, flash_attn: bool | None) -> ExpertLayout:
    """The layout that is loaded for these drafts: with its heads where they are to draft; "auto" is not where its bits
    would depend on the pass. Raises OptionError for "mtp" where there are no heads."""
    if draft == "mtp" and not layout.n_layer_nextn:
        raise OptionError(
            f"draft='mtp': {layout.shards[0].path.name} has no heads for it that are supported (of"
            f" {', '.join(HEADS_ARCHS)}); take 'auto'."
        )
    is_used = layout.n_layer_nextn and (draft == "mtp" or (draft == "auto" and flash_attn is not False))
    return layout.with_heads() if is_used else layout


class _Heads:
    """The context of a loaded model's own heads."""

    def __init__(self) -> None:
        self._bindings, self._context = library.llama_cpp(), None

    def open_context(self, llm: UpstreamLlama, n_seq: int, n_threads: int) -> int:
        """Its address, for the sequences of `llm`. Raises AllocationError."""
        bindings = self._bindings
        params = type(llm.context_params).from_buffer_copy(llm.context_params)
        params.ctx_type, params.ctx_other = bindings.LLAMA_CONTEXT_TYPE_MTP, llm.ctx
        params.n_ctx = bindings.llama_n_ctx(llm.ctx) + n_seq * N_MAX
        params.n_seq_max = params.n_outputs_max = n_seq
        params.kv_unified, params.n_batch = True, llm.n_batch
        params.n_ubatch = min(HEADS_UBATCH_TOKENS, llm.n_batch)
        params.n_threads = params.n_threads_batch = n_threads
        params.cb_eval = bindings.ggml_backend_sched_eval_callback()
        params.abort_callback = bindings.ggml_abort_callback()
        self._context = bindings.llama_init_from_model(llm.model, params)
        if not self._context:
            raise AllocationError("draft: there is no memory for the context of the model's heads; lower n_ctx.")
        return int(self._context)

    def close(self) -> None:
        """Before the model is freed. Twice is harmless."""
        if self._context:
            self._bindings.llama_free(self._context)
        self._context = None


class ModelDrafts:
    """The drafts of one loaded model. draft: what was asked for, one of DRAFTS or a model. `in_use`: "ngram", "mtp",
    "off", or the draft model. "auto" drafts where no bit of an answer depends on it.

    Raises what `DraftModel` raises; `open` MoeggufError, where the vocabularies differ.
    """

    def __init__(self, draft: str | os.PathLike[str]) -> None:
        self._chosen = os.fspath(draft)
        self._model: DraftModel | _Heads | None = None if self._chosen in DRAFTS else DraftModel(self._chosen)
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
        has_heads = self._model is None and llm.layout.loads_heads
        if has_heads:
            self._model = _Heads()
        context = self._model.open_context(llm, n_seq, llm.n_threads) if self._model else 0
        self.drafts = Drafts(n_seq, N_MAX, NGRAM_KEYS, llm.ctx if context else 0, context, has_heads)
        self.in_use = "mtp" if has_heads else self._chosen if context else "ngram"
        if has_heads:
            llm.context.after_pass = self.drafts.evaluated

    def close(self) -> None:
        """Before the model is freed. Twice is harmless."""
        if self.drafts is not None:
            self.drafts.close()
        if self._model is not None:
            self._model.close()
