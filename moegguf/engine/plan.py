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

NO_LIMIT = 1 << 30  # tokens of a pass
NO_NEEDS = MemoryNeeds()


@dataclass(frozen=True)
class PlacementPlan:
    """The placements that fit, compared."""

    placements: tuple[Placement, ...]  # the fastest first
    chosen: Placement
    reason: str  # a sentence
    speeds: Speeds
    hit_rates: str  # source of the hit rates
    device_bytes: int  # the part of the device's memory for experts


@dataclass(frozen=True)
class MemoryPlan:
    """A memory's part of a plan: the layers that are computed there, slots and bytes."""

    name: str | None  # ggml's name of a device; None: RAM, with the CPU
    layers: tuple[int, ...]  # layers that are computed there
    n_slots: int  # slots for experts of these layers
    total_bytes: int  # bytes that the model takes there, all slots included
    available_bytes: int = 0  # bytes that this process may take there
    n_below: int = 0  # slots in RAM from which slots of devices are filled


@dataclass(frozen=True)
class Plan:
    """The plan of a load: the part of each memory, the context, and the tokens of a pass."""

    memories: tuple[MemoryPlan, ...]  # devices in llama.cpp's order, RAM last
    slot_bytes: int
    n_experts: int  # experts of all layers together
    n_ctx: int
    n_ubatch: int  # tokens of a pass
    needs: MemoryNeeds = NO_NEEDS  # memory that is needed beside the slots; compute_bytes includes their scratch memory
    n_seq_max: int = 1
    n_rs_seq: int = 0  # snapshots of each sequence's recurrent state: tokens that it can lose again
    n_batch: int = 512
    kv_tokens: int = 0  # tokens of all sequences
    streams: bool = False  # a pass may use more experts of a layer than there are slots
    slot_tokens: int = NO_LIMIT  # most tokens of a pass with a device's slots: more are staged, or split into passes
    n_staging: int = 0  # tensors of a layer's full shape on each device, in which prompts are staged
    staging_bytes: int = 0  # bytes of staging tensors on all devices, without slots
    whole_layers: tuple[int, ...] = ()  # layers whose experts all lie on a device as plain weights, without slots
    n_gpu_layers: int = 0  # llama.cpp's number of layers that devices compute
    tensor_split: tuple[float, ...] | None = None  # llama.cpp's shares of layers, where several memories compute
    warms_up: bool = False  # a load evaluates the largest pass, so that backends reach their final size
    placement: PlacementPlan | None = None  # the chosen placement and its reason; None: there was no choice
    reasons: tuple[str, ...] = ()  # sentences for the user
    warnings: tuple[str, ...] = ()

    @property
    def ram(self) -> MemoryPlan:
        """The part in RAM."""
        return self.memories[-1]

    @property
    def on_devices(self) -> tuple[MemoryPlan, ...]:
        """The parts on devices."""
        return self.memories[:-1]

    @property
    def on_device(self) -> bool:
        """True if a device computes layers."""
        return len(self.memories) > 1

    @property
    def device(self) -> str | None:
        """ggml's names of the devices that have slots; None: the CPU computes the experts that have slots."""
        has_slots = any(part.n_slots for part in self.on_devices)
        return ", ".join(str(part.name) for part in self.on_devices) if has_slots else None

    @property
    def layers_on(self) -> str | None:
        """The device that computes everything but the experts with slots, which are in RAM."""
        return self.on_devices[0].name if self.on_device and self.device is None else None

    @property
    def devices(self) -> tuple[MemoryPlan, ...]:
        """The parts that compute, where layers are divided; else there are none."""
        if self.tensor_split is None:
            return ()
        return (*self.on_devices, *([self.ram] if self.ram.n_slots else []))

    @property
    def n_slots(self) -> int:
        """Slots that layers compute from."""
        return sum(part.n_slots for part in self.memories)

    @property
    def device_slots(self) -> int:
        """Slots on devices; where no device has slots, those in RAM that layers compute from."""
        return sum(part.n_slots for part in self.on_devices) if self.device else self.n_slots

    @property
    def n_ram_slots(self) -> int:
        """Slots in RAM from which slots of devices are filled."""
        return self.ram.n_below

    @property
    def resident(self) -> bool:
        """Returns whether every expert has a slot of its own."""
        return self.n_slots == self.n_experts

    @property
    def budget_bytes(self) -> int:
        """Bytes of the slots that layers compute from."""
        return self.n_slots * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM beside devices."""
        return self.ram.total_bytes if self.on_device else 0

    @property
    def total_bytes(self) -> int:
        """Bytes that devices hold; without one, bytes of RAM."""
        return sum(part.total_bytes for part in self.on_devices or self.memories)

    @property
    def available_bytes(self) -> int:
        """Bytes that this process may take there."""
        return sum(part.available_bytes for part in self.on_devices or self.memories)

    @property
    def vram_cache_bytes(self) -> int:
        """Bytes of experts on devices, staging tensors included: a budget that gives the same."""
        return self.budget_bytes + self.staging_slots_bytes if self.device else 0

    @property
    def staging_slots_bytes(self) -> int:
        """Bytes that staging tensors take of a budget that is given: whole slots."""
        return slots_for(self.staging_bytes, self.slot_bytes) * self.slot_bytes

    def slots_layout(self, layout: ExpertLayout) -> ExpertLayout:
        """Returns the layout of the experts that have slots."""
        return layout.only(layer.il for layer in layout.layers if layer.il not in self.whole_layers)

    def pass_slots(self, layout: ExpertLayout, on_device: bool) -> int:
        """Slots of a pool for layers of `layout` that a pass may need at once, on a device or in the CPU's memory."""
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
"""Properties of a plan that are among its facts."""


def layer_slots(layout: ExpertLayout, n_ubatch: int, streams: bool = False) -> int:
    """Returns the slots that a pass may need at once: its experts of one layer, for any choice of the router.

    streams: experts without a slot of their own are streamed, so one token's experts need slots.
    """
    return min(layout.n_expert, layout.n_expert_used * (1 if streams else n_ubatch))


def slot_bytes(layout: ExpertLayout, devices: Sequence[str] = ()) -> int:
    """Bytes of one slot over all arenas, as the native store lays them out, also for these devices; 0 for a model
    without experts."""
    return slot_sizes(padded(layout, devices) if devices else layout).slot_bytes


def allowed_ubatch(layout: ExpertLayout, n_slots: int, streams: bool = False, slot_tokens: int = NO_LIMIT) -> int:
    """Returns the largest number of tokens in a pass for which `n_slots` are enough; NO_LIMIT without a limit.

    streams: experts without a slot of their own are streamed or staged.

    slot_tokens: most tokens of a pass with slots that layers share. The device computes more tokens in another way than
    with every expert there (`slot_sizes.slot_tokens`).
    """
    if streams or n_slots >= layout.n_expert_total:
        return NO_LIMIT
    n_tokens = NO_LIMIT if n_slots >= layout.n_expert else max(1, n_slots // layout.n_expert_used)
    return min(n_tokens, slot_tokens)


def staging_bytes(layout: ExpertLayout, n_tensors: int) -> int:
    """Returns the bytes of `n_tensors` tensors of a layer's full shape."""
    return slot_sizes(layout, n_tensors * layout.n_expert).pool_bytes if n_tensors else 0


def slots_for(n_bytes: int, slot_bytes: int) -> int:
    """Returns the slots that hold `n_bytes`: the part of a given budget that staging tensors take."""
    return -(-n_bytes // slot_bytes) if n_bytes else 0
