"""Memory that llama.cpp takes beside the experts, by the sizes of the context and of passes: dense weights, KV cache,
compute buffers.

Upper bounds from the model's metadata, computed before anything is loaded, so that a budget and a context length can be
planned; llama.cpp states the true figures after loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from moegguf.engine.machine import Memory
from moegguf.errors import AllocationError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.projector import ProjectorHeader
from moegguf.gguf.reader import GGML_TYPES
from moegguf.quantities import MIB, format_bytes

F16 = 1
ROUTER_COPIES = 2  # in signed bytes, of the predictor `skip`: the store's, and the one that switches it on again
FIXED_BYTES = 48 * MIB  # libraries, threads, graphs, staging buffers of the readers
VOCAB_TOKEN_BYTES = 320  # one token of the vocabulary, in both directions, with its merges
KV_PAD_TOKENS = 256
MAX_CTX_TOKENS = (1 << 31) - KV_PAD_TOKENS
DEFAULT_UBATCH_TOKENS = 512
HEADS_UBATCH_TOKENS = 32  # of a pass of the heads that draft


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes beside the pool, at a given context and batch. `slot_work_bytes` is scratch memory per slot of the pool."""

    dense_bytes: int
    kv_bytes: int
    compute_bytes: int
    slot_work_bytes: int
    projector_bytes: int = 0

    def total_bytes(self, n_slots: int) -> int:
        """All of it, with the scratch memory of `n_slots` slots."""
        lasting = self.dense_bytes + self.projector_bytes + self.kv_bytes
        return lasting + self.compute_bytes + n_slots * self.slot_work_bytes


def row_bytes(ggml_type: int, n: int) -> int:
    """Bytes of a row of `n` numbers; rows that do not fill their last block are rounded up to it."""
    _, block, block_bytes = GGML_TYPES[ggml_type]
    return -(-n // block) * block_bytes


def _scalar(layout: ExpertLayout, name: str) -> int:
    """`<arch>.<name>` when it is a whole number below 2^24, else 0."""
    value = layout.metadata.get(f"{layout.arch}.{name}", 0)
    if isinstance(value, tuple):
        value = max(value, default=0)
    return value if isinstance(value, int) and 0 <= value < 1 << 24 else 0


def kv_bytes(layout: ExpertLayout, n_ctx: int, type_k: int = F16, type_v: int = F16) -> int:
    """KV cache for `n_ctx` tokens, every layer at full length, plus the state of recurrent layers.

    Multi-head latent attention keeps one K row per token and no V when the file has the split matrices; older files
    keep full heads. Sliding windows are counted as full, the largest they can be.
    """
    hp, whole = layout.hparams, partial(_scalar, layout)
    n_tokens = -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS
    kv_heads = hp.n_head_kv[: hp.n_layer + layout.n_layer_nextn * layout.loads_heads]
    head = hp.n_embd // max(hp.n_head) if max(hp.n_head) else 0
    key_length = max(hp.key_length or head, whole("attention.key_length_swa"))
    value_length = max(hp.value_length or head, whole("attention.value_length_swa"))
    per_token = sum(row_bytes(type_k, key_length * n) for n in kv_heads)
    if not hp.is_mla:
        per_token += len(kv_heads) * row_bytes(type_v, value_length * max(kv_heads))
    per_token += len(kv_heads) * row_bytes(F16, whole("attention.indexer.key_length"))
    state, width, kda = whole("ssm.state_size"), whole("ssm.inner_size"), whole("kda.head_dim")
    n_before = max(0, whole("ssm.conv_kernel") - 1)
    recurrent = width * state + n_before * (width + 2 * whole("ssm.group_count") * state)  # of a layer, in float32
    recurrent += max(hp.n_head) * kda * (kda + 3 * n_before)
    return n_tokens * per_token + hp.n_layer * 4 * recurrent


def compute_bytes(layout: ExpertLayout, n_ctx: int, n_ubatch: int, flash_attn: bool = False) -> int:
    """Buffers of one pass of `n_ubatch` tokens: its widest stage, what lives through all stages, and fixed costs.

    Stages reuse each other's memory, so the largest of output logits, attention scores and expert activations counts.
    """
    hp = layout.hparams
    n_tokens = -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS
    k = layout.n_expert_used
    n_ff_exp = max((m.ne1 for m in layout.matrices if m.kind != "down"), default=0)
    n_wide = max(hp.n_embd, max(hp.n_head) * hp.key_length)
    scores = 0 if flash_attn else max(hp.n_head) * n_tokens
    sparse = 6 * n_tokens if _scalar(layout, "attention.indexer.head_count") else 0
    masks = 3 if _scalar(layout, "attention.sliding_window") else 2
    experts = 3 * k * (n_ff_exp + hp.n_embd) + 2 * layout.n_expert
    dense = 3 * max(hp.n_ff)
    lasting = 8 * n_wide + masks * n_tokens  # residual stream, Q, K, V; the mask in two types
    per_token = 4 * (max(scores + sparse, layout.n_vocab, experts, dense) + lasting)
    routers = ROUTER_COPIES * hp.n_embd * layout.n_expert_total
    n_ubatch += HEADS_UBATCH_TOKENS * layout.loads_heads
    return n_ubatch * per_token + layout.n_vocab * VOCAB_TOKEN_BYTES + routers + FIXED_BYTES


@dataclass(frozen=True)
class Sizes:
    """Context and passes to plan for; types of the KV cache are ggml's numbers.

    n_ctx: 0 is the model's own; None: the largest that leaves most memory to experts (`pool_plan.choose_context`).
    n_ubatch: stays as given unless there are too few slots for it; None: at most n_batch, chosen together with the
    slots. kv_tokens: of all n_seq_max sequences that the context holds; None: chosen. projector: of a model that reads
    images, too. adapter_bytes: of a LoRA adapter. reasons: of what was chosen.
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
        """Upper bounds of memory beside slots, for passes of `n_ubatch` tokens, of sizes without choices left.

        CPU mul_mat_id keeps a row list of 8 bytes per slot, chosen expert and token.
        """
        n_kv = self.kv_tokens or self.n_ctx or 0
        return MemoryNeeds(
            layout.dense_bytes + layout.tied_output_bytes + self.adapter_bytes,
            kv_bytes(layout, n_kv, self.type_k, self.type_v),
            compute_bytes(layout, n_kv, n_ubatch, self.flash_attn),
            8 * layout.n_expert_used * n_ubatch,
            self.projector.total_bytes if self.projector else 0,
        )


MARGIN_BYTES = 256 * MIB  # left free at least


def margin_bytes(free_bytes: int) -> int:
    """How many of the free bytes stay free when the budget is chosen here: a twentieth, or MARGIN_BYTES."""
    return max(free_bytes // 20, MARGIN_BYTES)


def pooling_batch_tokens(n_ctx: int) -> int:
    """Tokens of a batch, and of a pass, where pooling needs a text in one pass."""
    return min(n_ctx, 2048)


def pad_context(n_ctx: int) -> int:
    """`n_ctx` rounded up as llama.cpp does it; else the bindings' buffers would be shorter than its context.

    Raises OptionError for a number that no context can have.
    """
    if not 0 <= n_ctx <= MAX_CTX_TOKENS:
        raise OptionError(f"n_ctx is a number of tokens from 1 to {MAX_CTX_TOKENS}, but is {n_ctx}.")
    return -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS


def check_context(layout: ExpertLayout, sizes: Sizes, memory: Memory) -> None:
    """Raises AllocationError for a KV cache above all memory of the machine.

    llama.cpp would fail minutes later, or be killed.
    """
    n_ctx = max(sizes.kv_tokens or 0, sizes.n_ctx or 0)
    n_bytes = kv_bytes(layout, n_ctx, sizes.type_k, sizes.type_v)
    if n_bytes > memory.total_bytes:
        raise AllocationError(
            f"a context of {n_ctx} tokens needs {format_bytes(n_bytes)} for this model, but the machine has"
            f" {format_bytes(memory.total_bytes)}; lower n_ctx (--ctx, num_ctx)."
        )
