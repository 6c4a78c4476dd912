"""What a user gives: memory for experts, where they go, and sizes of the context and of passes, some still to choose.

Does not know devices, nor where experts end up (`planner`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moegguf.engine.cost import Kind
from moegguf.engine.memory import F16, MemoryNeeds, memory_needs
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


@dataclass(frozen=True)
class Sizes:
    """Context and passes to plan for; types of the KV cache are ggml's numbers.

    n_ctx: 0 is the model's own; None: the largest that leaves most memory to experts (`planner.choose_context`).
    n_ubatch: stays as given unless there are too few slots for it; None: at most n_batch, chosen together with the
    slots (`pool_plan.best_fit`). kv_tokens: of all n_seq_max sequences that the context holds; None: chosen.
    projector: of a model that reads images, too. adapter_bytes: of a LoRA adapter. reasons: of what was chosen.
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
    needs_gpu: a budget or a placement on a GPU was asked for.
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
    needs_gpu: bool = False
    n_gpu_layers: int = -1
    tensor_split: tuple[float, ...] | None = None
    divided: bool = False
    refuses_cpu: bool = False
    staging: int | None = None
    streams: bool = True
    margin_bytes: int | None = None

    def vram_of(self, device: int) -> ExpertCache:
        """The budget of a device, by its index, or of all of them."""
        return self.vram[device if len(self.vram) > 1 else 0]
