"""Plans: which memory has which experts, context and buffers, with the reasons as sentences; and what they are made of.

A slot holds one expert of any layer: one place in each arena (gate, up, down; or gate_up, down). `planner.make_plan`
makes a plan before anything is loaded; workers receive it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from moegguf.controller.request_cost import NO_LIMIT, staging_slots
from moegguf.engine.batch import DEFAULT_UBATCH_TOKENS, layer_slots
from moegguf.engine.cost import Kind, Placement, Speeds
from moegguf.engine.memory import (
    F16,
    MemoryNeeds,
    choose_context,
    choose_kv_tokens,
    default_contexts,
    fit_kv_tokens,
    memory_needs,
    pad_context,
)
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.projector import ProjectorHeader
from moegguf.native.slot_sizes import slot_sizes
from moegguf.quantities import ExpertCache

Choice = Literal["auto", "layers", "slots", "cpu"]
AUTO = ExpertCache("auto")
KINDS_OF: dict[Choice, tuple[Kind, ...]] = {
    "auto": ("resident", "slots", "layers", "cpu"),
    "layers": ("resident", "layers"),
    "slots": ("resident", "slots"),
    "cpu": ("cpu",),
}


def parse_placement(text: str) -> Choice:
    """The choice in `text`. Raises OptionError."""
    for choice in KINDS_OF:
        if text == choice:
            return choice
    raise OptionError(f"placement={text[:60]!r} is none of {', '.join(KINDS_OF)}.")


@dataclass(frozen=True)
class Sizes:
    """Context and passes to plan for; types of the KV cache are ggml's numbers.

    n_ctx: 0 is the model's own; None: the largest that leaves most memory to experts (`memory.choose_context`).
    n_ubatch: stays as given unless there are too few slots for it; None: at most n_batch, chosen together with the
    slots (`batch.best_fit`). kv_tokens: of all n_seq_max sequences that the context holds; None: chosen. projector: of
    a model that reads images, too.
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

    @property
    def one_pass_tokens(self) -> int:
        """Tokens that a pass has to hold, for an image; 1 where an image may be read in several."""
        return max(1, self.projector.one_pass_tokens if self.projector else 1)

    @property
    def most_ubatch(self) -> int:
        """The most tokens of a pass."""
        return max(self.one_pass_tokens, self.n_ubatch or min(DEFAULT_UBATCH_TOKENS, self.n_batch))

    @property
    def _cache(self) -> dict[str, Any]:
        return {"type_k": self.type_k, "type_v": self.type_v, "flash_attn": self.flash_attn}

    def needs(self, layout: ExpertLayout, n_ubatch: int) -> MemoryNeeds:
        """Memory beside slots, for passes of `n_ubatch` tokens, of sizes without choices left (`within`)."""
        n_kv = self.kv_tokens or self.n_ctx or 0
        return memory_needs(layout, n_kv, n_ubatch, **self._cache, projector=self.projector)

    def within(self, layout: ExpertLayout, free_bytes: int, pool_bytes: int = 0) -> Sizes:
        """The same with a context and a KV cache, chosen for so much free memory, of which experts are given
        `pool_bytes` (0: what is left). Raises OptionError for a context that cannot be."""
        free_bytes -= self.projector.total_bytes if self.projector else 0
        n_ctx, n_kv = self.n_ctx, self.kv_tokens
        if n_ctx is None:
            n_ctx = choose_context(layout, free_bytes, self.most_ubatch, pool_bytes=pool_bytes, **self._cache)
        n_ctx = pad_context(n_ctx) or default_contexts(layout)[0]
        n_kv = n_kv or choose_kv_tokens(
            layout, free_bytes, self.most_ubatch, n_ctx, self.n_seq_max, pool_bytes=pool_bytes, **self._cache
        )
        return replace(self, n_ctx=n_ctx, kv_tokens=fit_kv_tokens(n_kv, n_ctx, self.n_seq_max))


@dataclass(frozen=True)
class Budgets:
    """What a user gives, and wants.

    ram, vram: memory for experts; vram of all devices together, or of each. n_gpu_layers, tensor_split: as llama.cpp's
    (-1: every layer; None: by memory). divided: the caller divides layers so, or chooses one of several devices: only
    slots are planned. refuses_cpu: not everything may be left to the CPU. staging: tensors of each device
    that prompts are staged in, beside `vram`; None: chosen, within it. computes_misses: the CPU computes some of what
    slots lack; not exact. streams: whether the store may stream experts through the CPU's slots. margin_bytes: of RAM,
    that stay free with "auto"; None: `memory.margin_bytes`.
    """

    ram: ExpertCache = AUTO
    vram: tuple[ExpertCache, ...] = (AUTO,)
    choice: Choice = "auto"
    sizes: Sizes = Sizes()
    n_gpu_layers: int = -1
    tensor_split: tuple[float, ...] | None = None
    divided: bool = False
    refuses_cpu: bool = False
    staging: int | None = None
    computes_misses: bool = False
    streams: bool = True
    margin_bytes: int | None = None

    def vram_of(self, device: int) -> ExpertCache:
        """The budget of a device, by its index, or of all of them."""
        return self.vram[device if len(self.vram) > 1 else 0]

    def given_vram_bytes(self, layout: ExpertLayout) -> int:
        """About the bytes of `vram`, together; 0 where one is "auto"."""
        of_each = [given_bytes(layout, cache) for cache in self.vram]
        return min(sum(of_each), layout.expert_bytes) if all(of_each) else 0


@dataclass(frozen=True)
class PlacementPlan:
    """Every placement that fits, the fastest first; the one to take; and why, as a sentence.

    device_bytes: of the device's memory for experts. hit_rates: where those come from.
    """

    placements: tuple[Placement, ...]
    chosen: Placement
    reason: str
    speeds: Speeds
    hit_rates: str
    device_bytes: int


@dataclass(frozen=True)
class DevicePlan:
    """What one of several devices gets: layers, by number, and slots for their experts. name: ggml's; None: the CPU,
    whose slots are in RAM. total_bytes: its memory, those slots included.
    """

    name: str | None
    layers: tuple[int, ...]
    n_slots: int
    total_bytes: int


@dataclass(frozen=True)
class Plan:
    """Slots for the pool, tokens of context and of a pass (`n_ubatch`), and where all bytes go.

    `budget_bytes` is what the pool takes: n_slots * slot_bytes. `compute_bytes` includes the work memory of the slots,
    `projector_bytes` that of reading an image. `streams`: a pass may use more experts of a layer than there are slots:
    in the CPU's memory, where it computes layers, else on a device.
    `total_bytes` is the sum; `available_bytes` is what this process may take. `reasons` and `warnings` are sentences
    for the user.
    """

    n_slots: int
    slot_bytes: int
    budget_bytes: int
    resident: bool
    n_ctx: int
    n_ubatch: int
    dense_bytes: int
    kv_bytes: int
    compute_bytes: int
    total_bytes: int
    available_bytes: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    projector_bytes: int = 0
    streams: bool = False
    device: str | None = None  # ggml's name of the one, or names of those, that all of this but `n_lower_slots` is on
    devices: tuple[DevicePlan, ...] = ()  # where several compute: each one's part, in llama.cpp's order, the CPU last
    n_lower_slots: int = 0  # in RAM, below those of the device
    host_bytes: int = 0  # of RAM, with those slots and the CPU's, where there is a device
    layers_on: str | None = None  # the device that computes everything but the experts with slots, which are in RAM
    n_staging: int = 0  # tensors of a layer's full shape on the device, in which prompts are staged
    staging_bytes: int = 0  # that they take, beside slots; part of total_bytes
    placement: PlacementPlan | None = None  # why the experts are placed so; None: nothing was to be decided
    slot_tokens: int = NO_LIMIT  # of a pass on a device, that slots are for: more are staged, or read in several
    exact: bool = True  # the tokens of an all-resident run; False: the CPU computes what the device lacks
    kv_tokens: int = 0  # of all sequences
    whole_layers: tuple[int, ...] = ()  # whose experts all lie on `layers_on`, as plain weights, and have no slots
    n_gpu_layers: int = 0  # as llama.cpp's: that devices compute
    tensor_split: tuple[float, ...] | None = None  # with which llama.cpp divides layers over several devices

    @property
    def on_device(self) -> bool:
        """Whether a device computes layers."""
        return self.device is not None or self.layers_on is not None

    @property
    def vram_cache_bytes(self) -> int:
        """What experts take on devices, staging tensors included: a `vram_cache` that gives the same."""
        return self.budget_bytes + self.staging_slots_bytes if self.device else 0

    def slots_layout(self, layout: ExpertLayout) -> ExpertLayout:
        """`layout` with those experts alone that have slots."""
        return layout.only(layer.il for layer in layout.layers if layer.il not in self.whole_layers)

    @property
    def device_slots(self) -> int:
        """Slots on devices, without those of layers that the CPU computes beside them."""
        return self.n_slots - sum(part.n_slots for part in self.devices if part.name is None)

    @property
    def lower_bytes(self) -> int:
        """What the slots in RAM below a device take."""
        return self.n_lower_slots * self.slot_bytes

    @property
    def staging_slots_bytes(self) -> int:
        """What staging tensors take of a `vram_cache` that is given: whole slots."""
        return staging_slots(self.staging_bytes, self.slot_bytes) * self.slot_bytes

    def pass_slots(self, layout: ExpertLayout, on_device: bool) -> int:
        """Slots of a pool for layers of `layout` that a pass may need at once, on a device or in the CPU's memory."""
        if on_device and self.n_staging:
            return layer_slots(layout, min(self.n_ubatch, self.slot_tokens))
        return layer_slots(layout, self.n_ubatch, self.streams and not on_device)


def slot_bytes(layout: ExpertLayout) -> int:
    """Bytes of one slot over all arenas, as the native store lays them out; 0 for a model without experts."""
    return slot_sizes(layout).slot_bytes


def given_bytes(layout: ExpertLayout, cache: ExpertCache) -> int:
    """About the bytes of a budget that is a share or a size; 0 for "auto"."""
    given = {"auto": 0, "fraction": cache.fraction * layout.expert_bytes, "bytes": cache.n_bytes}[cache.mode]
    return min(round(given), layout.expert_bytes)
