"""Several sequences in one context: passes with tokens of many sequences, and a test of
whether a token's bits depend on the rest of its pass.

Most models' sequences share one KV cache (llama.cpp's `kv_unified`). A cell can belong
to every sequence that begins with the same tokens, so that sequences share a prefix
without copying data.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moegguf.engine.devices import gpus
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.reader import ggml_type
from moegguf.native import library
from moegguf.native.events import Phase
from moegguf.processor import has_kernels, read_processor
from moegguf.settings import read_environment

if TYPE_CHECKING:
    from moegguf.engine.plan import Plan
    from moegguf.engine.upstream import UpstreamLlama

MAX_SEQUENCES = 256  # llama.cpp's LLAMA_MAX_SEQ

# KV cache types that the attention kernels can read.
CACHE_TYPES = tuple(map(ggml_type, ("f32", "f16", "q8_0")))
HEAD_STEP = 16  # the attention kernels need rows whose length is a multiple of this
_FLASH_OFF = 0  # value of enum llama_flash_attn_type
# Architectures with a recurrent state whose results do not depend on the rest of a pass
# (tests/live/test_hybrid_width.py).
STATEFUL_ARCHS = frozenset((
    "bailingmoe3", "deepseek4", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear", "lfm2moe",
    "minimax-01", "nemotron_h_moe", "qwen35moe", "qwen3next", "qwen4exp",
))  # fmt: skip

Tokens = Sequence[int] | npt.NDArray[np.intc]


@dataclass(frozen=True)
class SequenceTokens:
    """Consecutive tokens of one sequence in a pass."""

    sequence: int
    tokens: Sequence[int]
    n_past: int  # number of tokens that precede these in the sequence
    request: int  # number of the request in routing events
    phase: Phase
    # True: the last of `tokens`, and each token of `draft`, have logits.
    wants_logits: bool = True
    all_logits: bool = False  # True: every token has logits
    draft: Sequence[int] = ()  # guessed tokens after `tokens`, which the pass verifies

    @property
    def n_evaluated(self) -> int:
        """Number of the sequence's tokens in the pass, with its draft."""
        return len(self.tokens) + len(self.draft)


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Returns how many tokens at the beginning of `a` and `b` are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.intc) != np.asarray(b[:n], np.intc))
    return int(differ[0]) if differ.size else n


class PassBatch:
    """A struct llama_batch for up to `n_max` tokens of any sequences. Like the
    bindings' batch, it has an attribute `batch` and can be passed to the bindings'
    context. `tokens` holds the tokens, and `logits` is 1 for tokens with logits; only
    the first `batch.n_tokens` entries are in use."""

    def __init__(self, n_max: int) -> None:
        bindings = library.llama_cpp()
        self.tokens, self._positions, self._sequences = (
            np.zeros(n_max, np.int32) for _ in range(3)
        )
        self._n_sequences = np.ones(n_max, np.int32)
        self.logits = np.zeros(n_max, np.int8)
        self._rows = (
            self._sequences.ctypes.data
            + np.arange(n_max, dtype=np.uintp) * self._sequences.itemsize
        )
        self.batch: Any = bindings.llama_batch()
        pointers: dict[str, Any] = {
            "token": self.tokens, "pos": self._positions, "n_seq_id": self._n_sequences, "seq_id": self._rows,
            "logits": self.logits,
        }  # fmt: skip
        kinds = dict(bindings.llama_batch._fields_)
        for name, array in pointers.items():
            setattr(self.batch, name, c.cast(array.ctypes.data, kinds[name]))

    def fill(
        self,
        chunks: Sequence[SequenceTokens],
        position: Callable[[int], int] = int,
        all_logits: bool = False,
    ) -> list[int]:
        """Sets the tokens of the batch. Returns, for each chunk, the batch index of the
        last of its `tokens`. The chunk's draft tokens directly follow that token.

        position: returns the position of a sequence's token with this index.

        all_logits: True if every token gets logits.

        Raises OptionError for a chunk without tokens.
        """
        begin = 0
        rows = list[int]()
        for chunk in chunks:
            if not chunk.tokens:
                raise OptionError(
                    f"sequence {chunk.sequence} has no tokens to evaluate; give at least one."
                )
            end = begin + chunk.n_evaluated
            row = begin + len(chunk.tokens) - 1
            self.tokens[begin:end] = [*chunk.tokens, *chunk.draft]
            first = position(chunk.n_past)
            self._positions[begin:end] = np.arange(first, first + end - begin)
            self._sequences[begin:end] = chunk.sequence
            self.logits[begin:end] = all_logits or chunk.all_logits
            self.logits[row:end] |= chunk.wants_logits
            rows.append(row)
            begin = end
        self.batch.n_tokens = begin
        return rows


def is_batch_invariant(llm: UpstreamLlama, layout: ExpertLayout, plan: Plan) -> bool:
    """Returns True if a token's results are the same, bit for bit, in a pass with any
    number of tokens, with any other sequences, and wherever its cells are.

    The CPU kernels of `native/kernels` and plain matrix products guarantee this
    (`tools/width_check.py`). They need AVX2, FMA, F16C and flash attention, and cache
    types and head sizes that they support. GPUs, and recurrent states of architectures
    that are not in STATEFUL_ARCHS, do not guarantee it.
    """
    params = llm.context_params
    arch = llm.metadata.get("general.architecture")
    return (
        has_kernels(read_processor(), read_environment().kernels)
        and not plan.on_device
        and not gpus()  # if there is a GPU, llama.cpp may process long prompts on it
        and (not llm._is_stateful or arch in STATEFUL_ARCHS)
        and params.flash_attn_type != _FLASH_OFF
        and arch != "grok"  # llama.cpp runs grok without flash attention
        and {params.type_k, params.type_v} <= set(CACHE_TYPES)
        and all(
            n % HEAD_STEP == 0
            for n in (*layout.hparams.key_lengths, *layout.hparams.value_lengths)
        )
    )
