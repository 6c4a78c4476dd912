"""Where a model's experts go on a machine with a device: predicted tokens per second of each placement, and the best.

The cost model is that of an exact cache: every expert that a token needs is multiplied where its layer is, and what is
missing on the device is copied there first. Per token, with A the bytes of its experts over all L layers and D those of
everything else that it reads:

    everything     (D + A) / device
    whole layers   (D + f A) / device + (1 - f) (A / CPU + L * way)               f: share of the layers on the device
    slots          (D + A) / device + (1 - h) A / copies + L * (stop + (1 - h^k) * copy)   h: hit rate, k: experts used
    CPU            (D + A) / CPU

Where the CPU computes misses beside copies (not exact), and each is done by whichever is sooner:

    slots          (D + A) / device + (1 - h) A / (copies + CPU) + L * (stop + (1 - h^k) * way)

Besides come the nodes of a graph that read no weights, and what is found neither on the device nor in RAM is read from
the disk. `way`: of activations from the device to the CPU and back; `copy`: of a layer's misses besides their bytes.
Speeds are those that kernels and copies reach; of a device that is only supposed they are 0.65 of its memory's
bandwidth, and the constants here: measurements of others were fitted with them. A hit rate is never speed: an expert of
Mixtral takes as long to copy as 40 of Qwen3-30B.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from moegguf.controller.measured import interpolate
from moegguf.controller.published import PUBLISHED
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import slot_sizes
from moegguf.native.speeds import Speeds
from moegguf.quantities import GIB, Link, format_bytes

KERNEL_SHARE = 0.65
GRAPH_SHARE = 0.85  # of the speed of experts' kernels alone that all of a model's kernels reach, by turns
CPU_LAYER_S = 60e-6  # a layer's way to the CPU and back
DEVICE_MARGIN_BYTES = GIB  # of the device's memory stays free: the first long prompt needs some
STOP_S = 35e-6  # of a layer at which the host has to learn what the router chose
TOLERANCE = 0.15  # between predicted and measured tokens per second
LAYER_NODES = 30  # of a layer's graph that read few or no weights: norms, attention, the router
PICK_NODES = 2  # the same for each expert that a token uses: its weight, its sum

Kind = Literal["resident", "layers", "slots", "cpu"]
KINDS: tuple[Kind, ...] = ("resident", "layers", "slots", "cpu")
Choice = Literal["auto", "layers", "slots", "cpu"]
_OF_CHOICE: Mapping[Choice, tuple[Kind, ...]] = {
    "auto": KINDS,
    "layers": ("resident", "layers"),
    "slots": ("resident", "slots"),
    "cpu": ("cpu",),
}


def parse_placement(text: str) -> Choice:
    """The choice in `text`. Raises OptionError."""
    for choice in _OF_CHOICE:
        if text == choice:
            return choice
    raise OptionError(f"placement={text[:60]!r} is none of {', '.join(_OF_CHOICE)}.")


@dataclass(frozen=True)
class ModelBytes:
    """What a token reads. expert_bytes: all experts of all layers; token_bytes: those of one token; dense_bytes: every
    weight besides that a token reads, and its part of the KV cache. n_layer: layers with experts, of which it uses
    n_expert_used each; n_layer_all: all layers. layer_bytes: experts of each of the n_layer, in order, which may differ
    in their types; (): all are alike. slots_bytes: a slot for each expert, which holds the largest; 0: as much as the
    experts."""

    n_layer: int
    expert_bytes: int
    token_bytes: int
    dense_bytes: int
    n_expert_used: int = 8
    n_layer_all: int = 0
    layer_bytes: tuple[int, ...] = ()
    slots_bytes: int = 0

    def of_last(self, n_layers: int) -> int:
        """Bytes of all experts of the last layers with experts."""
        if self.layer_bytes:
            return sum(self.layer_bytes[self.n_layer - n_layers :])
        return n_layers * self.expert_bytes // self.n_layer

    def share_of_first(self, n_layers: int) -> float:
        """The share of the experts, by bytes, that the first layers with experts have."""
        return 1 - self.of_last(self.n_layer - n_layers) / self.expert_bytes

    @property
    def every_slot_bytes(self) -> int:
        """Bytes of a slot for every expert."""
        return self.slots_bytes or self.expert_bytes

    @classmethod
    def of(cls, layout: ExpertLayout, kv_bytes: int = 0) -> ModelBytes:
        """Of a model with experts, whose KV cache has so many bytes in use. Raises OptionError for another model."""
        if not layout.is_moe:
            raise OptionError("a placement of experts needs a model with experts.")
        dense_bytes = layout.dense_bytes - layout.looked_up_bytes + kv_bytes
        return cls(
            len(layout.layers), layout.expert_bytes, layout.token_cycle_bytes, dense_bytes, layout.n_expert_used,
            layout.n_layer, tuple(layer.n_expert * layer.expert_bytes for layer in layout.layers),
            layout.n_expert_total * slot_sizes(layout).slot_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class DeviceSpeeds:
    """A device and the host beside it, in seconds and in bytes per second of weights that are multiplied with.

    copies: of misses, from RAM to the device; its latency is of all those of a layer together. stop_s: a stop at a
    layer. cpu_layer_s: a layer's way to the CPU and back. device_node_s, cpu_node_s: of each small node of a graph.
    disk_bytes_per_s: of experts that are in no memory. source: where these come from, as words.
    """

    device_bytes_per_s: float
    copies: Link
    cpu_bytes_per_s: float
    stop_s: float = STOP_S
    cpu_layer_s: float = CPU_LAYER_S
    device_node_s: float = 0.0
    cpu_node_s: float = 0.0
    disk_bytes_per_s: float = 1e9
    source: str = ""
    device_dense_bytes_per_s: float = 0.0  # of weights that are no experts; 0: as fast as those
    cpu_dense_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        speeds = (self.device_bytes_per_s, self.copies.bytes_per_s, self.cpu_bytes_per_s, self.disk_bytes_per_s)
        if not all(speed > 0 for speed in speeds) or self.stop_s < 0:
            raise OptionError(f"speeds must be above zero, but are {speeds} bytes/s.")

    @classmethod
    def supposed(
        cls, memory_bytes_per_s: float, link: Link, cpu_bytes_per_s: float, disk_bytes_per_s: float = 1e9
    ) -> DeviceSpeeds:
        """Of a device that is known by its memory's bandwidth; a link's latency is taken for that of a stop."""
        return cls(
            KERNEL_SHARE * memory_bytes_per_s,
            Link(link.bytes_per_s),
            cpu_bytes_per_s,
            link.latency_s or STOP_S,
            disk_bytes_per_s=disk_bytes_per_s,
            source="of the device as supposed",
        )

    @classmethod
    def measured(cls, speeds: Speeds, disk_bytes_per_s: float, source: str) -> DeviceSpeeds:
        """As measured in place, with kernels of experts alone."""
        return cls(
            GRAPH_SHARE * speeds.device_bytes_per_s, speeds.copies, GRAPH_SHARE * speeds.cpu_bytes_per_s,
            speeds.stop_s, speeds.cpu_layer_s, speeds.device_op_s, speeds.cpu_op_s, disk_bytes_per_s, source,
            GRAPH_SHARE * speeds.device_dense_bytes_per_s, GRAPH_SHARE * speeds.cpu_dense_bytes_per_s,
        )  # fmt: skip


@dataclass(frozen=True)
class HitCurve:
    """Hit rates {share of the experts in slots: hit rate}, and who measured them, on what."""

    rates: Mapping[float, float]
    source: str

    def at(self, share: float) -> float:
        """The hit rate with so large a share of the experts in slots."""
        return interpolate(self.rates, share)


def published_curve(n_expert: int, n_expert_used: int) -> HitCurve:
    """That of a model of this shape; else, of those of real models, the one with the fewest hits at a quarter."""
    real = [curve for curve in PUBLISHED if curve.n_expert]
    same = [curve for curve in real if (curve.n_expert, curve.n_expert_used) == (n_expert, n_expert_used)]
    chosen = min(same or real, key=lambda curve: interpolate(curve.rates, 0.25))
    kind = "published for" if same else "not known for this model; conservative: published for"
    return HitCurve(chosen.rates, f"{kind} {chosen.model} ({chosen.source})")


@dataclass(frozen=True)
class Placement:
    """One way to place the experts, and its prediction. n_layers: whole layers on the device; slot_bytes: memory of the
    slots there; hit_rate: of these. exact: False where the CPU computes some of their misses."""

    kind: Kind
    tokens_per_s: float
    n_layers: int = 0
    slot_bytes: int = 0
    hit_rate: float = 0.0
    exact: bool = True

    def __str__(self) -> str:
        inexact = "" if self.exact else ", misses computed by the CPU, too: not exact"
        return {
            "resident": "every expert on the device",
            "layers": f"{self.n_layers} whole layers" if self.n_layers else "no whole layer",
            "slots": f"slots of {format_bytes(self.slot_bytes)}, hit rate {self.hit_rate:.0%}{inexact}",
            "cpu": "everything on the CPU",
        }[self.kind]


@dataclass(frozen=True)
class PlacementPlan:
    """Every placement that fits, the fastest first; the one to take; and why, as a sentence.

    device_bytes: of the device's memory for experts. hit_rates: where those come from.
    """

    placements: tuple[Placement, ...]
    chosen: Placement
    reason: str
    speeds: DeviceSpeeds
    hit_rates: str
    device_bytes: int


@dataclass(frozen=True)
class Planner:
    """Predicts placements of one model on one machine.

    device_bytes: memory of the device for experts, below 0 where not even everything else fits there. ram_bytes: of RAM
    for experts, None: enough for all. cpu_ram_bytes: the same without the device, where RAM has everything else, too.
    staging_bytes: of the device's memory for experts, what prompts are staged in where there are slots.
    computes_misses: the CPU computes some of what slots lack; not exact.
    """

    model: ModelBytes
    speeds: DeviceSpeeds
    curve: HitCurve
    device_bytes: int
    ram_bytes: int | None = None
    cpu_ram_bytes: int | None = None
    staging_bytes: int = 0
    computes_misses: bool = False

    def plan(self, choice: Choice = "auto", without: Container[Kind] = ()) -> PlacementPlan:
        """The fastest placement that `choice` allows, without some kinds.

        Raises OptionError for another choice, BudgetError when none that it allows fits.
        """
        kinds = _OF_CHOICE[parse_placement(choice)]
        found = sorted(self.placements(), key=lambda placement: -placement.tokens_per_s)
        allowed = [placement for placement in found if placement.kind in kinds and placement.kind not in without]
        if not allowed:
            layer_bytes = self.model.of_last(1)
            raise BudgetError(
                f"{format_bytes(max(0, self.device_bytes))} of the device's memory for experts are too few for"
                f" placement {choice!r}: the last layer's experts take {format_bytes(layer_bytes)}; free memory there,"
                " or take placement 'cpu'."
            )
        chosen, device_bytes = allowed[0], max(0, self.device_bytes)
        reason = self._reason(chosen, found, choice)
        return PlacementPlan(tuple(found), chosen, reason, self.speeds, self.curve.source, device_bytes)

    def placements(self) -> Iterator[Placement]:
        """The best of each kind that fits; there is always "cpu"."""
        model = self.model
        yield Placement("cpu", 1 / self._cpu_s())
        if self.device_bytes >= max(model.expert_bytes, model.every_slot_bytes):
            yield Placement("resident", 1 / self._device_s(1.0), model.n_layer, hit_rate=1.0)
            return
        if self.device_bytes < 0:
            return
        n_layers = max(n for n in range(model.n_layer) if model.of_last(n) <= self.device_bytes)
        yield Placement("layers", 1 / self._layers_s(n_layers), n_layers)
        if self.device_bytes > 0:
            yield self._slots()

    def _slots(self) -> Placement:
        model = self.model
        slot_bytes = max(0, self.device_bytes - self.staging_bytes)
        hit_rate = self.curve.at(slot_bytes / model.every_slot_bytes)
        missed_bytes = (1 - hit_rate) * model.token_bytes
        misses_s = self._misses_s(missed_bytes, model.n_layer * (1 - hit_rate**model.n_expert_used))
        seconds = self._device_s(1.0) + misses_s + model.n_layer * self.speeds.stop_s
        seconds += self._disk_s(model.n_layer, slot_bytes, self.ram_bytes)
        exact = not (self.computes_misses and missed_bytes)
        return Placement("slots", 1 / seconds, 0, slot_bytes, hit_rate, exact)

    def _misses_s(self, missed_bytes: float, n_layers: float) -> float:
        """What misses of a token take that are in RAM: copied, or divided between copies and the CPU."""
        speeds = self.speeds
        if not self.computes_misses:
            return speeds.copies.seconds(missed_bytes, n_layers)
        return missed_bytes / (speeds.copies.bytes_per_s + speeds.cpu_bytes_per_s) + n_layers * speeds.cpu_layer_s

    def _layers_s(self, n_layers: int) -> float:
        model, speeds, n_rest = self.model, self.speeds, self.model.n_layer - n_layers
        on_cpu = model.share_of_first(n_rest)
        computed_s = on_cpu * model.token_bytes / speeds.cpu_bytes_per_s
        way_s = n_rest * speeds.cpu_layer_s
        return self._device_s(1 - on_cpu) + computed_s + way_s + self._disk_s(n_rest, 0, self.ram_bytes)

    def _cpu_s(self) -> float:
        disk_s = self._disk_s(
            self.model.n_layer, 0, self.ram_bytes if self.cpu_ram_bytes is None else self.cpu_ram_bytes
        )
        speeds, model = self.speeds, self.model
        dense_s = model.dense_bytes / (speeds.cpu_dense_bytes_per_s or speeds.cpu_bytes_per_s)
        return dense_s + model.token_bytes / speeds.cpu_bytes_per_s + self._n_nodes * speeds.cpu_node_s + disk_s

    def _device_s(self, share: float) -> float:
        """What the device computes for a token, with that share of its experts."""
        speeds, model = self.speeds, self.model
        dense_s = model.dense_bytes / (speeds.device_dense_bytes_per_s or speeds.device_bytes_per_s)
        return dense_s + share * model.token_bytes / speeds.device_bytes_per_s + self._n_nodes * speeds.device_node_s

    @property
    def _n_nodes(self) -> int:
        model = self.model
        return model.n_layer_all * LAYER_NODES + model.n_layer * model.n_expert_used * PICK_NODES

    def _disk_s(self, n_layers: int, device_bytes: int, ram_bytes: int | None) -> float:
        """What is read for a token of the first layers, whose experts lie in so much memory. Of an expert that is on
        the device, its copy in RAM goes first: the memories add up."""
        model = self.model
        slots_bytes = model.share_of_first(n_layers) * model.every_slot_bytes
        if ram_bytes is None or ram_bytes >= slots_bytes:
            return 0.0
        hit_rate = self.curve.at((device_bytes + ram_bytes) / slots_bytes)
        return (1 - hit_rate) * model.share_of_first(n_layers) * model.token_bytes / self.speeds.disk_bytes_per_s

    def _reason(self, chosen: Placement, found: list[Placement], choice: Choice) -> str:
        if chosen.kind == "resident":
            return f"every expert fits into {format_bytes(self.device_bytes)} of the device's memory"
        text = f"{chosen}: about {format_speed(chosen.tokens_per_s)} tokens/s"
        other = next((placement for placement in found if placement.kind != chosen.kind), None)
        if other is not None:
            text += f", against {format_speed(other.tokens_per_s)} with {other}"
        if chosen.slot_bytes or (other is not None and other.slot_bytes):
            text += f" (hit rates {self.curve.source})"
        return text if choice == "auto" else f"{text}; placement {choice!r} was asked for"


def is_off(measured: float, predicted: float) -> bool:
    """Whether a measured speed differs from the predicted one by more than TOLERANCE of it."""
    return abs(measured - predicted) > TOLERANCE * predicted


def format_speed(number: float) -> str:
    """Tokens per second with two digits or more: "0.52", "4.6", "38", "1204"."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
