"""What a user gives: memory for experts, where they go, and sizes of the context and of passes; and what is chosen of
these sizes where they are not given.

Does not know devices, nor where experts end up (`planner`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from moegguf.engine.cost import Kind
from moegguf.engine.machine import Memory
from moegguf.engine.memory import F16, KV_PAD_TOKENS, MemoryNeeds, compute_bytes, kv_bytes, margin_bytes, memory_needs
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.projector import ProjectorHeader
from moegguf.quantities import ExpertCache

AUTO = ExpertCache("auto")
KINDS_OF: dict[str, tuple[Kind, ...]] = {
    "auto": ("resident", "slots", "layers", "cpu"),
    "layers": ("resident", "layers"),
    "slots": ("resident", "slots"),
    "cpu": ("cpu",),
}
DEFAULT_UBATCH_TOKENS = 512
SMALL_CTX_TOKENS = 4096  # up to here a default context may take more; where training is not known, the model's own
LEAST_CTX_TOKENS = 512
MAX_CTX_TOKENS = (1 << 31) - KV_PAD_TOKENS
KV_PARTS = 16  # numbers of tokens in the KV cache to choose from


@dataclass(frozen=True)
class Sizes:
    """Context and passes to plan for; types of the KV cache are ggml's numbers.

    n_ctx: 0 is the model's own; None: the largest that leaves most memory to experts (`choose_context`). n_ubatch:
    stays as given unless there are too few slots for it; None: at most n_batch, chosen together with the slots.
    kv_tokens: of all n_seq_max sequences that the context holds; None: chosen. projector: of a model that reads images,
    too. adapter_bytes: of a LoRA adapter. reasons: of what was chosen.
    """

    n_ctx: int | None = None
    n_ubatch: int | None = None
    n_batch: int = DEFAULT_UBATCH_TOKENS
    n_seq_max: int = 1
    kv_tokens: int | None = None
    type_k: int = F16
    type_v: int = F16
    flash_attn: bool = False
    projector: ProjectorHeader | None = None
    adapter_bytes: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def one_pass_tokens(self) -> int:
        """Tokens that a pass has to hold, for an image; 1 where an image may be read in several."""
        return max(1, self.projector.one_pass_tokens if self.projector else 1)

    @property
    def most_ubatch(self) -> int:
        """The most tokens of a pass."""
        return max(self.one_pass_tokens, self.n_ubatch or min(DEFAULT_UBATCH_TOKENS, self.n_batch))

    def needs(self, layout: ExpertLayout, n_ubatch: int) -> MemoryNeeds:
        """Memory beside slots, for passes of `n_ubatch` tokens, of sizes without choices left."""
        n_kv = self.kv_tokens or self.n_ctx or 0
        needs = memory_needs(layout, n_kv, n_ubatch, self.type_k, self.type_v, self.flash_attn, self.projector)
        return replace(needs, dense_bytes=needs.dense_bytes + self.adapter_bytes)


@dataclass(frozen=True)
class Budgets:
    """What a user gives, and wants.

    ram, vram: memory for experts; vram of all devices together, or of each. choice: one of `options.PLACEMENTS`.
    n_gpu_layers, tensor_split: as llama.cpp's (-1: every layer; None: by memory). divided: the caller divides layers
    so, or chooses one of several devices: only slots are planned. refuses_cpu: not everything may be left to the CPU.
    staging: tensors of each device that prompts are staged in, beside `vram`; None: chosen, within it. streams: whether
    the store may stream experts through the CPU's slots. margin_bytes: of RAM, that stay free with "auto"; None:
    `memory.margin_bytes`.
    """

    ram: ExpertCache = AUTO
    vram: tuple[ExpertCache, ...] = (AUTO,)
    choice: str = "auto"
    sizes: Sizes = Sizes()
    n_gpu_layers: int = -1
    tensor_split: tuple[float, ...] | None = None
    divided: bool = False
    refuses_cpu: bool = False
    staging: int | None = None
    streams: bool = True
    margin_bytes: int | None = None

    def margin_of(self, ram: Memory) -> int:
        """Bytes of this RAM that stay free with "auto"."""
        return margin_bytes(ram.available_bytes) if self.margin_bytes is None else self.margin_bytes


def choose_context(layout: ExpertLayout, sizes: Sizes, free_bytes: int, caches: Sequence[ExpertCache] = ()) -> Sizes:
    """`sizes` with a context and a KV cache, chosen for so much free memory, of which experts are given `caches`
    together ("auto": what is left).

    A context that is not given is the largest, up to the model's own, in a tenth of the free memory, or in a quarter
    where every expert fits beside it. Up to 4,096 tokens may take more, but never more than it leaves to experts, or
    than `caches`, when they are given, leave to it. A KV cache that is not given has all tokens that its sequences can
    have together, less by the same rule, and at least those of one: answers are rarely as long as their context can be,
    and memory of experts makes each of them faster. One that is given has no more than these, and no fewer, with a
    warning: without, the longest answer cannot end.

    Raises OptionError for a context that cannot be.
    """
    given = [0 if of.mode == "auto" else of.n_bytes or round(of.fraction * layout.expert_bytes) for of in caches]
    pool_bytes = min(sum(given), layout.expert_bytes) if all(given) else 0
    free_bytes -= sizes.adapter_bytes + (sizes.projector.total_bytes if sizes.projector else 0)
    buffers = partial(compute_bytes, layout, flash_attn=sizes.flash_attn)
    # The weights of a model without experts are mapped: they need not stay in memory.
    dense_bytes = layout.dense_bytes + layout.tied_output_bytes if layout.is_moe else 0
    rest = free_bytes - margin_bytes(free_bytes) - dense_bytes - buffers(KV_PAD_TOKENS, 1)
    modest_bytes = max(free_bytes // 10, min(free_bytes // 4, rest - layout.expert_bytes))

    def is_modest(n_tokens: int) -> bool:
        """Whether a KV cache of so many tokens leaves enough memory to experts."""
        cached_bytes = kv_bytes(layout, n_tokens, sizes.type_k, sizes.type_v)
        grown = buffers(n_tokens, sizes.most_ubatch) - buffers(KV_PAD_TOKENS, sizes.most_ubatch)
        is_small = n_tokens <= SMALL_CTX_TOKENS or cached_bytes + grown <= modest_bytes
        return is_small and cached_bytes <= (rest - pool_bytes if pool_bytes else rest // 2)

    n_ctx, n_kv, reasons = sizes.n_ctx, sizes.kv_tokens, list[str]()
    trained = pad_context(layout.hparams.n_ctx_train or SMALL_CTX_TOKENS)
    if n_ctx is None:
        powers = (1 << bit for bit in reversed(range(trained.bit_length())))
        defaults = (trained, *(n for n in powers if LEAST_CTX_TOKENS <= n < trained))
        n_ctx = next(filter(is_modest, defaults), defaults[-1])
        if n_ctx < trained:
            reasons.append(
                f"the context has {n_ctx:,} of the model's {trained:,} tokens: more would take too much of the memory"
                " for experts; --ctx sets another"
            )
    n_ctx = pad_context(n_ctx) or trained
    if not n_kv:
        parts = (n_ctx * (sizes.n_seq_max - 1) * part // KV_PARTS for part in range(KV_PARTS, 0, -1))
        n_kv = next(filter(is_modest, (pad_context(n_ctx + part) for part in parts)), n_ctx)
    elif n_kv < n_ctx:
        warnings.warn(
            f"kv_tokens={n_kv} cannot hold one context of {n_ctx} tokens, so {n_ctx} are kept; for less memory give"
            " a shorter context, too.",
            stacklevel=2,
        )
    n_kv = pad_context(max(n_ctx, min(n_kv, sizes.n_seq_max * n_ctx)))
    if n_kv > n_ctx:
        reasons.append(f"answers that are computed together share a context of {n_kv:,} tokens")
    return replace(sizes, n_ctx=n_ctx, kv_tokens=n_kv, reasons=tuple(reasons))


def pad_context(n_ctx: int) -> int:
    """`n_ctx` rounded up as llama.cpp does it; else the bindings' buffers would be shorter than its context.

    Raises OptionError for a number that no context can have.
    """
    if not 0 <= n_ctx <= MAX_CTX_TOKENS:
        raise OptionError(f"n_ctx is a number of tokens from 1 to {MAX_CTX_TOKENS}, but is {n_ctx}.")
    return -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS
