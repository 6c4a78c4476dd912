"""Batch invariance: a token has the same bits in a pass of any width, beside any sequences, wherever its cells lie.

The CPU kernels of `native/kernels` and plain products promise it (`tools/width_check.py`, tests/live/test_width.py).
GPUs, recurrent states, attention without flash attention, and processors without AVX2 do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moegguf.engine.devices import gpus
from moegguf.gguf.reader import ggml_type
from moegguf.processor import Processor, read_processor
from moegguf.settings import read_environment

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

CACHE_TYPES = tuple(map(ggml_type, ("f32", "f16", "q8_0")))  # of the attention kernels, whose rows are of
HEAD_STEP = 16  # values, or a multiple
NEEDED_FLAGS = {"avx2", "fma", "f16c"}
_FLASH_OFF = 0  # enum llama_flash_attn_type


def is_batch_invariant(llm: Llama) -> bool:
    """Whether that is true of a loaded model in its context."""
    params, arch = llm.context_params, llm.metadata.get("general.architecture")
    return (
        has_kernels(read_processor(), read_environment().kernels)
        and not llm.plan.on_device
        and not gpus()  # they would take long prompts
        and not llm._is_stateful
        and params.flash_attn_type != _FLASH_OFF
        and arch != "grok"  # which llama.cpp computes without flash attention
        and {params.type_k, params.type_v} <= set(CACHE_TYPES)
        and all(n % HEAD_STEP == 0 for n in (*llm.layout.hparams.key_lengths, *llm.layout.hparams.value_lengths))
    )


def has_kernels(processor: Processor, chosen: str) -> bool:
    """Whether this processor computes with the kernels of `native/kernels`. chosen: MOEGGUF_KERNELS."""
    return chosen != "upstream" and processor.flags >= NEEDED_FLAGS
