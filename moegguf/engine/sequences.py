"""Many sequences in one context: passes with tokens of several, and whether bits depend on what else is in a pass.

They share one KV cache (llama.cpp's `kv_unified`): a cell can belong to every sequence that begins with the same
tokens, so that a prefix is copied without copying data.
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

CACHE_TYPES = tuple(map(ggml_type, ("f32", "f16", "q8_0")))  # types that the attention kernels read
HEAD_STEP = 16  # the attention kernels need rows of a multiple of this
_FLASH_OFF = 0  # enum llama_flash_attn_type
# Architectures with a recurrent state whose whole graphs are checked (tests/live/test_hybrid_width.py).
STATEFUL_ARCHS = frozenset((
    "bailingmoe3", "deepseek4", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear", "lfm2moe",
    "minimax-01", "nemotron_h_moe", "qwen35moe", "qwen3next", "qwen4exp",
))  # fmt: skip

Tokens = Sequence[int] | npt.NDArray[np.intc]


@dataclass(frozen=True)
class SequenceTokens:
    """Consecutive tokens of one sequence in a pass, after its first `n_past`. `request`: its number in routing events.
    `wants_logits`: of the last token; `all_logits`: of every one. `draft`: tokens that may come after these; logits of
    each are wanted, too."""

    sequence: int
    tokens: Sequence[int]
    n_past: int
    request: int
    phase: Phase
    wants_logits: bool = True
    all_logits: bool = False
    draft: Sequence[int] = ()

    @property
    def n_evaluated(self) -> int:
        """Tokens in the pass."""
        return len(self.tokens) + len(self.draft)


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Equal tokens at the beginning of both."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.intc) != np.asarray(b[:n], np.intc))
    return int(differ[0]) if differ.size else n


class PassBatch:
    """struct llama_batch for up to `n_max` tokens of any sequences; as the bindings' batch, it has an attribute `batch`
    and can be given to their context. Its first `batch.n_tokens` `tokens`, and which of them have `logits`, are set."""

    def __init__(self, n_max: int) -> None:
        bindings = library.llama_cpp()
        self.tokens, self._positions, self._sequences = (np.zeros(n_max, np.int32) for _ in range(3))
        self._n_sequences = np.ones(n_max, np.int32)
        self.logits = np.zeros(n_max, np.int8)
        self._rows = self._sequences.ctypes.data + np.arange(n_max, dtype=np.uintp) * self._sequences.itemsize
        self.batch: Any = bindings.llama_batch()
        pointers: dict[str, Any] = {
            "token": self.tokens, "pos": self._positions, "n_seq_id": self._n_sequences, "seq_id": self._rows,
            "logits": self.logits,
        }  # fmt: skip
        kinds = dict(bindings.llama_batch._fields_)
        for name, array in pointers.items():
            setattr(self.batch, name, c.cast(array.ctypes.data, kinds[name]))

    def fill(
        self, chunks: Sequence[SequenceTokens], position: Callable[[int], int] = int, all_logits: bool = False
    ) -> list[int]:
        """Sets the tokens. Returns the row of logits of each chunk's last token; the rows of its draft come next.

        position: returns the position of the token after the first n.

        all_logits: every token gets logits.

        Raises OptionError for a chunk without tokens.
        """
        begin, rows = 0, list[int]()
        for chunk in chunks:
            if not chunk.tokens:
                raise OptionError(f"sequence {chunk.sequence} has no tokens to evaluate; give at least one.")
            end, row = begin + chunk.n_evaluated, begin + len(chunk.tokens) - 1
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
    """Returns whether a token has the same bits in a pass of any width, beside any sequences, wherever its cells lie.

    The CPU kernels of `native/kernels` and plain products promise it (`tools/width_check.py`).
    GPUs, recurrent states of other architectures than STATEFUL_ARCHS, attention without flash attention, and processors
    without AVX2 do not.
    """
    params, arch = llm.context_params, llm.metadata.get("general.architecture")
    return (
        has_kernels(read_processor(), read_environment().kernels)
        and not plan.on_device
        and not gpus()  # GPUs would compute long prompts
        and (not llm._is_stateful or arch in STATEFUL_ARCHS)
        and params.flash_attn_type != _FLASH_OFF
        and arch != "grok"  # llama.cpp computes it without flash attention
        and {params.type_k, params.type_v} <= set(CACHE_TYPES)
        and all(n % HEAD_STEP == 0 for n in (*layout.hparams.key_lengths, *layout.hparams.value_lengths))
    )
