"""Which of several devices computes which layer, as llama.cpp splits a model, and how many layers suit each.

llama.cpp puts layers on devices in order: the last `n_gpu_layers` of the model, its output counted as one, in the
proportions of `tensor_split`. Each device then has slots for the experts of its own layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moegguf.engine.placement import HitCurve
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout

ON_CPU = -1


@dataclass(frozen=True)
class DeviceRoom:
    """What a device offers to layers: memory for them, how much of it slots may take at most (None: all that is left),
    and the bandwidth of the link that its misses come over, in any unit that all of them have."""

    n_bytes: int
    link_speed: float
    most_slot_bytes: int | None = None

    def slot_bytes(self, n_layer: int, dense_bytes: int) -> int:
        """For slots, with so many layers of so many other bytes."""
        left = self.n_bytes - n_layer * dense_bytes
        return left if self.most_slot_bytes is None else min(left, self.most_slot_bytes)


@dataclass(frozen=True)
class LayerBytes:
    """What a layer takes on its device: everything but experts, all of its experts, and the fewest of them that a token
    can be computed with."""

    dense_bytes: int
    expert_bytes: int
    least_expert_bytes: int


def count_layers(layout: ExpertLayout) -> int:
    """Layers that llama.cpp counts in `n_gpu_layers`, those of multi-token prediction too; without the output."""
    n_layer = layout.metadata.get(f"{layout.arch}.block_count", layout.n_layer)
    return n_layer if isinstance(n_layer, int) else layout.n_layer


def device_of_layers(n_layer: int, tensor_split: Sequence[float], n_gpu_layers: int = -1) -> list[int]:
    """The index of the device that computes each layer, ON_CPU for none (llama-model.cpp, load_tensors).

    n_layer: those of `count_layers`. n_gpu_layers: -1 is every layer and the output. Raises OptionError for a split
    that is not one.
    """
    split = np.asarray(tensor_split, np.float32)
    if split.size == 0 or not np.isfinite(split).all() or (split < 0).any() or split.sum() == 0:
        raise OptionError(
            f"tensor_split is {list(tensor_split)}, but has a proportion for each device, none below 0 and some above."
        )
    bounds = np.cumsum(split, dtype=np.float32)
    bounds /= bounds[-1]
    n_on_devices = n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layer + 1)
    first = n_layer + 1 - n_on_devices
    places = np.arange(n_layer - first, dtype=np.float32) / np.float32(max(1, n_on_devices))
    return [ON_CPU] * min(first, n_layer) + np.searchsorted(bounds, places, side="right").tolist()


def split_layers(n_layer: int, rooms: Sequence[DeviceRoom], layer: LayerBytes, curve: HitCurve) -> list[int]:
    """How many of `n_layer` layers each device computes, so that a token waits least for misses in all.

    A device's misses per token are those of its layers, at the hit rate that its memory gives them, and wait for its
    link: so slow links get fewer layers, and these more slots each. Where nothing would be missed, or links and
    residency are the same, layers go where most memory is left. Raises BudgetError, which says what the memory
    holds, where they do not fit.

    Each layer goes where it costs least: with a concave curve of hit rates the cost of a device grows ever faster with
    its layers, so no other choice would be better in the end.
    """
    counts = [0] * len(rooms)
    for _ in range(n_layer):
        costs = [_cost_of_one_more(room, n, layer, curve) for room, n in zip(rooms, counts, strict=True)]
        best = min(range(len(rooms)), key=lambda d: costs[d])
        if math.isinf(costs[best][0]):
            raise BudgetError(
                f"holds what a token needs of {sum(counts)} layers, but devices are to compute {n_layer}; give more,"
                " free memory there, or put fewer layers on them (n_gpu_layers, -ngl)."
            )
        counts[best] += 1
    return counts


def tensor_split_for(counts: Sequence[int]) -> list[float]:
    """The tensor_split that gives each device so many layers in llama.cpp; the last that has any gets the output."""
    last = max(d for d, n in enumerate(counts) if n)
    return [float(n + (d == last)) for d, n in enumerate(counts)]


def _cost_of_one_more(room: DeviceRoom, n: int, layer: LayerBytes, curve: HitCurve) -> tuple[float, float]:
    """(what a token waits longer with a layer more, the share of memory for slots that its experts then need)."""
    needed = (n + 1) * layer.expert_bytes / max(1, room.slot_bytes(n + 1, layer.dense_bytes))
    return _waits(room, n + 1, layer, curve) - _waits(room, n, layer, curve), needed


def _waits(room: DeviceRoom, n: int, layer: LayerBytes, curve: HitCurve) -> float:
    """For the misses of a token in n layers; infinite where a token could not be computed."""
    if n == 0:
        return 0.0
    slot_bytes = room.slot_bytes(n, layer.dense_bytes) / n
    if slot_bytes < layer.least_expert_bytes:
        return math.inf
    if slot_bytes >= layer.expert_bytes:
        return 0.0
    return n * (1 - curve.at(slot_bytes / layer.expert_bytes)) / room.link_speed
