"""Models with a recurrent state: which layers have one, how many bytes it occupies, and
for which architectures llama.cpp can roll it back.

A context has one state for each sequence, and `n_rs_seq` snapshots of each state. A
snapshot is the state before one of the last tokens, so these tokens can be rolled back
(src/llama-memory-recurrent.cpp). DeepSeek V4 compresses the keys of tokens instead
(src/llama-kv-cache-dsv4.cpp).
"""

from __future__ import annotations

from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.reader import GGML_TYPES, Value

# Architectures, grouped by the rule for the layers that have a state
# (src/models/*.cpp): every layer, all layers except every n-th one, or the layers
# without key/value heads. Nemotron's layers with a feed-forward part have no state.
EVERY_LAYER = frozenset(
    ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "falcon-h1")
)
INTERVALS = {
    "qwen3next": 4,
    "qwen35": 4,
    "qwen35moe": 4,
    "qwen4exp": 4,
    "minimax-01": 8,
}
WITHOUT_HEADS = frozenset((
    "jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "kimi-linear", "kimi-k3",
    "bailingmoe3", "glm5-next",
))  # fmt: skip
DEEPSEEK4 = "deepseek4"
# Architectures whose sequences must not share cells. DeepSeek V4 compresses the keys of
# each sequence separately. qwen4exp may choose only part of a block of tokens. The
# choice depends on the order of cells, which is the order of tokens only if no other
# sequence has cells in between.
OWN_CELLS = frozenset((DEEPSEEK4, "qwen4exp"))
ROLLBACK_ARCHS = frozenset((
    "kimi-k3", "qwen35", "qwen35moe", "qwen4exp", DEEPSEEK4, "glm5-next", "nemotron_h", "nemotron_h_moe", "lfm2",
    "lfm2moe", "bailingmoe3",
))  # fmt: skip
"""Architectures for which llama.cpp's llm_arch_supports_rs_rollback returns true."""
FLOAT_BYTES = 4
KV_PAD_TOKENS = 256  # a KV cache's number of cells is a multiple of this number
# Tokens per compressed key of DeepSeek V4, if an indexer chooses among these keys.
COMPRESSED = 4
# Tokens per compressed key of DeepSeek V4, if every token reads all of these keys.
WIDE_COMPRESSED = 128


def row_bytes(ggml_type: int, n: int) -> int:
    """Returns the size in bytes of a row of `n` numbers of this type. A partially
    filled last block is counted in full."""
    _, block, block_bytes = GGML_TYPES[ggml_type]
    return -(-n // block) * block_bytes


def is_stateful(layout: ExpertLayout) -> bool:
    """Returns True if the architecture's sequences have a state from which tokens
    cannot be removed freely."""
    return layout.arch in EVERY_LAYER | INTERVALS.keys() | WITHOUT_HEADS | {DEEPSEEK4}


def shares_cells(layout: ExpertLayout) -> bool:
    """Returns True if the sequences of a context share the cells of one KV cache.
    Otherwise each sequence has its own cells, and the sequences of one ubatch have
    consecutive numbers."""
    return layout.arch not in OWN_CELLS


def recurrent_layers(layout: ExpertLayout) -> frozenset[int]:
    """Returns the indices of the layers that have a recurrent state."""
    layers = range(layout.hparams.n_layer)
    return frozenset(il for il in layers if _is_recurrent(layout, il))


def _is_recurrent(layout: ExpertLayout, il: int) -> bool:
    arch = layout.arch
    hparams = layout.hparams
    if arch in INTERVALS:
        marks = layout.metadata.get(f"{arch}.attention.recurrent_layers")
        if marks is not None:
            return bool(marks[il] if isinstance(marks, tuple) else marks)
        return (il + 1) % (
            layout.number("full_attention_interval", INTERVALS[arch]) or 1
        ) != 0
    if arch in WITHOUT_HEADS:
        return not hparams.n_head_kv[il] and not (
            arch.startswith("nemotron") and hparams.n_ff[il]
        )
    return arch in EVERY_LAYER


def attention_layers(layout: ExpertLayout) -> list[int]:
    """Returns the indices of the layers that have a KV cache, including the layers of
    loaded draft heads. A layer occurs twice if two contexts have a cache for it.

    The last layers of Gemma 4 may use the caches of earlier layers.
    """
    hparams = layout.hparams
    n_layer = hparams.n_layer
    n_heads = layout.n_layer_nextn * layout.loads_heads
    # The model's own context has a cache for bailingmoe3's heads, too, but never uses
    # this cache.
    n_own = hparams.n_layer_all if layout.arch == "bailingmoe3" else n_layer
    n_own -= layout.number("attention.shared_kv_layers")
    layers = [*range(n_own), *range(n_layer, n_layer + n_heads)]
    if not is_stateful(layout):
        return layers
    recurrent = (
        recurrent_layers(layout) if layout.arch != "falcon-h1" else frozenset[int]()
    )
    return [il for il in layers if hparams.n_head_kv[il] and il not in recurrent]


def state_bytes(layout: ExpertLayout) -> int:
    """Returns the size in bytes of one sequence's recurrent state, over all layers. A
    snapshot of the state has the same size."""
    if layout.arch == DEEPSEEK4:
        return _compressor_bytes(layout)
    n_embd = layout.hparams.n_embd
    n_head = layout.hparams.n_head[0]
    n_conv = layout.number("ssm.conv_kernel")
    inner = layout.number("ssm.inner_size")
    state = layout.number("ssm.state_size")
    history = max(0, n_conv - 1) * (
        inner + 2 * layout.number("ssm.group_count") * state
    )
    matrix = inner * state
    if wkv := layout.number("wkv.head_size"):
        history = n_embd * layout.number("token_shift_count", 2)
        matrix = n_embd * wkv
    elif n_seen := layout.number("shortconv.l_cache"):
        history = n_embd * (n_seen - 1)
    elif kda := layout.number("kda.head_dim"):
        history = 3 * (n_conv - 1 if n_conv else 3) * n_head * kda
        matrix = n_head * kda * kda
    elif layout.arch == "minimax-01":
        matrix = n_head * layout.hparams.key_length**2
    n_floats = len(recurrent_layers(layout)) * (history + matrix) + _ngram_floats(
        layout
    )
    return FLOAT_BYTES * n_floats


def _ngram_floats(layout: ExpertLayout) -> int:
    """Returns the number of values that the layers with an n-gram table keep in the
    recurrent state for the latest tokens."""
    layers = layout.metadata.get(f"{layout.arch}.ple.layers", ())
    n_layers = len(layers) if isinstance(layers, tuple) else 0
    n_before = max(0, layout.number("ple.conv_kernel") - 1) * layout.number(
        "ple.ngram_size"
    )
    return (
        n_layers
        * n_before
        * layout.number("hyper_connection.count")
        * layout.hparams.n_embd
    )


def _ratios(layout: ExpertLayout) -> tuple[Value, ...]:
    """Returns how many tokens share one compressed key, for each layer of DeepSeek V4.
    0: the layer's keys are not compressed."""
    found = layout.metadata.get(f"{layout.arch}.attention.compress_ratios", ())
    return found[: layout.hparams.n_layer] if isinstance(found, tuple) else ()


def _compressor_bytes(layout: ExpertLayout) -> int:
    ratios = _ratios(layout)
    key = layout.hparams.key_length
    chosen = 2 * COMPRESSED * 2 * (key + layout.number("attention.indexer.key_length"))
    wide = WIDE_COMPRESSED * key
    keys_and_scores = 2 * (
        ratios.count(COMPRESSED) * chosen + ratios.count(WIDE_COMPRESSED) * wide
    )
    return FLOAT_BYTES * keys_and_scores


def compressed_kv_bytes(layout: ExpertLayout, n_ctx: int, type_k: int) -> int:
    """Returns the size in bytes of one sequence's KV cache in DeepSeek V4: the keys of
    all tokens, and the compressed keys."""
    hparams = layout.hparams
    ratios = _ratios(layout)
    key = row_bytes(type_k, hparams.key_length * max(hparams.n_head_kv))
    indexed = row_bytes(type_k, layout.number("attention.indexer.key_length"))
    # Draft heads have a second context.
    n_layer = hparams.n_layer_all + layout.n_layer_nextn * layout.loads_heads
    n_bytes = n_layer * padded(n_ctx) * key
    n_bytes += (
        ratios.count(COMPRESSED) * padded(-(-n_ctx // COMPRESSED)) * (key + indexed)
    )
    return (
        n_bytes
        + ratios.count(WIDE_COMPRESSED) * padded(-(-n_ctx // WIDE_COMPRESSED)) * key
    )


def padded(n_tokens: int) -> int:
    """Returns `n_tokens` rounded up to a multiple of KV_PAD_TOKENS, as llama.cpp rounds
    its number of cells."""
    return -(-n_tokens // KV_PAD_TOKENS) * KV_PAD_TOKENS
