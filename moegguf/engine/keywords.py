"""The keywords of `llama_cpp.Llama` that `moegguf.Llama` takes besides its own, for type checkers and `help()`.

Those of the pinned release of the bindings; a test compares them with its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict


class LlamaCppOptions(TypedDict, total=False):
    """Keywords that have in moegguf the meaning that llama-cpp-python gives them."""

    n_gpu_layers: int
    split_mode: int
    main_gpu: int
    tensor_split: list[float] | None
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool
    kv_overrides: dict[str, bool | int | float | str] | None
    seed: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_threads_batch: int | None
    rope_scaling_type: int | None
    pooling_type: int
    attention_type: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    logits_all: bool
    embedding: bool
    offload_kqv: bool
    flash_attn: bool | None
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool
    last_n_tokens_size: int
    lora_base: str | None
    lora_scale: float
    lora_path: str | None
    numa: bool | int
    chat_format: str | None
    chat_handler: Any
    draft_model: Any
    tokenizer: Any
    type_k: int | None
    type_v: int | None
    spm_infill: bool
    verbose: bool


def with_keywords(init: Callable[..., None], base: Callable[..., None]) -> inspect.Signature:
    """The signature of `init` with the keywords of `base`, and their defaults, in place of its **options."""
    own = inspect.signature(init).parameters
    further = inspect.signature(base).parameters.values()
    kinds = inspect.Parameter
    return inspect.Signature(
        [
            *(each for each in own.values() if each.kind != kinds.VAR_KEYWORD),
            *(each for each in further if each.kind == kinds.KEYWORD_ONLY and each.name not in own),
        ]
    )
