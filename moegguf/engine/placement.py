"""Where a model's experts go on a machine with a device: predicted tokens per second of each placement, and the best.

The cost model is that of an exact cache: every expert that a token needs is multiplied where its layer is, and what is
missing on the device is copied there first. Per token, with A the bytes of its experts over all layers and D those of
everything else that it reads:

    everything     (D + A) / device
    whole layers   (D + f A) / device + (1 - f) A / CPU + (1 - f) L * 60 us       f: share of the layers on the device
    slots          (D + A) / device + (1 - h) A / link + L * stop                 h: hit rate of the slots

`device` is 0.65 of its memory's bandwidth: what kernels reach on matrices of this size. Measurements of others were
fitted with these constants. A hit rate is never speed: an expert of Mixtral takes as long to copy as 40 of Qwen3-30B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from moegguf.controller.measured import interpolate
from moegguf.engine.published import PUBLISHED
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.quantities import GIB, Link, format_bytes

KERNEL_SHARE = 0.65
CPU_LAYER_S = 60e-6  # a layer's way to the CPU and back
DEVICE_MARGIN_BYTES = GIB  # of the device's memory stays free: the first long prompt needs some
STOP_S = 35e-6  # of a layer at which the host has to learn what the router chose

Kind = Literal["resident", "layers", "slots", "layers and slots", "cpu"]
Choice = Literal["auto", "layers", "slots", "cpu"]
_OF_CHOICE: Mapping[Choice, tuple[Kind, ...]] = {
    "auto": ("resident", "layers", "slots", "layers and slots", "cpu"),
    "layers": ("resident", "layers"),
    "slots": ("resident", "slots"),
    "cpu": ("cpu",),
}


@dataclass(frozen=True)
class ModelBytes:
    """What a token reads. expert_bytes: all experts of all layers; token_bytes: those of one token; dense_bytes: every
    weight besides that a token reads, and its part of the KV cache. n_layer: layers with experts."""

    n_layer: int
    expert_bytes: int
    token_bytes: int
    dense_bytes: int

    @classmethod
    def of(cls, layout: ExpertLayout, kv_bytes: int = 0) -> ModelBytes:
        """Of a model with experts, whose KV cache has so many bytes in use. Raises OptionError for another model."""
        if not layout.is_moe:
            raise OptionError("a placement of experts needs a model with experts.")
        return cls(len(layout.layers), layout.expert_bytes, layout.token_cycle_bytes, layout.dense_bytes + kv_bytes)


@dataclass(frozen=True)
class DeviceSpeeds:
    """A device and the host beside it. memory_bytes_per_s: of the device's memory; cpu_bytes_per_s: weights of experts
    that the CPU multiplies with in a second, for one token; stop_s: a stop at a layer."""

    memory_bytes_per_s: float
    link: Link
    cpu_bytes_per_s: float
    stop_s: float = STOP_S

    def __post_init__(self) -> None:
        speeds = (self.memory_bytes_per_s, self.link.bytes_per_s, self.cpu_bytes_per_s)
        if not all(speed > 0 for speed in speeds) or self.stop_s < 0:
            raise OptionError(f"speeds must be above zero, but are {speeds} bytes/s.")


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
    slots there, for the other layers; hit_rate: of these."""

    kind: Kind
    tokens_per_s: float
    n_layers: int = 0
    slot_bytes: int = 0
    hit_rate: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.n_layers} whole layers"] if self.kind in ("layers", "layers and slots") else []
        if self.slot_bytes:
            parts.append(f"slots of {format_bytes(self.slot_bytes)}, hit rate {self.hit_rate:.0%}")
        named = {"resident": "every expert on the device", "cpu": "every expert on the CPU"}
        return named.get(self.kind, " and ".join(parts))


@dataclass(frozen=True)
class PlacementPlan:
    """Every placement that fits, the fastest first; the one to take; and why, as a sentence."""

    placements: tuple[Placement, ...]
    chosen: Placement
    reason: str


@dataclass(frozen=True)
class Planner:
    """Predicts placements of one model on one machine. device_bytes: memory of the device for experts."""

    model: ModelBytes
    speeds: DeviceSpeeds
    curve: HitCurve
    device_bytes: int

    def plan(self, choice: Choice = "auto") -> PlacementPlan:
        """The fastest placement that `choice` allows.

        Raises OptionError for another choice, BudgetError when none that it allows fits.
        """
        if choice not in _OF_CHOICE:
            raise OptionError(f"placement={choice!r} is none of {', '.join(_OF_CHOICE)}.")
        found = sorted(self.placements(), key=lambda placement: -placement.tokens_per_s)
        allowed = [placement for placement in found if placement.kind in _OF_CHOICE[choice]]
        if not allowed:
            raise BudgetError(
                f"{format_bytes(self.device_bytes)} of the device's memory hold no expert layer of"
                f" {format_bytes(self.model.expert_bytes // self.model.n_layer)}; free memory there, or take"
                " placement 'cpu'."
            )
        return PlacementPlan(tuple(found), allowed[0], self._reason(allowed[0], found, choice))

    def placements(self) -> Iterator[Placement]:
        """The best of each kind that fits; there is always "cpu"."""
        model = self.model
        if self.device_bytes >= model.expert_bytes:
            yield Placement("resident", 1 / self._device_s(1.0), model.n_layer, hit_rate=1.0)
            return
        yield Placement("cpu", 1 / self._layers_s(0.0))
        n_layers = self.device_bytes * model.n_layer // model.expert_bytes
        if n_layers:
            yield Placement("layers", 1 / self._layers_s(n_layers / model.n_layer), n_layers)
        if self.device_bytes * model.n_layer >= model.token_bytes:  # what a token needs of one layer
            yield self._slots(0)
            yield from (self._best_mix(n_layers),) if n_layers > 1 else ()

    def _best_mix(self, most_layers: int) -> Placement:
        """Whole layers, without a stop at them, and slots in what they leave."""
        return max((self._slots(n) for n in range(1, most_layers)), key=lambda placement: placement.tokens_per_s)

    def _slots(self, n_layers: int) -> Placement:
        model, speeds = self.model, self.speeds
        rest = 1 - n_layers / model.n_layer
        slot_bytes = self.device_bytes - n_layers * model.expert_bytes // model.n_layer
        hit_rate = self.curve.at(slot_bytes / (rest * model.expert_bytes))
        copied_s = (1 - hit_rate) * rest * model.token_bytes / speeds.link.bytes_per_s
        seconds = self._device_s(1.0) + copied_s + rest * model.n_layer * speeds.stop_s
        return Placement("layers and slots" if n_layers else "slots", 1 / seconds, n_layers, slot_bytes, hit_rate)

    def _layers_s(self, share: float) -> float:
        on_cpu = 1 - share
        computed_s = on_cpu * self.model.token_bytes / self.speeds.cpu_bytes_per_s
        return self._device_s(share) + computed_s + on_cpu * self.model.n_layer * CPU_LAYER_S

    def _device_s(self, share: float) -> float:
        """What the device reads for a token, with that share of its experts."""
        read_bytes = self.model.dense_bytes + share * self.model.token_bytes
        return read_bytes / (KERNEL_SHARE * self.speeds.memory_bytes_per_s)

    def _reason(self, chosen: Placement, found: list[Placement], choice: Choice) -> str:
        if chosen.kind == "resident":
            return f"every expert fits into {format_bytes(self.device_bytes)} of the device's memory"
        text = f"{chosen}: about {chosen.tokens_per_s:.0f} tokens/s"
        other = next((placement for placement in found if placement.kind != chosen.kind), None)
        if other is not None:
            text += f", against {other.tokens_per_s:.0f} with {other}"
        if chosen.slot_bytes or (other is not None and other.slot_bytes):
            text += f" (hit rates {self.curve.source})"
        return text if choice == "auto" else f"{text}; placement {choice!r} was asked for"
