"""The sizes of a load, and estimates of the memory that the load needs in addition to
its experts: dense weights, KV cache and compute buffers.

`Sizes.of` derives the sizes from the load's options. The estimates use only file
headers, so a context length and a budget can be planned before anything is loaded. They
are meant as upper bounds; llama.cpp prints the actual sizes while it loads.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

from moegguf.engine.devices import has_gpu
from moegguf.engine.load_spec import AUTO, F16, LoadSpec
from moegguf.engine.machine import Memory, margin_bytes
from moegguf.engine.recurrent import (
    DEEPSEEK4,
    KV_PAD_TOKENS,
    ROLLBACK_ARCHS,
    attention_layers,
    compressed_kv_bytes,
    is_stateful,
    padded,
    row_bytes,
    shares_cells,
    state_bytes,
)
from moegguf.engine.windows import has_whole_windows, window_cells, window_layers
from moegguf.errors import AllocationError, OptionError
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.experts import ExpertLayout
from moegguf.options import MAX_PARALLEL
from moegguf.processor import has_kernels, read_processor
from moegguf.quantities import MIB, ExpertCache, format_bytes
from moegguf.settings import read_environment

ROUTER_COPIES = (
    # copies of all routers' weights, in signed bytes, for the predictor `skip`: one in
    # the store, and one from which the controller can switch the predictor on again
    2
)
# estimated bytes of RAM for libraries, threads, graphs, and buffers for reading the
# model's own file
FIXED_BYTES = 48 * MIB
# Bytes counted for each reader thread's read buffer (piece_bytes in native/pool.cpp).
READ_BYTES = 4 * MIB
# estimated bytes of RAM per token of the vocabulary, for the maps between tokens and
# text, and for the merges
VOCAB_TOKEN_BYTES = 320
MAX_CTX_TOKENS = (1 << 31) - KV_PAD_TOKENS
DEFAULT_UBATCH_TOKENS = 512
# Maximum tokens in a pass that a plan chooses; options and images may require more.
MOST_UBATCH_TOKENS = 4096
# Bytes for the logits of a pass; more if LEAST_LOGITS tokens, or one per sequence, need
# more.
LOGITS_BYTES = 64 * MIB
LEAST_LOGITS = 64
# limit on the default batch and pass sizes of an embedding load, where each input must
# be in one pass
POOLED_BATCH_TOKENS = 2048
# Maximum number of tokens in a pass of the multi-token-prediction heads.
HEADS_UBATCH_TOKENS = 32
# a default context of at most this length may exceed its usual share of memory; also
# the length that is assumed if the model's header has none
SMALL_CTX_TOKENS = 4096
LEAST_CTX_TOKENS = 512
# Number of equal steps in which a shared KV cache can shrink to the tokens of one
# sequence.
KV_PARTS = 16
# numbers of drafted tokens to choose from, if each drafted token needs a snapshot of
# the state; with checkpoints, a draft has at most the first number of tokens
DRAFT_TOKENS = (8, 4)
SNAPSHOT_SHARE = 16  # all snapshots together occupy at most 1/16 of the free memory
# Architectures for which llama.cpp does not use flash attention.
NEVER_FUSED = ("grok",)


@dataclass(frozen=True)
class MemoryNeeds:
    """Estimated bytes that a model needs in addition to its slots, with a given context
    and number of tokens in a pass."""

    # Weights that are not in slots, excluding the projector's and tables that are read
    # row by row
    dense_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0  # bytes of buffers, including scratch memory for the slots
    # Bytes of the projector's weights, and of its buffers while it reads an image.
    projector_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The total size in bytes, without the slots themselves."""
        lasting = self.dense_bytes + self.projector_bytes + self.kv_bytes
        return lasting + self.compute_bytes


@dataclass(frozen=True)
class ContextPlan:
    """The part of a plan for the context, in tokens and sequences."""

    n_ctx: int
    kv_tokens: int = 0  # number of tokens, over all sequences, that fit in the KV cache
    n_batch: int = DEFAULT_UBATCH_TOKENS
    n_seq_max: int = 1
    # Snapshots of each sequence's recurrent state; this many of its last tokens can be
    # rolled back.
    n_rs_seq: int = 0
    # 1: each sequence returns to a checkpoint of its recurrent state after a rejected
    # draft.
    n_checkpoints: int = 0

    def fixed_in(self, spec: LoadSpec) -> LoadSpec:
        """Returns the options with this context, so that another plan has the same."""
        return replace(spec, n_ctx=self.n_ctx, kv_tokens=self.kv_tokens)


def kv_bytes(
    layout: ExpertLayout,
    n_ctx: int,
    type_k: int = F16,
    type_v: int = F16,
    n_seq_max: int = 1,
    n_rs_seq: int = 0,
    n_ubatch: int | None = None,
    fused: bool = False,
) -> int:
    """Returns the size in bytes of a KV cache for `n_ctx` tokens (all sequences
    together), plus the recurrent states. Each of `n_seq_max` sequences has one state
    and `n_rs_seq` snapshots.

    n_ubatch, fused: as for `layer_kv_bytes`. DeepSeek V4 stores compressed keys
    (`compressed_kv_bytes`).
    """
    states = n_seq_max * (1 + n_rs_seq) * state_bytes(layout)
    if layout.arch == DEEPSEEK4:
        return states + n_seq_max * compressed_kv_bytes(
            layout, n_ctx // n_seq_max, type_k
        )
    n_in_windows = None
    if n_ubatch is not None:
        n_in_windows = window_cells(layout, n_ctx, n_seq_max * (1 + n_rs_seq), n_ubatch)
    by_layer = layer_kv_bytes(layout, n_ctx, type_k, type_v, n_in_windows, fused)
    return sum(n_bytes for _, n_bytes in by_layer) + states


def layer_kv_bytes(
    layout: ExpertLayout,
    n_ctx: int,
    type_k: int,
    type_v: int,
    n_in_windows: int | None,
    fused: bool,
) -> list[tuple[int, int]]:
    """Returns pairs: a layer, and the size in bytes of its KV cache for `n_ctx` tokens.
    A layer occurs twice if two contexts have a cache for it.

    Multi-head latent attention stores one K row per token and no V if the file has the
    split matrices; older files store full heads.

    n_in_windows: the cells of layers with a sliding window; None: as many as in other
    layers. fused: True for fused attention. Otherwise the V rows of all layers are as
    wide as the widest one.
    """
    hp = layout.hparams
    layers = attention_layers(layout)
    windows = window_layers(layout)

    def row(il: int, lengths: tuple[int, ...]) -> int:
        """Returns how many keys or values a layer has per token. `lengths` has the
        length of a head without a sliding window, and as a second item the length with
        a sliding window if this length is different. If the layers with a sliding
        window are not known, the largest length counts."""
        length = lengths[-1] if il in windows else lengths[0]
        return hp.n_head_kv[il] * (length if windows else max(lengths))

    n_values = {il: row(il, hp.value_lengths) for il in layers}
    widest = max(n_values.values(), default=0)
    indexer_bytes = row_bytes(F16, layout.number("attention.indexer.key_length"))

    def token_bytes(il: int) -> int:
        value_bytes = row_bytes(type_v, n_values[il] if fused else widest)
        key_bytes = row_bytes(type_k, row(il, hp.key_lengths))
        return key_bytes + indexer_bytes + (0 if hp.is_mla else value_bytes)

    n_cells = padded(n_ctx)
    n_windowed = n_cells if n_in_windows is None else n_in_windows
    return [
        (il, token_bytes(il) * (n_windowed if il in windows else n_cells))
        for il in layers
    ]


def logits_tokens(layout: ExpertLayout, n_seq_max: int) -> int:
    """Returns how many tokens of one pass may have logits, for loads where not every
    token needs logits.

    Each of `n_seq_max` sequences needs logits for one token, and drafts need logits for
    more. Logits for every token would be the largest buffer of a pass: 600 kB per token
    with Qwen3's vocabulary.
    """
    return max(LEAST_LOGITS, n_seq_max, LOGITS_BYTES // (4 * max(1, layout.n_vocab)))


def pass_bytes(
    layout: ExpertLayout,
    n_ctx: int,
    n_ubatch: int,
    flash_attn: bool = False,
    on_device: bool = False,
    n_logits: int | None = None,
) -> int:
    """Returns the total size in bytes of the buffers for one pass of `n_ubatch` tokens.
    If multi-token-prediction heads are loaded, includes the buffers of their passes.

    Stages of a pass reuse each other's memory, so only the largest stage counts:
    attention, experts, dense feed-forward or output logits. Without fused attention, a
    device also converts attention scores to 16 bits, in a pool that its backend never
    frees. `n_ctx`: tokens in the KV cache. `n_logits`: how many tokens of a pass may
    have logits; None: all of them.
    """
    hp = layout.hparams
    n_tokens = padded(n_ctx)
    k = layout.n_expert_used
    n_ff_exp = max((m.ne1 for m in layout.matrices if m.kind != "down"), default=0)
    n_wide = max(hp.n_embd, max(hp.n_head) * hp.key_length)
    scores = 0 if flash_attn else max(hp.n_head) * n_tokens
    sparse = 6 * n_tokens if layout.number("attention.indexer.head_count") else 0
    masks = 2 if layout.number("attention.sliding_window") else 1
    # Attention keeps a token's Q, K and V before and after their rotation, and its
    # scores. Experts keep gate and up with and without biases; later they keep the
    # input of down, its output and the weighted output.
    attention = 8 * n_wide + scores + sparse
    experts = k * max(4 * n_ff_exp, n_ff_exp + 2 * hp.n_embd) + 2 * layout.n_expert
    dense = 3 * max(hp.n_ff)
    # the mask's size in units of 4 bytes; with fused attention, its values have 2 bytes
    mask = masks * n_tokens // 2 if flash_attn else (masks + 1) * n_tokens
    # the quantised operand of a multiplication, in units of 4 bytes
    quantized = max(n_wide, k * n_ff_exp, *hp.n_ff) // 3
    lasting = 6 * hp.n_embd + mask + quantized

    def buffers(n: int, n_rows: int) -> int:
        """Returns the total size in bytes of the buffers for a pass of `n` tokens if
        `n_rows` tokens have logits."""
        values = (
            max(n * max(attention, experts, dense), n_rows * layout.n_vocab)
            + n * lasting
        )
        return 4 * values + on_device * n * row_bytes(F16, scores)

    n_rows = n_ubatch if n_logits is None else min(n_logits, n_ubatch)
    heads = (
        buffers(HEADS_UBATCH_TOKENS, HEADS_UBATCH_TOKENS) if layout.loads_heads else 0
    )
    return buffers(n_ubatch, n_rows) + heads


def fixed_bytes(layout: ExpertLayout) -> int:
    """Returns the estimated bytes of RAM that a load uses with or without devices:
    vocabulary, copies of the routers, libraries and threads."""
    routers = ROUTER_COPIES * layout.hparams.n_embd * layout.n_expert_total
    return layout.n_vocab * VOCAB_TOKEN_BYTES + routers + FIXED_BYTES


def slot_work_bytes(layout: ExpertLayout, n_ubatch: int) -> int:
    """Returns the size in bytes of the row lists that the CPU's kernels keep for one
    slot: 8 bytes for each chosen expert of each token of a pass."""
    return 8 * layout.n_expert_used * n_ubatch


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine a load's memory needs: context, passes, sequences and
    optional parts."""

    # 0: the model's own length; None: chosen by `choose_context`.
    n_ctx: int | None = None
    # requested number of tokens in a pass, which a plan lowers if the slots allow
    # fewer; None: chosen together with the slots
    n_ubatch: int | None = None
    # None: the tokens of a pass, at least DEFAULT_UBATCH_TOKENS; with `pools`, the
    # context, at most POOLED_BATCH_TOKENS
    n_batch: int | None = None
    n_seq_max: int = 1
    # snapshots of each sequence's recurrent state; before `choose_snapshots`, the
    # largest number that drafts can use
    n_rs_seq: int = 0
    # 1: drafts need a checkpoint of each sequence's state, because there are no
    # snapshots.
    n_checkpoints: int = 0
    # Number of tokens, over all sequences, that fit in the KV cache; None: chosen.
    kv_tokens: int | None = None
    # The checked options. The other fields replace the options with their names.
    spec: LoadSpec = field(default_factory=LoadSpec)
    adapter_bytes: int = 0  # bytes of the LoRA adapter; 0: there is none
    reader_bytes: int = 0  # bytes of read buffers for the threads that read mirrors
    # True: each text is pooled into one embedding, and must be in one pass.
    pools: bool = False
    # True: the sizes are for devices, so memory that is always in RAM is not counted.
    on_device: bool = False
    reasons: tuple[str, ...] = ()  # sentences about the choices, for the user

    @classmethod
    def of(cls, layout: ExpertLayout, spec: LoadSpec) -> Sizes:
        """Returns the sizes that the options in `spec` specify for this model. Raises
        OptionError for an impossible context length, and the same errors as
        `read_adapter`."""
        pools = computes_embeddings(layout, spec)
        drafts = not pools and may_draft(spec)
        return cls(
            n_ctx=None if spec.n_ctx is None else pad_context(spec.n_ctx),
            n_ubatch=spec.n_ubatch,
            n_batch=spec.n_batch,
            n_seq_max=1 if pools else spec.n_seq_max,
            n_rs_seq=DRAFT_TOKENS[0] if drafts and layout.arch in ROLLBACK_ARCHS else 0,
            n_checkpoints=int(
                drafts and is_stateful(layout) and layout.arch not in ROLLBACK_ARCHS
            ),
            kv_tokens=spec.kv_tokens or None,
            spec=spec,
            adapter_bytes=read_adapter(spec.lora_path, layout.arch).n_bytes
            if spec.lora_path
            else 0,
            reader_bytes=len(spec.mirror) * spec.store.readers * READ_BYTES,
            pools=pools,
        )

    @property
    def one_pass_tokens(self) -> int:
        """Number of image tokens that must be in the same pass; 1 without a projector,
        or if an image may be split among several passes."""
        projector = self.spec.projector
        return max(1, projector.one_pass_tokens if projector else 1)

    @property
    def projector_bytes(self) -> int:
        """Bytes of the projector's weights and buffers; 0 without a projector."""
        return self.spec.projector.total_bytes if self.spec.projector else 0

    @property
    def usual_ubatch(self) -> int:
        """Number of tokens in a pass, given or default, raised to `one_pass_tokens` if
        necessary. A plan may choose a different number to save reading or memory."""
        usual = min(DEFAULT_UBATCH_TOKENS, self.n_batch or DEFAULT_UBATCH_TOKENS)
        return max(self.one_pass_tokens, self.n_ubatch or usual)

    def most_ubatch(self, layout: ExpertLayout) -> int:
        """Returns the largest number of tokens that a plan may choose for a pass. This
        is `usual_ubatch` if the user gave `n_ubatch`, or if fused attention is not
        assumed (`is_fused`), because scores then grow with the pass."""
        if self.n_ubatch or not self.is_fused(layout):
            return self.usual_ubatch
        most = min(
            MOST_UBATCH_TOKENS,
            self.n_batch or MOST_UBATCH_TOKENS,
            self.n_ctx or MOST_UBATCH_TOKENS,
        )
        return max(self.usual_ubatch, most)

    def n_logits(self, layout: ExpertLayout) -> int | None:
        """Returns how many tokens of a pass may have logits; None: all of them."""
        if self.pools or self.spec.logits_all:
            return None
        return logits_tokens(layout, self.n_seq_max)

    def is_fused(self, layout: ExpertLayout) -> bool:
        """Returns True if the plan assumes fused attention; never for an architecture
        in NEVER_FUSED. If the option is None, fused attention is assumed only on the
        CPU, because a device may lack the kernel."""
        fused = self.spec.flash_attn
        if layout.arch in NEVER_FUSED:
            return False
        return not self.on_device if fused is None else fused

    def with_context(self, layout: ExpertLayout, n_ctx: int) -> Sizes:
        """Returns the sizes with a context of `n_ctx` tokens. With `pools`, a missing
        batch or pass size is derived from the context. The number of sequences is
        lowered to what the context and the batch allow.

        Raises OptionError for an impossible number of sequences.
        """
        n_batch = self.n_batch
        n_ubatch = self.n_ubatch
        if self.pools:
            n_batch = n_batch or min(n_ctx, POOLED_BATCH_TOKENS)
            n_ubatch = n_ubatch or n_batch
        if n_batch is not None:
            n_batch = max(n_batch, self.one_pass_tokens)
            n_ubatch = min(n_ubatch, n_batch) if n_ubatch else None
        n_seq_max = min(
            sequences_of(layout, n_ctx, self.n_seq_max),
            n_batch or DEFAULT_UBATCH_TOKENS,
        )
        return replace(
            self, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch, n_seq_max=n_seq_max
        )

    def context(self, n_ubatch: int) -> ContextPlan:
        """Returns the chosen context, for passes of `n_ubatch` tokens."""
        n_batch = self.n_batch or max(DEFAULT_UBATCH_TOKENS, n_ubatch)
        can_roll_back = min(n_ubatch, n_batch) > self.n_rs_seq + 1
        return ContextPlan(
            self.n_ctx or 0,
            self.kv_tokens or 0,
            n_batch,
            self.n_seq_max,
            self.n_rs_seq if can_roll_back else 0,
            self.n_checkpoints,
        )

    def needs(
        self, layout: ExpertLayout, n_ubatch: int, n_slots: int = 0
    ) -> MemoryNeeds:
        """Returns estimates of the memory needed in addition to `n_slots` slots, for
        passes of `n_ubatch` tokens. The context must already have been chosen."""
        n_kv = self.kv_tokens or self.n_ctx or 0
        compute_bytes = pass_bytes(
            layout,
            n_kv,
            n_ubatch,
            self.is_fused(layout),
            self.on_device,
            self.n_logits(layout),
        )
        if not self.on_device:
            compute_bytes += fixed_bytes(layout) + self.reader_bytes
            compute_bytes += n_slots * slot_work_bytes(layout, n_ubatch)
        return MemoryNeeds(
            layout.dense_bytes + layout.tied_output_bytes + self.adapter_bytes,
            self.kv_bytes(layout, n_kv, n_ubatch),
            compute_bytes,
            self.projector_bytes,
        )

    def kv_bytes(self, layout: ExpertLayout, n_cells: int, n_ubatch: int) -> int:
        """Returns the size in bytes of the KV cache and the recurrent states. The cache
        has room for `n_cells` tokens of all sequences, and a pass has `n_ubatch`
        tokens."""
        spec = self.spec
        n_saved = self.n_rs_seq + self.n_checkpoints
        is_whole = has_whole_windows(layout, spec)
        return kv_bytes(
            layout, n_cells, spec.type_k, spec.type_v, self.n_seq_max, n_saved,
            None if is_whole else n_ubatch, self.is_fused(layout),
        )  # fmt: skip

    def kv_shares(self, layout: ExpertLayout, n_ubatch: int) -> Counter[int]:
        """Returns the parts of the KV cache that belong to each layer, in bytes,
        without states and compressed keys."""
        n_kv = self.kv_tokens or self.n_ctx or 0
        n_in_windows = None
        if not has_whole_windows(layout, self.spec):
            n_in_windows = window_cells(layout, n_kv, self.n_seq_max, n_ubatch)
        spec = self.spec
        shares = Counter[int]()
        for il, n_bytes in layer_kv_bytes(
            layout, n_kv, spec.type_k, spec.type_v, n_in_windows, self.is_fused(layout)
        ):
            shares[il] += n_bytes
        return shares


def computes_embeddings(layout: ExpertLayout, spec: LoadSpec) -> bool:
    """Returns True if the load computes embeddings. This is so if the option
    `embedding` is True, or if the option is None and the model's GGUF header has a
    pooling type other than 0."""
    is_embedding = bool(layout.metadata.get(f"{layout.arch}.pooling_type"))
    return is_embedding if spec.embedding is None else spec.embedding


def choose_context(
    layout: ExpertLayout, sizes: Sizes, free_bytes: int, cache: ExpertCache = AUTO
) -> Sizes:
    """Returns the sizes with a context, a KV cache and a number of snapshots, chosen
    for `free_bytes` of memory.

    `cache` is the budget for experts; "auto": experts get all memory that is left.

    Without a given length, the context uses at most a tenth of the free memory, or up
    to a quarter if every expert still fits. It uses at most a quarter of a given
    `cache`, and is never longer than the model's own. A context of up to 4,096 tokens
    may use more. But a context of more than 512 tokens never uses more memory than it
    leaves to experts, or more than a given `cache` leaves.

    Without a given size, the KV cache has room for all sequences at full length, or for
    fewer tokens if that would exceed these limits. Answers are rarely as long as their
    context can be, and memory for experts makes each answer faster. The cache always
    has room for one sequence at full length. If sequences do not share cells, each has
    room for its full length.

    A given size is raised to the tokens of one sequence, with a warning, or lowered to
    the tokens of all sequences.

    Raises OptionError for an impossible context length or number of sequences.
    """
    given_bytes = (
        0
        if cache.mode == "auto"
        else cache.n_bytes or round(cache.fraction * layout.expert_bytes)
    )
    pool_bytes = min(given_bytes, layout.expert_bytes)
    free_bytes -= sizes.adapter_bytes + sizes.reader_bytes + sizes.projector_bytes
    buffers = partial(
        pass_bytes,
        layout,
        flash_attn=sizes.is_fused(layout),
        n_logits=sizes.n_logits(layout),
    )
    # The weights of a model without experts are mapped: they need not stay in memory.
    dense_bytes = layout.dense_bytes + layout.tied_output_bytes if layout.is_moe else 0
    sizes = choose_snapshots(layout, sizes, free_bytes)
    rest = (
        free_bytes
        - margin_bytes(free_bytes)
        - dense_bytes
        - buffers(KV_PAD_TOKENS, 1)
        - fixed_bytes(layout)
    )
    modest_bytes = max(
        free_bytes // 10, min(free_bytes // 4, rest - layout.expert_bytes)
    )
    if pool_bytes:  # a given budget also limits the context
        modest_bytes = min(modest_bytes, pool_bytes // 4)

    def is_modest(n_tokens: int) -> bool:
        """Returns True if a KV cache with `n_tokens` is within the limits. If sequences
        do not share cells, each sequence has `n_tokens`."""
        n_cells = n_tokens if shares_cells(layout) else n_tokens * sizes.n_seq_max
        cached_bytes = sizes.kv_bytes(layout, n_cells, sizes.usual_ubatch)
        grown = buffers(n_tokens, sizes.usual_ubatch) - buffers(
            KV_PAD_TOKENS, sizes.usual_ubatch
        )
        is_small = n_tokens <= SMALL_CTX_TOKENS or cached_bytes + grown <= modest_bytes
        return is_small and cached_bytes <= (
            rest - pool_bytes if pool_bytes else rest // 2
        )

    n_ctx = sizes.n_ctx
    n_kv = sizes.kv_tokens
    reasons = list(sizes.reasons)
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
    sizes = sizes.with_context(layout, pad_context(n_ctx) or trained)
    n_ctx = sizes.n_ctx or trained
    if not shares_cells(layout):
        n_kv = n_ctx * sizes.n_seq_max
    elif not n_kv:
        parts = (
            n_ctx * (sizes.n_seq_max - 1) * part // KV_PARTS
            for part in range(KV_PARTS, 0, -1)
        )
        n_kv = next(
            filter(is_modest, (pad_context(n_ctx + part) for part in parts)), n_ctx
        )
    elif n_kv < n_ctx:
        warnings.warn(
            f"kv_tokens={n_kv} cannot hold one context of {n_ctx} tokens, so {n_ctx} are kept; for less memory give"
            " a shorter context, too.",
            stacklevel=2,
        )
    n_kv = pad_context(max(n_ctx, min(n_kv, sizes.n_seq_max * n_ctx)))
    if n_kv > n_ctx and shares_cells(layout):
        reasons.append(
            f"answers that are computed together share a context of {n_kv:,} tokens"
        )
    return replace(sizes, kv_tokens=n_kv, reasons=tuple(reasons))


def may_draft(spec: LoadSpec) -> bool:
    """Returns True if the options allow drafts.

    "auto" drafts only if every answer stays the same, bit for bit. This requires this
    package's kernels, that flash attention is not switched off, and that there is no
    GPU (`sequences.is_batch_invariant`).
    """
    if spec.draft == "auto":
        return (
            spec.flash_attn is not False
            and has_kernels(read_processor(), read_environment().kernels)
            and not has_gpu()
        )
    return spec.draft != "off"


def choose_snapshots(layout: ExpertLayout, sizes: Sizes, free_bytes: int) -> Sizes:
    """Returns the sizes with the number of snapshots and checkpoints limited, so that
    together they occupy at most 1/SNAPSHOT_SHARE of `free_bytes`. The result's
    `reasons` explains only these numbers, and is empty if no snapshots and no
    checkpoints are wanted."""
    all_bytes = sizes.n_seq_max * state_bytes(layout)
    if sizes.n_checkpoints:
        fits = (
            all_bytes <= free_bytes // SNAPSHOT_SHARE
            and 2 * sizes.n_seq_max <= MAX_PARALLEL
        )
        if fits:
            taken = format_bytes(all_bytes)
            reason = f"if a draft is rejected, the model returns to a saved state; saved states take {taken}"
            return replace(sizes, reasons=(reason,))
        reason = f"nothing is drafted: saved states for rejected drafts would take {format_bytes(all_bytes)}"
        return replace(sizes, n_checkpoints=0, reasons=(reason,))
    if not sizes.n_rs_seq:
        return replace(sizes, reasons=())
    fitting = (n for n in DRAFT_TOKENS if n * all_bytes <= free_bytes // SNAPSHOT_SHARE)
    n_rs_seq = min(next(fitting, 0), sizes.n_rs_seq)
    reason = f"a draft has at most {n_rs_seq} tokens: what restores the state before each of them takes"
    if not n_rs_seq:
        reason = f"nothing is drafted: what restores the state before each of {DRAFT_TOKENS[-1]} tokens would take"
    taken = format_bytes((n_rs_seq or DRAFT_TOKENS[-1]) * all_bytes)
    return replace(sizes, n_rs_seq=n_rs_seq, reasons=(f"{reason} {taken}",))


def pad_context(n_ctx: int) -> int:
    """Returns `n_ctx` rounded up to a multiple of KV_PAD_TOKENS, as llama.cpp does.
    Otherwise the bindings' buffers would be too short for the context.

    Raises OptionError for a negative number, and for more than MAX_CTX_TOKENS.
    """
    if not 0 <= n_ctx <= MAX_CTX_TOKENS:
        raise OptionError(
            f"n_ctx must be a number of tokens from 1 to {MAX_CTX_TOKENS}, or 0 for the model's own context length, but"
            f" is {n_ctx}; give another number."
        )
    return padded(n_ctx)


def sequences_of(layout: ExpertLayout, n_ctx: int, wanted: int) -> int:
    """Returns how many sequences of `n_ctx` tokens one context of the model may hold:
    `wanted`, or 1.

    Returns 1 for embedding models, and if llama.cpp would choose other rotary factors
    for `wanted` times `n_ctx` tokens than for `n_ctx`. Raises OptionError if `wanted`
    is not from 1 to MAX_PARALLEL.
    """
    if not 1 <= wanted <= MAX_PARALLEL:
        raise OptionError(
            f"parallel (n_seq_max) must be a number of sequences from 1 to {MAX_PARALLEL}, but is {wanted}."
        )
    metadata = layout.metadata
    arch = layout.arch
    trained = metadata.get(
        f"{arch}.rope.scaling.original_context_length", layout.hparams.n_ctx_train
    )
    changes_rope = (
        layout.has_long_rope
        and isinstance(trained, int)
        and n_ctx <= trained < n_ctx * wanted
    )
    return 1 if metadata.get(f"{arch}.pooling_type") or changes_rope else wanted


def check_context(layout: ExpertLayout, sizes: Sizes, memory: Memory) -> None:
    """Raises AllocationError if the KV cache of the requested context is larger than
    the machine's total memory.

    Without this check, llama.cpp would fail minutes later, or the process would be
    killed.
    """
    n_ctx = max(sizes.kv_tokens or 0, sizes.n_ctx or 0)
    n_bytes = replace(sizes, n_rs_seq=0, n_checkpoints=0).kv_bytes(
        layout, n_ctx, sizes.usual_ubatch
    )
    if n_bytes > memory.total_bytes:
        raise AllocationError(
            f"a context of {n_ctx} tokens needs {format_bytes(n_bytes)} for this model, but the machine has"
            f" {format_bytes(memory.total_bytes)}; lower n_ctx (--ctx, num_ctx)."
        )
