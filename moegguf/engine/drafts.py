"""Drafts: tokens that are guessed ahead, and verified by the next pass
(moegguf.generate.drafting).

llama.cpp's own speculative code generates drafts (`native/drafts`, a library that is
loaded only when drafts are used). There are two kinds of drafts. For the first kind,
the sequence's last tokens are looked up in its earlier text, and the tokens that
followed them there become the draft. For the second kind, a draft context generates
tokens. The draft context runs a second, smaller model, or the extra heads in the
model's file that predict further tokens (multi-token prediction, MTP).
"""

from __future__ import annotations

import ctypes as c
import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from moegguf.engine.error_log import llama_log
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.memory import DRAFT_TOKENS, HEADS_UBATCH_TOKENS, may_draft
from moegguf.engine.model_path import readable
from moegguf.errors import (
    AllocationError,
    ModelFormatError,
    ModelNotFoundError,
    MoeggufError,
    OptionError,
)
from moegguf.gguf.experts import HEADS_ARCHS, ExpertLayout, read_layout
from moegguf.gguf.reader import StrPath
from moegguf.models.catalog import find_model
from moegguf.native import library
from moegguf.options import DRAFTS

N_MAX = 24  # maximum number of tokens in a draft
# Number of most recent tokens that must occur earlier in the text: long and short
# n-gram.
NGRAM_KEYS = (8, 3)


class Source(IntEnum):
    """The source of a draft. Sources are tried in this order.

    Both n-gram sources search the earlier text of the sequence for its last tokens:
    LONG_NGRAM for a long run of them, SHORT_NGRAM for a short one. MODEL is a draft
    context. NONE means that there is no draft.
    """

    LONG_NGRAM = 0
    SHORT_NGRAM = 1
    MODEL = 2
    NONE = 3


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next in a sequence."""

    source: Source = Source.NONE
    tokens: tuple[int, ...] = ()


class _Config(c.Structure):
    _fields_ = [
        ("key", c.c_int32 * 2), ("n_seq", c.c_int32), ("n_max", c.c_int32), ("target", c.c_void_p),
        ("draft", c.c_void_p), ("heads", c.c_int32),
    ]  # fmt: skip


class _Request(c.Structure):
    _fields_ = [
        ("sequence", c.c_int32), ("n_max", c.c_int32 * Source.NONE), ("source", c.c_int32), ("n", c.c_int32),
        ("tokens", c.c_void_p),
    ]  # fmt: skip


@functools.cache
def _library() -> c.CDLL:
    library.llama_cpp()  # loads libllama
    loaded = library.open_part("moegguf-drafts")
    for name in ("open", "set_tokens", "draft", "evaluated", "accept"):
        function = getattr(loaded, f"drafts_{name}")
        function.restype = c.c_char_p
        function.errcheck = _check
    return loaded


def _check(reason: bytes | None, *_: object) -> None:
    if reason is not None:
        raise MoeggufError(
            f"drafting failed: {reason.decode(errors='replace')}; load the model with draft='off'."
        )


class Drafts:
    """Generates drafts of up to `n_max` tokens for the sequences of a context.

    keys: number of most recent tokens that must occur earlier in the text, for the long
    and the short n-gram. target, draft: addresses of llama_contexts, which must outlive
    this object; 0: there is none. heads: True if `draft` runs the heads of the target's
    model. `least_key`: a draft is possible only if at least this many of the most
    recent tokens also occur earlier in the text; 0: a draft context needs no
    repetition. The constructor and all methods except `close` raise MoeggufError, for
    example if the vocabularies differ.
    """

    def __init__(
        self,
        n_seq: int,
        n_max: int,
        keys: tuple[int, int],
        target: int = 0,
        draft: int = 0,
        heads: bool = False,
    ) -> None:
        self._library = _library()
        self._handle = c.c_void_p()
        self.n_max = n_max
        self.least_key = 0 if draft else min(keys)
        config = _Config((c.c_int32 * 2)(*keys), n_seq, n_max, target, draft, heads)
        self._library.drafts_open(c.byref(config), c.byref(self._handle))
        self._requests = (_Request * n_seq)()
        self._tokens = np.zeros((n_seq, n_max), np.int32)

    def set_tokens(self, sequence: int, n_kept: int, tokens: Sequence[int]) -> None:
        """Replaces all tokens of a sequence after its first `n_kept` tokens with
        `tokens`. If `n_kept` is 0, replaces all tokens."""
        new = np.asarray(tokens, np.int32)
        self._library.drafts_set_tokens(
            self._handle, sequence, n_kept, new.ctypes, len(new)
        )

    def draft(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> list[Draft]:
        """Returns a draft for each wanted sequence. `wanted` contains a pair for each
        sequence: its id, and the maximum number of tokens to draft for each source
        except NONE."""
        for row, (request, (sequence, n_most)) in enumerate(
            zip(self._requests, wanted, strict=False)
        ):
            request.sequence = sequence
            request.n_max[:] = n_most
            request.tokens = self._tokens[row].ctypes.data
        self._library.drafts_draft(self._handle, self._requests, len(wanted))
        return [
            Draft(
                Source(request.source), tuple(self._tokens[row, : request.n].tolist())
            )
            for row, request in enumerate(self._requests[: len(wanted)])
        ]

    def evaluated(self, batch: c.Structure) -> None:
        """Passes a llama_batch that the target context has just evaluated to the native
        drafter. If the drafts come from heads, the heads evaluate the batch, too."""
        self._library.drafts_evaluated(self._handle, c.byref(batch))

    def accept(self, sequence: int, n: int) -> None:
        """Records that the first `n` tokens of the sequence's last draft were
        accepted."""
        self._library.drafts_accept(self._handle, sequence, n)

    def close(self) -> None:
        """Frees the native drafter. A second call does nothing."""
        handle = self._handle
        self._handle = c.c_void_p()
        self._library.drafts_close(handle)


def drafted(layout: ExpertLayout, spec: LoadSpec) -> ExpertLayout:
    """Returns the layout to load for these options. The layout includes the model's
    heads (MTP) if the heads may draft. Raises OptionError if `draft` is "mtp" and the
    model has no heads."""
    if spec.draft == "mtp" and not layout.n_layer_nextn:
        raise OptionError(
            f"draft='mtp' needs prediction heads of a supported architecture ({', '.join(HEADS_ARCHS)}), but"
            f" {layout.shards[0].path.name} has none; use draft='auto'."
        )
    is_used = layout.n_layer_nextn and spec.draft in ("auto", "mtp") and may_draft(spec)
    return layout.with_heads() if is_used else layout


class ModelDrafts:
    """Decides how one model drafts. `in_use` is "ngram", "mtp" or "off", or the name or
    path of the draft model.

    draft: one of DRAFTS, or the name or path of a model with the same vocabulary.
    "auto" drafts only if every answer stays the same, bit for bit, as without drafts. A
    draft model is loaded on the CPU before the main model's plan is made, so the plan
    uses only the memory that is left.

    Raises OptionError if there is no such model, and ModelFormatError if llama.cpp
    cannot load it.
    """

    def __init__(self, draft: StrPath) -> None:
        self._bindings = library.llama_cpp()
        self._chosen = os.fspath(draft)
        self._model = self._context = None
        self.in_use = "off"
        self.drafts: Drafts | None = None
        if self._chosen in DRAFTS:
            return
        try:
            path = os.fspath(find_model(self._chosen))
        except ModelNotFoundError as error:
            raise OptionError(
                f"draft must be one of {', '.join(DRAFTS)}, or a model, but is {self._chosen[:60]!r}: {error}"
            ) from None
        read_layout(path)
        params = self._bindings.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_mmap = False
        llama_log().forget()
        with readable(path) as known:
            self._model = self._bindings.llama_model_load_from_file(
                known.read_as, params
            )
        if not self._model:
            raise ModelFormatError(
                f"draft: llama.cpp cannot load {Path(path).name}: {llama_log().reason()}; give another draft model, or"
                " 'off'."
            )

    def open(self, llm: Any, n_seq: int, batch_invariant: bool) -> None:
        """Starts drafting after the model is loaded. Does nothing if `draft` is "off",
        if the model has no KV cache, or if `draft` is "auto" and the model is not
        batch-invariant. Also does nothing if the model's state cannot be rolled back;
        then warns unless `draft` is "auto". Warns if drafts may change answers because
        the model is not batch-invariant. Raises AllocationError if there is no memory
        for the draft context, and MoeggufError if the vocabularies differ."""
        if (
            self._chosen == "off"
            or llm._ctx.memory is None
            or (self._chosen == "auto" and not batch_invariant)
        ):
            return
        n_max = N_MAX
        if llm._is_stateful:
            n_max = (
                DRAFT_TOKENS[0]
                if llm.context.returns_to_checkpoints
                else min(N_MAX, llm.plan.context.n_rs_seq)
            )
        if not n_max:
            if self._chosen != "auto":
                warnings.warn(
                    "draft: nothing is drafted, because this model's state cannot go back to an earlier token, or"
                    " there is no memory for the saved states that this needs.",
                    stacklevel=3,
                )
            return
        if not batch_invariant:
            warnings.warn(
                "draft: on this device the last bits of a token depend on the other tokens of its pass, so an"
                " answer may differ from an answer without drafts.",
                stacklevel=3,
            )
        has_heads = self._model is None and llm.layout.loads_heads
        if has_heads or self._model:
            self._context = self._new_context(llm, n_seq, has_heads)
        target = llm.ctx if self._context else 0
        self.drafts = Drafts(
            n_seq, n_max, NGRAM_KEYS, target, self._context or 0, has_heads
        )
        self.in_use = "mtp" if has_heads else self._chosen if self._model else "ngram"
        if has_heads:
            llm.context.after_pass = self.drafts.evaluated

    def _new_context(self, llm: Any, n_seq: int, has_heads: bool) -> Any:
        bindings = self._bindings
        params = self._bindings.llama_context_default_params()
        if has_heads:
            params = type(llm.context_params).from_buffer_copy(llm.context_params)
            params.ctx_type = bindings.LLAMA_CONTEXT_TYPE_MTP
            params.ctx_other = llm.ctx
            params.n_rs_seq = 0
            params.n_outputs_max = n_seq
            params.n_ubatch = min(HEADS_UBATCH_TOKENS, llm.n_batch)
            params.cb_eval = bindings.ggml_backend_sched_eval_callback()
            params.abort_callback = bindings.ggml_abort_callback()
        params.n_ctx = bindings.llama_n_ctx(llm.ctx) + n_seq * N_MAX
        params.n_seq_max = n_seq
        params.kv_unified = True
        params.n_batch = llm.n_batch
        params.n_threads = params.n_threads_batch = llm.n_threads
        context = bindings.llama_init_from_model(
            llm.model if has_heads else self._model, params
        )
        if not context:
            raise AllocationError(
                "draft: there is no memory for the draft context; lower n_ctx, or use draft='off'."
            )
        return context

    def close(self) -> None:
        """Frees everything used for drafting. Must be called before the model is freed.
        A second call does nothing."""
        if self.drafts is not None:
            self.drafts.close()
        if self._context:
            self._bindings.llama_free(self._context)
        if self._model:
            self._bindings.llama_model_free(self._model)
        self._model = self._context = None

    def __del__(self) -> None:
        self.close()
