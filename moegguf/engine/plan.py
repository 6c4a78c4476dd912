"""The plan for a load: the layers and slots of each memory, the sizes of context and
passes, and reasons as sentences.

A slot holds one expert of any layer: one place in the arena of each kind of matrix
(such as gate, up and down). On a device, layers with larger experts than other layers
may have a pool of larger slots (`size_classes`). `solver.make_plan` creates a plan
before anything is loaded; workers receive it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moegguf.engine.cost import Placement, Speeds
from moegguf.engine.memory import ContextPlan, MemoryNeeds
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import padded, slot_sizes

NO_LIMIT = 1 << 30  # more tokens than any pass contains
NO_NEEDS = MemoryNeeds()
# Size classes must leave memory for at least this share of additional slots.
LEAST_SAVING = 0.02


@dataclass(frozen=True)
class PlacementPlan:
    """A comparison of placements: the predicted speeds of each placement that fits, and
    the choice."""

    placements: tuple[Placement, ...]  # the fastest first
    chosen: Placement
    reason: str  # reason for the choice, as a sentence
    speeds: Speeds
    hit_rates: str  # text that names the source of the hit rates
    device_bytes: int  # bytes that the device has for experts, within its budget


@dataclass(frozen=True)
class MemoryPlan:
    """The part of a plan for one memory (RAM or a device's): the layers that run there,
    slots and bytes."""

    name: str | None  # ggml's name for the device; None: RAM, used by the CPU
    layers: tuple[int, ...]  # layers that run there, at least in part
    n_slots: int  # slots for experts of these layers
    # Bytes that the model occupies in this memory, including all slots.
    total_bytes: int
    available_bytes: int = 0  # bytes that this process may use in this memory
    # RAM only: number of slots from which the devices' slots are filled.
    n_below: int = 0


@dataclass(frozen=True)
class SupplyPlan:
    """The part of a plan for the supply of experts: how a layer's experts reach its
    multiplications."""

    # True: a pass may use more experts of a layer than there are slots.
    streams: bool = False
    # maximum number of tokens in a pass that a device runs from slots if some expert
    # has no slot; longer prompts are staged or split
    slot_tokens: int = NO_LIMIT
    # Staging tensors on each device with slots; each has the full shape of a layer's
    # matrices.
    n_staging: int = 0
    staging_bytes: int = 0  # bytes of the staging tensors on all devices
    # True: the device looks up slots itself, and reads experts in RAM directly
    # (native/mapped.h).
    maps: bool = False


@dataclass(frozen=True)
class Plan:
    """The plan for a load: what each memory holds, the context, and the tokens of a
    pass."""

    memories: tuple[MemoryPlan, ...]  # devices in llama.cpp's order, RAM last
    # Bytes of a slot for the largest expert, in RAM and on devices without size
    # classes.
    slot_bytes: int
    device_slot_bytes: int  # mean bytes of a slot on devices
    n_experts: int  # number of experts in all layers except whole_layers
    context: ContextPlan
    n_ubatch: int  # maximum number of tokens in a pass
    # memory in addition to the slots, in RAM or on devices; without a device,
    # compute_bytes includes the slots' scratch memory
    needs: MemoryNeeds = NO_NEEDS
    supply: SupplyPlan = SupplyPlan()
    # Layers of each pool on the device, if layers with large experts have a pool of
    # their own; (): one pool.
    size_classes: tuple[tuple[int, ...], ...] = ()
    # Layers whose experts are all on a device as plain weights, without slots.
    whole_layers: tuple[int, ...] = ()
    # llama.cpp's tensor_split, the proportions of layers for each device; None: layers
    # are not divided
    tensor_split: tuple[float, ...] | None = None
    # True: the largest pass is evaluated during the load, so that backends allocate all
    # their memory then
    warms_up: bool = False
    # The comparison and the choice; None: placements were not compared.
    placement: PlacementPlan | None = None
    reasons: tuple[str, ...] = ()  # sentences for the user
    warnings: tuple[str, ...] = ()

    @property
    def ram(self) -> MemoryPlan:
        """The part of the plan for RAM."""
        return self.memories[-1]

    @property
    def on_devices(self) -> tuple[MemoryPlan, ...]:
        """The parts of the plan for devices; empty if no layer runs on a device."""
        return self.memories[:-1]

    @property
    def on_device(self) -> bool:
        """True if layers run on a device."""
        return len(self.memories) > 1

    @property
    def device(self) -> str | None:
        """ggml's names for the devices with slots, separated by commas; None if no
        device has slots."""
        return (
            ", ".join(str(part.name) for part in self.on_devices if part.n_slots)
            or None
        )

    @property
    def layers_on(self) -> str | None:
        """ggml's name for the device, if layers run on a device and all slots are in
        RAM; otherwise None."""
        if self.on_device and self.device is None:
            return self.on_devices[0].name
        return None

    @property
    def devices(self) -> tuple[MemoryPlan, ...]:
        """The parts for all devices, and RAM's part if layers with experts run on the
        CPU. Empty if layers are not divided among several memories."""
        if self.tensor_split is None:
            return ()
        return (*self.on_devices, *([self.ram] if self.ram.n_slots else []))

    @property
    def n_slots(self) -> int:
        """Number of slots that layers read experts from, on devices and in RAM. Slots
        in RAM that only fill slots of devices are not counted."""
        return sum(part.n_slots for part in self.memories)

    @property
    def device_slots(self) -> int:
        """Number of slots on devices. If no device has slots, the number of slots in
        RAM that layers read experts from."""
        if self.device:
            return sum(part.n_slots for part in self.on_devices)
        return self.n_slots

    @property
    def n_ram_slots(self) -> int:
        """Number of slots in RAM from which the devices' slots are filled."""
        return self.ram.n_below

    @property
    def resident(self) -> bool:
        """True if every expert outside `whole_layers` has a slot of its own. True for a
        model without experts."""
        return self.n_slots == self.n_experts

    @property
    def budget_bytes(self) -> int:
        """Total size in bytes of the slots that `n_slots` counts."""
        on_devices = sum(part.n_slots for part in self.on_devices)
        return on_devices * self.device_slot_bytes + self.ram.n_slots * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the model occupies in RAM if layers run on a device; otherwise
        0."""
        return self.ram.total_bytes if self.on_device else 0

    @property
    def total_bytes(self) -> int:
        """Bytes that the model occupies on devices; without a device, in RAM."""
        return sum(part.total_bytes for part in self.on_devices or self.memories)

    @property
    def available_bytes(self) -> int:
        """Bytes that this process may use on the plan's devices; without a device, in
        RAM."""
        return sum(part.available_bytes for part in self.on_devices or self.memories)

    @property
    def expert_cache_bytes(self) -> int:
        """Bytes of slots in RAM, as a value for the budget of RAM: slots for experts
        that run on the CPU, and slots that fill the devices' slots."""
        return (self.ram.n_slots + self.ram.n_below) * self.slot_bytes

    @property
    def vram_cache_bytes(self) -> int:
        """Bytes of slots and staging tensors on devices, as a value for the budget of
        VRAM; 0 if no device has slots."""
        if not self.device:
            return 0
        return self.device_slots * self.device_slot_bytes + self.staging_slots_bytes

    @property
    def cache_bytes(self) -> dict[str, int]:
        """{tier: bytes of its budget}. The budget of RAM includes all slots in RAM. The
        budget of VRAM includes the slots on devices and the staging tensors."""
        return {"RAM": self.expert_cache_bytes, "VRAM": self.vram_cache_bytes}

    @property
    def staging_slots_bytes(self) -> int:
        """Bytes of a given budget that staging tensors occupy, rounded up to whole
        slots."""
        return (
            slots_for(self.supply.staging_bytes, self.device_slot_bytes)
            * self.device_slot_bytes
        )

    def pass_slots(self, layout: ExpertLayout, on_device: bool) -> int:
        """Returns how many slots a pass may need at once in a pool for the layers of
        `layout`, on a device or in RAM."""
        supply = self.supply
        if on_device and supply.n_staging:
            return layer_slots(layout, min(self.n_ubatch, supply.slot_tokens))
        return layer_slots(layout, self.n_ubatch, supply.streams and not on_device)

    def facts(self) -> dict[str, Any]:
        """Returns the plan's figures for JSON: the properties in FIGURES, `devices`,
        and all fields except `memories`. The fields of `needs`, `context` and `supply`
        are listed like fields of the plan."""
        found = asdict(self)
        for name in ("needs", "context", "supply"):
            found |= found.pop(name)
        found |= {name: getattr(self, name) for name in FIGURES}
        found["devices"] = [asdict(part) for part in self.devices]
        del found["memories"]
        return found


FIGURES = (
    "n_slots", "budget_bytes", "resident", "total_bytes", "available_bytes", "device", "layers_on", "n_ram_slots",
    "host_bytes", "expert_cache_bytes", "vram_cache_bytes",
)  # fmt: skip
"""Names of the plan's properties that `Plan.facts` includes."""


def layer_slots(layout: ExpertLayout, n_ubatch: int, streams: bool = False) -> int:
    """Returns how many slots a pass of `n_ubatch` tokens may need at once: the number
    of different experts that it can use in one layer.

    streams: True if experts without a slot are streamed, so only the experts of one
    token need slots.
    """
    return min(layout.n_expert, layout.n_expert_used * (1 if streams else n_ubatch))


def slot_bytes(
    layout: ExpertLayout, devices: Sequence[str] = (), on_device: bool = False
) -> int:
    """Returns the size in bytes of one slot in all arenas together, as the native store
    lays them out, including the padding for these devices. Returns 0 for a model
    without experts.

    on_device: True if the slot is on a device other than the CPU, or fills slots on
    such a device.
    """
    return slot_sizes(
        padded(layout, devices) if devices else layout, 0, on_device or bool(devices)
    ).slot_bytes


def size_classes(layout: ExpertLayout) -> tuple[tuple[int, ...], ...]:
    """Returns the layers of two pools, if this saves memory: one pool for layers with
    small experts, the other for layers with large experts. Returns () if all slots
    should have the same size.

    In a Q4_K_M file, the down matrices of about half of the layers have a larger type.
    One pool would give every expert a slot for the larger type.
    """
    sizes = {
        layer.il: slot_bytes(layout.only([layer.il]), on_device=True)
        for layer in layout.layers
    }
    pairs = [
        tuple(
            tuple(il for il in sizes if (sizes[il] > most) == is_large)
            for is_large in (False, True)
        )
        for most in sorted(set(sizes.values()))[:-1]
    ]
    best = min(pairs, key=lambda pair: mean_slot_bytes(layout, pair), default=())
    saves = best and mean_slot_bytes(layout, best) * (1 + LEAST_SAVING) <= slot_bytes(
        layout, on_device=True
    )
    return best if saves else ()


def mean_slot_bytes(layout: ExpertLayout, classes: Sequence[Sequence[int]]) -> int:
    """Returns the mean size in bytes of a slot, if each class of layers has slots for
    the same share of its experts."""
    n_bytes = 0
    for layers in classes:
        of_class = layout.only(layers)
        n_bytes += of_class.n_expert_total * slot_bytes(of_class, on_device=True)
    return -(-n_bytes // max(1, layout.n_expert_total))


def divide_slots(
    layout: ExpertLayout, groups: Sequence[Sequence[int]], n_slots: int
) -> list[int]:
    """Divides `n_slots` slots among groups of layers, in proportion to the experts of
    these layers."""
    before = [0, *itertools.accumulate(map(layout.experts_in, groups))]
    ends = [n_slots * n // max(1, before[-1]) for n in before]
    return [last - first for first, last in itertools.pairwise(ends)]


def allowed_ubatch(
    layout: ExpertLayout,
    n_slots: int,
    streams: bool = False,
    slot_tokens: int = NO_LIMIT,
) -> int:
    """Returns the largest number of tokens that a pass may have with `n_slots` slots,
    at least 1; NO_LIMIT if there is no limit.

    streams: True if experts without a slot of their own are streamed or staged, so
    there is no limit.

    slot_tokens: maximum number of tokens in a pass if some expert has no slot. For
    larger passes, the device would not use the same operations as with every expert in
    memory, so the bits would differ (`slot_sizes.slot_tokens`).
    """
    if streams or n_slots >= layout.n_expert_total:
        return NO_LIMIT
    n_tokens = (
        NO_LIMIT
        if n_slots >= layout.n_expert
        else max(1, n_slots // layout.n_expert_used)
    )
    return min(n_tokens, slot_tokens)


def staging_bytes(layout: ExpertLayout, n_tensors: int, can_pack: bool = True) -> int:
    """Returns the size in bytes of `n_tensors` staging tensors, each with the full
    shape of a layer's matrices.

    can_pack: False if each kind of matrix has an arena of its own even with the remedy
    one_arena.
    """
    if not n_tensors:
        return 0
    return slot_sizes(
        layout, n_tensors * layout.n_expert, on_device=can_pack
    ).pool_bytes


def slots_for(n_bytes: int, slot_bytes: int) -> int:
    """Returns the smallest number of slots that together occupy at least `n_bytes`
    bytes. In a given budget, staging tensors take the place of this many slots."""
    return -(-n_bytes // slot_bytes) if n_bytes else 0
