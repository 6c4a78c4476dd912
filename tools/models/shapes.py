"""Dimensions of a model before quantisation, with llama.cpp's names, and presets with
the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moegguf.gguf.experts import HEADS_ARCHS

# ARCHS lists, for each architecture, the optional fields of Shape that must be
# positive.
DELTA_NET = ("ssm_d_conv", "ssm_d_inner", "ssm_d_state", "ssm_dt_rank", "ssm_n_group")
QWEN_DELTA_NET = (*DELTA_NET, "n_ff_shexp", "n_rot")
DELTA_ATTENTION = (
    "ssm_d_conv",
    "n_embd_head_kda",
    "kv_lora_rank",
    "n_rot",
    "n_expert_shared",
)
ARCHS: dict[str, tuple[str, ...]] = {
    "qwen2moe": ("n_ff_shexp",),
    "qwen3moe": (),
    "qwen3vlmoe": (),
    "llama": (),
    "deepseek2": ("kv_lora_rank", "n_rot"),
    "gpt-oss": ("n_swa",),
    "glm4moe": (),
    "gemma4": ("n_ff", "n_swa", "n_embd_head_swa", "n_head_kv_swa"),
    "qwen3next": QWEN_DELTA_NET,
    "qwen35moe": QWEN_DELTA_NET,
    "qwen4exp": (
        *QWEN_DELTA_NET,
        "hc_mult",
        "hc_low_rank",
        "indexer_n_head",
        "ple_vocab_base",
    ),
    "nemotron_h_moe": (*DELTA_NET, "n_ff_shexp"),
    "lfm2moe": ("ssm_d_conv", "n_ff"),
    "kimi-linear": DELTA_ATTENTION,
    "bailingmoe3": (*DELTA_ATTENTION, "n_layer_dense_lead"),
    "granitehybrid": (*DELTA_NET, "n_ff_shexp"),
    "deepseek4": (
        "n_lora_q",
        "n_rot",
        "n_swa",
        "hc_mult",
        "indexer_n_head",
        "o_n_group",
        "n_expert_shared",
    ),
}
ROPE_FREQ_BASE = 1_000_000.0


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Mixture-of-Experts model. A dimension is 0 if the model lacks the
    corresponding part.

    Exceptions: if `n_ff`, `n_rot` or `n_embd_head_v` is 0, the value of `n_ff_exp` or
    `n_embd_head` is used instead.

    `mixers` has one letter for each layer and is repeated if there are more layers. The
    letters are `a` for attention, `w` for attention within a sliding window, `r` for a
    recurrent state, and `e` for a layer that has only experts.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_embd_head: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_vocab: int
    n_ff_shexp: int = 0
    n_ff: int = 0
    n_layer_dense_lead: int = 0
    n_expert_shared: int = 0
    kv_lora_rank: int = 0
    n_rot: int = 0
    n_embd_head_v: int = 0
    n_ctx_train: int = 32768
    n_swa: int = 0
    # Sizes of layers with the letter `w`, where they differ from other layers.
    n_embd_head_swa: int = 0
    n_head_kv_swa: int = 0
    # Number of last layers that use the keys and values of earlier layers.
    n_layer_shared_kv: int = 0
    n_embd_per_layer: int = 0  # width of a token's embedding for each layer
    n_layer_nextn: int = 0
    mixers: str = "a"
    ssm_d_conv: int = 0  # width of the convolution, in tokens
    ssm_d_inner: int = 0
    ssm_d_state: int = 0
    ssm_dt_rank: int = 0  # number of heads of a recurrent state
    ssm_n_group: int = 0
    n_embd_head_kda: int = 0
    n_lora_q: int = 0
    # Number of groups of heads; each group has its own first output matrix.
    o_n_group: int = 0
    o_lora_rank: int = 0
    hc_mult: int = 0  # number of residual streams of hyper-connections
    hc_low_rank: int = 0
    indexer_n_head: int = 0
    indexer_head_size: int = 0
    indexer_top_k: int = 0
    n_layer_hash: int = 0  # number of leading layers that route by token id
    # Each hash function has slightly more rows than this in the n-gram table; 0: no
    # table.
    ple_vocab_base: int = 0
    ple_heads_per_ngram: int = 0

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(
                f"arch has to be one of {', '.join(ARCHS)}, but is {self.arch!r}"
            )
        if not 0 < self.n_expert_used <= self.n_expert:
            raise ValueError(
                f"n_expert_used has to be in 1..{self.n_expert}, but is {self.n_expert_used}"
            )
        if self.n_head % self.n_head_kv:
            raise ValueError(
                f"n_head has to be a multiple of n_head_kv={self.n_head_kv}, but is {self.n_head}"
            )
        if self.arch == "qwen2moe" and self.n_head * self.n_embd_head != self.n_embd:
            raise ValueError(
                f"qwen2moe needs n_head * n_embd_head = n_embd = {self.n_embd}"
            )
        missing = [name for name in ARCHS[self.arch] if not getattr(self, name)]
        if missing:
            raise ValueError(f"{self.arch} needs a positive {', '.join(missing)}")
        if self.arch == "deepseek2" and self.n_rot >= self.n_embd_head:
            raise ValueError("deepseek2 needs n_rot below n_embd_head")
        if self.n_layer_nextn and self.arch not in HEADS_ARCHS:
            raise ValueError(
                f"only {', '.join(HEADS_ARCHS)} have heads for more tokens (n_layer_nextn)"
            )
        if self.arch == "granitehybrid" and self.ssm_d_inner != 2 * self.n_embd:
            raise ValueError(
                f"granitehybrid needs ssm_d_inner = 2 * n_embd = {2 * self.n_embd}"
            )

    def mixer(self, il: int) -> str:
        """Returns a layer's letter in `mixers`. Layers for multi-token prediction have
        attention, "a"."""
        return self.mixers[il % len(self.mixers)] if il < self.n_layer else "a"

    def head(self, il: int) -> int:
        """Returns the width of a head in a layer."""
        is_swa = self.mixer(il) == "w"
        return self.n_embd_head_swa if is_swa else self.n_embd_head

    def head_kv(self, il: int) -> int:
        """Returns the number of KV heads in a layer."""
        return self.n_head_kv_swa if self.mixer(il) == "w" else self.n_head_kv

    @property
    def n_ff_shared(self) -> int:
        """Returns the width of the shared expert: n_ff_exp * n_expert_shared, or
        n_ff_shexp if this product is 0."""
        return self.n_ff_exp * self.n_expert_shared or self.n_ff_shexp

    @property
    def n_layer_all(self) -> int:
        """Returns the number of layers in the file, including layers for multi-token
        prediction."""
        return self.n_layer + self.n_layer_nextn

    @property
    def n_embd_out(self) -> int:
        """Returns the number of columns in attention's output matrix: the total width
        of all heads' values."""
        return self.n_head * (self.n_embd_head_v or self.n_embd_head)


TINY = Shape(
    "qwen3moe",
    n_layer=4,
    n_embd=128,
    n_head=4,
    n_head_kv=2,
    n_embd_head=64,
    n_expert=16,
    n_expert_used=4,
    n_ff_exp=64,
    n_vocab=1024,
    n_ctx_train=2048,
)
"""The shape from which the presets of small models differ."""

PRESETS: dict[str, Shape] = {
    "qwen1.5-moe-a2.7b": Shape(
        "qwen2moe",
        n_layer=24,
        n_embd=2048,
        n_head=16,
        n_head_kv=16,
        n_embd_head=128,
        n_expert=60,
        n_expert_used=4,
        n_ff_exp=1408,
        n_ff_shexp=5632,
        n_ff=5632,
        n_vocab=151936,
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3moe",
        n_layer=48,
        n_embd=2048,
        n_head=32,
        n_head_kv=4,
        n_embd_head=128,
        n_expert=128,
        n_expert_used=8,
        n_ff_exp=768,
        n_ff=6144,
        n_vocab=151936,
    ),
    "mixtral-8x7b": Shape(
        "llama",
        n_layer=32,
        n_embd=4096,
        n_head=32,
        n_head_kv=8,
        n_embd_head=128,
        n_expert=8,
        n_expert_used=2,
        n_ff_exp=14336,
        n_vocab=32000,
    ),
    "glm-4.5-air": Shape(
        "glm4moe",
        n_layer=46,
        n_embd=4096,
        n_head=96,
        n_head_kv=8,
        n_embd_head=128,
        n_expert=128,
        n_expert_used=8,
        n_ff_exp=1408,
        n_ff=10944,
        n_vocab=151552,
        n_layer_dense_lead=1,
        n_expert_shared=1,
        n_rot=64,
        n_layer_nextn=1,
    ),
    "deepseek-v2-lite": Shape(
        "deepseek2",
        n_layer=27,
        n_embd=2048,
        n_head=16,
        n_head_kv=16,
        n_embd_head=192,
        n_expert=64,
        n_expert_used=6,
        n_ff_exp=1408,
        n_ff=10944,
        n_vocab=102400,
        n_layer_dense_lead=1,
        n_expert_shared=2,
        kv_lora_rank=512,
        n_rot=64,
        n_embd_head_v=128,
    ),
    "qwen3.6-35b-a3b": Shape(
        "qwen35moe",
        n_layer=40,
        n_embd=2048,
        n_head=16,
        n_head_kv=2,
        n_embd_head=256,
        n_expert=256,
        n_expert_used=8,
        n_ff_exp=512,
        n_ff_shexp=512,
        n_vocab=248320,
        n_rot=64,
        n_ctx_train=262144,
        n_layer_nextn=1,
        mixers="rrra",
        ssm_d_conv=4,
        ssm_d_inner=4096,
        ssm_d_state=128,
        ssm_dt_rank=32,
        ssm_n_group=16,
    ),
    "qwen3.8-flash-next": Shape(
        "qwen4exp",
        n_layer=48,
        n_embd=2560,
        n_head=24,
        n_head_kv=2,
        n_embd_head=256,
        n_expert=512,
        n_expert_used=10,
        n_ff_exp=640,
        n_ff_shexp=640,
        n_vocab=248320,
        n_rot=64,
        n_ctx_train=262144,
        mixers="rrra",
        ssm_d_conv=4,
        ssm_d_inner=6144,
        ssm_d_state=128,
        ssm_dt_rank=48,
        ssm_n_group=16,
        hc_mult=4,
        hc_low_rank=320,
        indexer_n_head=4,
        indexer_head_size=128,
        indexer_top_k=2048,
        ple_vocab_base=20_000_000,
        ple_heads_per_ngram=8,
    ),
    "nemotron-3-nano-30b-a3b": Shape(
        "nemotron_h_moe",
        n_layer=52,
        n_embd=2688,
        n_head=32,
        n_head_kv=2,
        n_embd_head=128,
        n_expert=128,
        n_expert_used=6,
        n_ff_exp=1856,
        n_ff_shexp=3712,
        n_vocab=131072,
        n_ctx_train=262144,
        mixers="rererae" * 5 + "rerererae" + "rererere",
        ssm_d_conv=4,
        ssm_d_inner=4096,
        ssm_d_state=128,
        ssm_dt_rank=64,
        ssm_n_group=8,
    ),
    "lfm2-8b-a1b": Shape(
        "lfm2moe",
        n_layer=24,
        n_embd=2048,
        n_head=32,
        n_head_kv=8,
        n_embd_head=64,
        n_expert=32,
        n_expert_used=4,
        n_ff_exp=1792,
        n_ff=7168,
        n_vocab=65536,
        n_layer_dense_lead=2,
        n_ctx_train=128000,
        mixers="rrarrrarrrarrrarrrarrarr",
        ssm_d_conv=3,
    ),
    "kimi-linear-48b-a3b": Shape(
        "kimi-linear",
        n_layer=27,
        n_embd=2304,
        n_head=32,
        n_head_kv=32,
        n_embd_head=192,
        n_expert=256,
        n_expert_used=8,
        n_ff_exp=1024,
        n_ff=9216,
        n_vocab=163840,
        n_layer_dense_lead=1,
        n_expert_shared=1,
        kv_lora_rank=512,
        n_rot=64,
        n_embd_head_v=128,
        n_ctx_train=1048576,
        mixers="rrra" * 6 + "rra",
        ssm_d_conv=4,
        n_embd_head_kda=128,
    ),
    # The metadata and tensors that ollama.com lists for gemma4:26b-a4b-it-q4_K_M, read
    # on 2026-11-30.
    "gemma-4-26b-a4b": Shape(
        "gemma4",
        n_layer=30,
        n_embd=2816,
        n_head=16,
        n_head_kv=2,
        n_embd_head=512,
        n_expert=128,
        n_expert_used=8,
        n_ff_exp=704,
        n_ff=2112,
        n_vocab=262144,
        n_ctx_train=262144,
        n_swa=1024,
        n_embd_head_swa=256,
        n_head_kv_swa=8,
        mixers="wwwwwa",
    ),
    "granite-4.0-h-small": Shape(
        "granitehybrid",
        n_layer=40,
        n_embd=4096,
        n_head=32,
        n_head_kv=8,
        n_embd_head=128,
        n_expert=72,
        n_expert_used=10,
        n_ff_exp=768,
        n_ff_shexp=1536,
        n_vocab=100352,
        n_ctx_train=131072,
        mixers="rrrrrarrrr",
        ssm_d_conv=4,
        ssm_d_inner=8192,
        ssm_d_state=128,
        ssm_dt_rank=128,
        ssm_n_group=1,
    ),
    "deepseek-v4-flash": Shape(
        "deepseek4",
        n_layer=43,
        n_embd=4096,
        n_head=64,
        n_head_kv=1,
        n_embd_head=512,
        n_expert=256,
        n_expert_used=6,
        n_ff_exp=2048,
        n_vocab=129280,
        n_expert_shared=1,
        n_rot=64,
        n_ctx_train=1048576,
        n_swa=128,
        n_layer_nextn=1,
        n_lora_q=1024,
        o_n_group=8,
        o_lora_rank=1024,
        hc_mult=4,
        indexer_n_head=64,
        indexer_head_size=128,
        indexer_top_k=512,
        n_layer_hash=3,
    ),
    "tiny-qwen2moe": replace(
        TINY, arch="qwen2moe", n_head_kv=4, n_embd_head=32, n_ff_shexp=128, n_ff=128
    ),
    "tiny-qwen3moe": replace(TINY, n_expert=32),
    "tiny-qwen3vlmoe": replace(TINY, arch="qwen3vlmoe", n_embd_head=32),
    "tiny-mixtral": replace(
        TINY,
        arch="llama",
        n_layer=3,
        n_embd=256,
        n_expert=8,
        n_expert_used=2,
        n_ff_exp=256,
    ),
    "tiny-deepseek2": replace(
        TINY,
        arch="deepseek2",
        n_head_kv=4,
        n_embd_head=96,
        n_expert_used=3,
        n_ff=256,
        n_layer_dense_lead=1,
        n_expert_shared=2,
        kv_lora_rank=64,
        n_rot=32,
        n_embd_head_v=64,
    ),
    "tiny-gpt-oss": replace(TINY, arch="gpt-oss", n_embd_head=32, n_swa=128),
    "tiny-glm4moe": replace(
        TINY,
        arch="glm4moe",
        n_expert_used=3,
        n_ff=256,
        n_layer_dense_lead=1,
        n_expert_shared=1,
        n_rot=32,
        n_layer_nextn=1,
    ),
    # Like the smaller dense models of the family, it has embeddings for each layer, and
    # layers that share keys and values.
    "tiny-gemma4": replace(
        TINY,
        arch="gemma4",
        n_layer=6,
        n_head_kv=1,
        n_ff=96,
        n_swa=96,
        n_embd_head_swa=32,
        n_head_kv_swa=2,
        n_layer_shared_kv=3,
        n_embd_per_layer=32,
        mixers="wwa",
    ),
    "tiny-qwen35moe": replace(
        TINY,
        arch="qwen35moe",
        n_ff_shexp=64,
        n_rot=32,
        n_layer_nextn=1,
        mixers="rrra",
        ssm_d_conv=4,
        ssm_d_inner=128,
        ssm_d_state=32,
        ssm_dt_rank=4,
        ssm_n_group=2,
    ),
    "tiny-nemotron": replace(
        TINY,
        arch="nemotron_h_moe",
        n_layer=7,
        n_embd_head=32,
        n_ff_shexp=128,
        n_layer_nextn=1,
        mixers="rererae",
        ssm_d_conv=4,
        ssm_d_inner=128,
        ssm_d_state=32,
        ssm_dt_rank=4,
        ssm_n_group=2,
    ),
    "tiny-lfm2moe": replace(
        TINY,
        arch="lfm2moe",
        n_embd_head=32,
        n_expert=8,
        n_expert_used=2,
        n_ff=128,
        n_layer_dense_lead=1,
        mixers="rara",
        ssm_d_conv=3,
    ),
    "tiny-kimi-linear": replace(
        TINY,
        arch="kimi-linear",
        n_head_kv=4,
        n_embd_head=96,
        n_ff=256,
        n_layer_dense_lead=1,
        n_expert_shared=1,
        kv_lora_rank=64,
        n_rot=32,
        n_embd_head_v=64,
        mixers="rrra",
        ssm_d_conv=4,
        n_embd_head_kda=32,
    ),
    "tiny-granitehybrid": replace(
        TINY,
        arch="granitehybrid",
        n_embd_head=32,
        n_ff_shexp=128,
        mixers="rrar",
        ssm_d_conv=4,
        ssm_d_inner=256,
        ssm_d_state=32,
        ssm_dt_rank=8,
        ssm_n_group=1,
    ),
    "tiny-deepseek4": replace(
        TINY,
        arch="deepseek4",
        n_head_kv=1,
        # If equal to indexer_head_size, llama.cpp divides by zero in a cache without
        # layers.
        n_embd_head=128,
        n_expert_shared=1,
        n_rot=32,
        n_swa=64,
        n_layer_nextn=1,
        n_lora_q=64,
        o_n_group=2,
        o_lora_rank=32,
        hc_mult=4,
        indexer_n_head=4,
        indexer_head_size=64,
        indexer_top_k=64,
        n_layer_hash=1,
    ),
    "tiny-mix": replace(
        TINY,
        arch="qwen2moe",
        n_embd=256,
        n_head_kv=4,
        n_ff_exp=256,
        n_ff_shexp=256,
        n_ff=256,
    ),
}
PRESETS |= {
    "tiny-glm-flash": replace(PRESETS["tiny-deepseek2"], n_layer_nextn=1, n_lora_q=64),
    "tiny-qwen3next": replace(PRESETS["tiny-qwen35moe"], arch="qwen3next"),
    "tiny-qwen4exp": replace(
        PRESETS["tiny-qwen35moe"],
        arch="qwen4exp",
        n_layer_nextn=0,
        hc_mult=2,
        hc_low_rank=32,
        indexer_n_head=4,
        indexer_head_size=32,
        indexer_top_k=64,
        ple_vocab_base=1000,
        ple_heads_per_ngram=2,
    ),
    "tiny-bailingmoe3": replace(
        PRESETS["tiny-kimi-linear"], arch="bailingmoe3", n_layer_nextn=1, n_lora_q=64
    ),
}

# The published locality that a preset imitates by default. Presets that are not listed,
# such as the tiny ones, imitate no locality: their routing depends only on random
# weights.
PRESET_LOCALITY = {
    "qwen1.5-moe-a2.7b": "qwen3-30b",
    "qwen3-30b-a3b": "qwen3-30b",
    "mixtral-8x7b": "mixtral",
    "deepseek-v2-lite": "qwen3-30b",
    "glm-4.5-air": "qwen3-30b",
    "qwen3.6-35b-a3b": "qwen3-30b",
}
