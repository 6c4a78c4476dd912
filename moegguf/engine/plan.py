"""What a user gives, and the plan for it: which memory has which experts, context and buffers, with the reasons as
sentences.

A slot holds one expert of any layer: one place in each arena (gate, up, down; or gate_up, down). `planner.make_plan`
makes a plan before anything is loaded; workers receive it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moegguf.engine.cost import Kind, Placement, Speeds
from moegguf.engine.machine import Memory
from moegguf.engine.memory import Sizes, margin_bytes
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import padded, slot_sizes
from moegguf.quantities import ExpertCache

NO_LIMIT = 1 << 30  # tokens of a pass
AUTO, SIZES = ExpertCache("auto"), Sizes()  # of `Budgets` that say nothing else
KINDS_OF: dict[str, tuple[Kind, ...]] = {
    "auto": ("resident", "slots", "layers", "cpu"),
    "layers": ("resident", "layers"),
    "slots": ("resident", "slots"),
    "cpu": ("cpu",),
}


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
    sizes: Sizes = SIZES
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
    device: str | None = None  # ggml's name of the one, or names of those, that all of this but `n_ram_slots` is on
    devices: tuple[DevicePlan, ...] = ()  # where several compute: each one's part, in llama.cpp's order, the CPU last
    n_ram_slots: int = 0  # in RAM, below those of the device
    host_bytes: int = 0  # of RAM, with those slots and the CPU's, where there is a device
    layers_on: str | None = None  # the device that computes everything but the experts with slots, which are in RAM
    n_staging: int = 0  # tensors of a layer's full shape on the device, in which prompts are staged
    staging_bytes: int = 0  # that they take, beside slots; part of total_bytes
    placement: PlacementPlan | None = None  # why the experts are placed so; None: nothing was to be decided
    slot_tokens: int = NO_LIMIT  # of a pass on a device, that slots are for: more are staged, or read in several
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
    def staging_slots_bytes(self) -> int:
        """What staging tensors take of a `vram_cache` that is given: whole slots."""
        return slots_for(self.staging_bytes, self.slot_bytes) * self.slot_bytes

    def pass_slots(self, layout: ExpertLayout, on_device: bool) -> int:
        """Slots of a pool for layers of `layout` that a pass may need at once, on a device or in the CPU's memory."""
        if on_device and self.n_staging:
            return layer_slots(layout, min(self.n_ubatch, self.slot_tokens))
        return layer_slots(layout, self.n_ubatch, self.streams and not on_device)


def layer_slots(layout: ExpertLayout, n_ubatch: int, streams: bool = False) -> int:
    """Slots that a pass may need at once: its experts of one layer, whatever the router chooses, or, where those that
    have no slot of their own are streamed, one token's."""
    return min(layout.n_expert, layout.n_expert_used * (1 if streams else n_ubatch))


def slot_bytes(layout: ExpertLayout, devices: Sequence[str] = ()) -> int:
    """Bytes of one slot over all arenas, as the native store lays them out, also for these devices; 0 for a model
    without experts."""
    return slot_sizes(padded(layout, devices) if devices else layout).slot_bytes


def allowed_ubatch(layout: ExpertLayout, n_slots: int, streams: bool = False, slot_tokens: int = NO_LIMIT) -> int:
    """The most tokens of a pass that `n_slots` suffice for; NO_LIMIT without a limit.

    streams: experts without a slot of their own are streamed or staged. slot_tokens: of a pass whose experts are in
    slots that layers share, as the device computes more of them otherwise than with every expert there
    (`slot_sizes.slot_tokens`).
    """
    if streams or n_slots >= layout.n_expert_total:
        return NO_LIMIT
    n_tokens = NO_LIMIT if n_slots >= layout.n_expert else max(1, n_slots // layout.n_expert_used)
    return min(n_tokens, slot_tokens)


def staging_bytes(layout: ExpertLayout, n_tensors: int) -> int:
    """Bytes of so many tensors of a layer's full shape."""
    return slot_sizes(layout, n_tensors * layout.n_expert).pool_bytes if n_tensors else 0


def slots_for(n_bytes: int, slot_bytes: int) -> int:
    """Slots that hold so many bytes: what staging tensors take of a budget that is given."""
    return -(-n_bytes // slot_bytes) if n_bytes else 0
