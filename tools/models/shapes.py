"""Dimensions of a model before quantisation, with llama.cpp's names, and named presets."""

from __future__ import annotations

from dataclasses import dataclass

ARCHS = ("qwen2moe", "qwen3moe", "qwen3vlmoe", "llama", "deepseek2", "gpt-oss", "glm4moe")
ROPE_FREQ_BASE = 1_000_000.0


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Mixture-of-Experts model. Zero means that the architecture does not have the part."""

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
    n_layer_nextn: int = 0

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"arch has to be one of {', '.join(ARCHS)}, but is {self.arch!r}")
        if not 0 < self.n_expert_used <= self.n_expert:
            raise ValueError(f"n_expert_used has to be in 1..{self.n_expert}, but is {self.n_expert_used}")
        if self.n_head % self.n_head_kv:
            raise ValueError(f"n_head has to be a multiple of n_head_kv={self.n_head_kv}, but is {self.n_head}")
        if self.arch == "qwen2moe" and self.n_head * self.n_embd_head != self.n_embd:
            raise ValueError(f"qwen2moe needs n_head * n_embd_head = n_embd = {self.n_embd}")
        if self.arch == "qwen2moe" and not self.n_ff_shexp:
            raise ValueError("qwen2moe needs a shared expert: n_ff_shexp has to be positive")
        if self.arch == "deepseek2" and not (self.kv_lora_rank and 0 < self.n_rot < self.n_embd_head):
            raise ValueError("deepseek2 needs kv_lora_rank, and n_rot below n_embd_head")
        if self.n_layer_nextn and self.arch != "glm4moe":
            raise ValueError("n_layer_nextn, heads for more tokens than the next one, is of glm4moe alone")
        if self.arch == "gpt-oss" and not self.n_swa:
            raise ValueError("gpt-oss needs n_swa, the tokens that every second layer sees")

    @property
    def n_ff_shared(self) -> int:
        """Width of the shared expert: deepseek2 and glm4moe count shared experts, qwen2moe gives the width."""
        return self.n_ff_exp * self.n_expert_shared or self.n_ff_shexp

    @property
    def n_layer_all(self) -> int:
        """Layers in the file, with those that predict more than the next token."""
        return self.n_layer + self.n_layer_nextn

    @property
    def n_embd_out(self) -> int:
        """Width of the input of attention's output matrix."""
        return self.n_head * (self.n_embd_head_v or self.n_embd_head)


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
    "tiny-qwen2moe": Shape(
        "qwen2moe",
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_head_kv=4,
        n_embd_head=32,
        n_expert=16,
        n_expert_used=4,
        n_ff_exp=64,
        n_ff_shexp=128,
        n_ff=128,
        n_vocab=1024,
        n_ctx_train=2048,
    ),
    "tiny-qwen3moe": Shape(
        "qwen3moe",
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_head_kv=2,
        n_embd_head=64,
        n_expert=32,
        n_expert_used=4,
        n_ff_exp=64,
        n_vocab=1024,
        n_ctx_train=2048,
    ),
    "tiny-qwen3vlmoe": Shape(
        "qwen3vlmoe",
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_head_kv=2,
        n_embd_head=32,
        n_expert=16,
        n_expert_used=4,
        n_ff_exp=64,
        n_vocab=1024,
        n_ctx_train=2048,
    ),
    "tiny-mixtral": Shape(
        "llama",
        n_layer=3,
        n_embd=256,
        n_head=4,
        n_head_kv=2,
        n_embd_head=64,
        n_expert=8,
        n_expert_used=2,
        n_ff_exp=256,
        n_vocab=1024,
        n_ctx_train=2048,
    ),
    "tiny-deepseek2": Shape(
        "deepseek2",
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_head_kv=4,
        n_embd_head=96,
        n_expert=16,
        n_expert_used=3,
        n_ff_exp=64,
        n_ff=256,
        n_vocab=1024,
        n_layer_dense_lead=1,
        n_expert_shared=2,
        kv_lora_rank=64,
        n_rot=32,
        n_embd_head_v=64,
        n_ctx_train=2048,
    ),
    "tiny-gpt-oss": Shape(
        "gpt-oss",
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_head_kv=2,
        n_embd_head=32,
        n_expert=16,
        n_expert_used=4,
        n_ff_exp=64,
        n_vocab=1024,
        n_ctx_train=2048,
        n_swa=128,
    ),
    "tiny-glm4moe": Shape(
        "glm4moe",
        n_layer=4,
        n_embd=128,
        n_head=4,
        n_head_kv=2,
        n_embd_head=64,
        n_expert=16,
        n_expert_used=3,
        n_ff_exp=64,
        n_ff=256,
        n_vocab=1024,
        n_layer_dense_lead=1,
        n_expert_shared=1,
        n_rot=32,
        n_ctx_train=2048,
        n_layer_nextn=1,
    ),
    "tiny-mix": Shape(
        "qwen2moe",
        n_layer=4,
        n_embd=256,
        n_head=4,
        n_head_kv=4,
        n_embd_head=64,
        n_expert=16,
        n_expert_used=4,
        n_ff_exp=256,
        n_ff_shexp=256,
        n_ff=256,
        n_vocab=1024,
        n_ctx_train=2048,
    ),
}

# Whose published routing a preset has unless another is named: the tiny ones route as random weights happen to.
PRESET_LOCALITY = {
    "qwen1.5-moe-a2.7b": "qwen3-30b",
    "qwen3-30b-a3b": "qwen3-30b",
    "mixtral-8x7b": "mixtral",
    "deepseek-v2-lite": "qwen3-30b",
    "glm-4.5-air": "qwen3-30b",
}
