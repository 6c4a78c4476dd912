"""How many tokens a model may hold at a time: as asked for, or what it was trained on, within memory.

Looks at a model's shape and at memory; loads nothing.
"""

from __future__ import annotations

from moegguf.config import format_bytes, format_bytes_up
from moegguf.engine.machine import Memory
from moegguf.engine.needs import F16, KV_PAD_TOKENS, kv_bytes
from moegguf.errors import AllocationError, OptionError
from moegguf.experts import ExpertLayout

MOST_UNASKED = 32768  # tokens
LEAST_STEP = 4096  # tokens
MEMORY_SHARE = 10  # the KV cache of a context nobody asked for takes at most a tenth of what is free
MOST = 1 << 31  # tokens


def whole_pages(n_ctx: int) -> int:
    """As llama.cpp rounds a context up. The bindings' own buffers would be shorter than what it says it holds."""
    return -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS


def choose_context(layout: ExpertLayout, asked: int | None, memory: Memory) -> int:
    """Tokens of context: `asked`, else the model's own, up to 32,768 and to what a tenth of the free memory holds.

    At least 4,096 of the model's own whatever is free: an "auto" budget for experts takes what then remains.
    """
    if asked:
        return whole_pages(asked)
    trained = layout.hparams.n_ctx_train or LEAST_STEP
    n_ctx = MOST_UNASKED
    while n_ctx > LEAST_STEP and (
        n_ctx >= 2 * trained or kv_bytes(layout, min(n_ctx, trained)) > memory.available_bytes // MEMORY_SHARE
    ):
        n_ctx //= 2
    return whole_pages(min(n_ctx, trained))


def check_context(layout: ExpertLayout, n_ctx: int, memory: Memory, type_k: int = F16, type_v: int = F16) -> None:
    """Raises OptionError for what is no size, AllocationError for a KV cache above all memory of the machine.

    llama.cpp would take minutes to find out, or be killed.
    """
    if not 0 < n_ctx < MOST:
        raise OptionError(f"n_ctx is a number of tokens from 1 to {MOST - 1}, but is {n_ctx}.")
    n_bytes = kv_bytes(layout, n_ctx, type_k, type_v)
    if n_bytes > memory.total_bytes:
        raise AllocationError(
            f"a context of {n_ctx} tokens needs {format_bytes_up(n_bytes)} for this model, but the machine has"
            f" {format_bytes(memory.total_bytes)}; lower n_ctx (--ctx, num_ctx)."
        )
