"""The plan of a load: which memory has which experts, context and buffers, with the reasons as sentences.

A slot holds one expert of any layer: one place in each arena (gate, up, down; or gate_up, down). `solver.make_plan`
makes a plan before anything is loaded; workers receive it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moegguf.engine.cost import Placement, Speeds
from moegguf.engine.memory import MemoryNeeds
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import padded, slot_sizes

NO_LIMIT = 1 << 30  # more tokens than any pass has
NO_NEEDS = MemoryNeeds()


@dataclass(frozen=True)
class PlacementPlan:
    """The comparison of the placements that fit."""

    placements: tuple[Placement, ...]  # the fastest first
    chosen: Placement
    reason: str  # reason for the choice, as a sentence
    speeds: Speeds
    hit_rates: str  # source of the hit rates
    device_bytes: int  # bytes of the device's memory for experts


@dataclass(frozen=True)
class MemoryPlan:
    """The part of a plan for one memory (RAM or a device's): the layers that are computed there, slots and bytes."""

    name: str | None  # ggml's name for the device; None: RAM, from which the CPU computes
    layers: tuple[int, ...]  # layers that are computed there
    n_slots: int  # slots for experts of these layers
    total_bytes: int  # bytes that the model takes in this memory, with all slots
    available_bytes: int = 0  # bytes that this process may take in this memory
    n_below: int = 0  # slots in RAM from which slots of devices are filled


@dataclass(frozen=True)
class Plan:
    """The plan of a load: what each memory holds, the context, and the tokens of a pass."""

    memories: tuple[MemoryPlan, ...]  # devices in llama.cpp's order, RAM last
    slot_bytes: int
    n_experts: int  # number of experts in all layers together
    n_ctx: int
    n_ubatch: int  # tokens of a pass
    needs: MemoryNeeds = NO_NEEDS  # memory in addition to the slots; compute_bytes includes the slots' scratch memory
    n_seq_max: int = 1
    # snapshots of each sequence's recurrent state, and so the number of tokens that a sequence can take back
    n_rs_seq: int = 0
    n_batch: int = 512
    kv_tokens: int = 0  # tokens of all sequences together
    streams: bool = False  # True: a pass may use more experts of a layer than there are slots
    # most tokens of a pass that a device computes from slots; longer prompts are staged or split
    slot_tokens: int = NO_LIMIT
    n_staging: int = 0  # staging tensors on each device; each has the full shape of a layer's matrices
    staging_bytes: int = 0  # bytes of the staging tensors on all devices
    whole_layers: tuple[int, ...] = ()  # layers whose experts all lie on a device as plain weights, without slots
    n_gpu_layers: int = 0  # llama.cpp's n_gpu_layers: how many layers devices compute
    # llama.cpp's tensor_split, the share of layers for each device; None: layers are not divided
    tensor_split: tuple[float, ...] | None = None
    # True: the largest pass is evaluated at the load, so that backends allocate all their memory then
    warms_up: bool = False
    placement: PlacementPlan | None = None  # the chosen placement and its reason; None: there was no choice
    reasons: tuple[str, ...] = ()  # sentences for the user
    warnings: tuple[str, ...] = ()

    @property
    def ram(self) -> MemoryPlan:
        """The part of the plan in RAM."""
        return self.memories[-1]

    @property
    def on_devices(self) -> tuple[MemoryPlan, ...]:
        """The parts of the plan on devices."""
        return self.memories[:-1]

    @property
    def on_device(self) -> bool:
        """True if a device computes layers."""
        return len(self.memories) > 1

    @property
    def device(self) -> str | None:
        """ggml's names for the devices that have slots, with commas between them; None: no device has slots."""
        has_slots = any(part.n_slots for part in self.on_devices)
        return ", ".join(str(part.name) for part in self.on_devices) if has_slots else None

    @property
    def layers_on(self) -> str | None:
        """The device that computes everything except experts, if all slots are in RAM; else None."""
        return self.on_devices[0].name if self.on_device and self.device is None else None

    @property
    def devices(self) -> tuple[MemoryPlan, ...]:
        """The parts whose memories compute layers, if layers are divided among several memories; otherwise empty."""
        if self.tensor_split is None:
            return ()
        return (*self.on_devices, *([self.ram] if self.ram.n_slots else []))

    @property
    def n_slots(self) -> int:
        """Number of slots from which layers compute."""
        return sum(part.n_slots for part in self.memories)

    @property
    def device_slots(self) -> int:
        """Number of slots on devices. If no device has slots, the number of slots in RAM from which layers compute."""
        return sum(part.n_slots for part in self.on_devices) if self.device else self.n_slots

    @property
    def n_ram_slots(self) -> int:
        """Number of slots in RAM from which slots of devices are filled."""
        return self.ram.n_below

    @property
    def resident(self) -> bool:
        """True if every expert has a slot of its own."""
        return self.n_slots == self.n_experts

    @property
    def budget_bytes(self) -> int:
        """Bytes of the slots from which layers compute."""
        return self.n_slots * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the model takes in RAM if a device computes layers; 0 if no device computes."""
        return self.ram.total_bytes if self.on_device else 0

    @property
    def total_bytes(self) -> int:
        """Bytes that the model takes on devices; without a device, in RAM."""
        return sum(part.total_bytes for part in self.on_devices or self.memories)

    @property
    def available_bytes(self) -> int:
        """Bytes that this process may take on these devices; without a device, in RAM."""
        return sum(part.available_bytes for part in self.on_devices or self.memories)

    @property
    def vram_cache_bytes(self) -> int:
        """Bytes of slots and staging tensors on devices: the vram_cache with which a load gets the same slots."""
        return self.budget_bytes + self.staging_slots_bytes if self.device else 0

    @property
    def staging_slots_bytes(self) -> int:
        """Bytes that staging tensors take of a given budget, rounded up to whole slots."""
        return slots_for(self.staging_bytes, self.slot_bytes) * self.slot_bytes

    def slots_layout(self, layout: ExpertLayout) -> ExpertLayout:
        """Returns the layout of the experts that have slots."""
        return layout.only(layer.il for layer in layout.layers if layer.il not in self.whole_layers)

    def pass_slots(self, layout: ExpertLayout, on_device: bool) -> int:
        """Returns how many slots a pass may need at once in a pool for the layers of `layout`, on a device or
        in RAM."""
        if on_device and self.n_staging:
            return layer_slots(layout, min(self.n_ubatch, self.slot_tokens))
        return layer_slots(layout, self.n_ubatch, self.streams and not on_device)

    def facts(self) -> dict[str, Any]:
        """Returns the plan's figures by name, for JSON."""
        of_slots = {name: getattr(self, name) for name in FIGURES}
        found = asdict(self)
        needs = found.pop("needs")
        del found["memories"], needs["slot_work_bytes"]
        return found | of_slots | needs | {"devices": [asdict(part) for part in self.devices]}


FIGURES = (
    "n_slots", "budget_bytes", "resident", "total_bytes", "available_bytes", "device", "layers_on", "n_ram_slots",
    "host_bytes", "vram_cache_bytes",
)  # fmt: skip
"""Names of the plan's properties that `Plan.facts` includes."""


def layer_slots(layout: ExpertLayout, n_ubatch: int, streams: bool = False) -> int:
    """Returns how many slots a pass may need at once: one for each expert of a layer that the router may choose.

    streams: experts without a slot are streamed, so that only the experts of one token need slots.
    """
    return min(layout.n_expert, layout.n_expert_used * (1 if streams else n_ubatch))


def slot_bytes(layout: ExpertLayout, devices: Sequence[str] = ()) -> int:
    """Returns the bytes of one slot in all arenas together, as the native store lays them out, with the padding for
    these devices. Returns 0 for a model without experts."""
    return slot_sizes(padded(layout, devices) if devices else layout).slot_bytes


def allowed_ubatch(layout: ExpertLayout, n_slots: int, streams: bool = False, slot_tokens: int = NO_LIMIT) -> int:
    """Returns the largest number of tokens in a pass for which `n_slots` slots are enough; NO_LIMIT without a limit.

    streams: experts without a slot of their own are streamed or staged.

    slot_tokens: most tokens of a pass if some expert has no slot. The device would compute larger passes in another way
    than with every expert in memory, so that the bits would differ (`slot_sizes.slot_tokens`).
    """
    if streams or n_slots >= layout.n_expert_total:
        return NO_LIMIT
    n_tokens = NO_LIMIT if n_slots >= layout.n_expert else max(1, n_slots // layout.n_expert_used)
    return min(n_tokens, slot_tokens)


def staging_bytes(layout: ExpertLayout, n_tensors: int) -> int:
    """Returns the bytes of `n_tensors` staging tensors, each with the full shape of a layer's matrices."""
    return slot_sizes(layout, n_tensors * layout.n_expert).pool_bytes if n_tensors else 0


def slots_for(n_bytes: int, slot_bytes: int) -> int:
    """Returns the number of slots that together have at least `n_bytes` bytes. In a given budget, staging tensors take
    the place of this many slots."""
    return -(-n_bytes // slot_bytes) if n_bytes else 0
