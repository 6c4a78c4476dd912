"""How many layers of a model suit each of several devices, by what layers take and by the devices' memory.

Each device then has slots for the experts of its own layers, which come in order (`controller.layer_split`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout


@dataclass(frozen=True)
class DeviceRoom:
    """What a device offers to layers: memory for them, and how much of it slots may take (None: all that is left)."""

    n_bytes: int
    most_slot_bytes: int | None = None

    def fullness(self, part: LayerBytes) -> float:
        """The experts of these layers, as a share of the memory for slots beside them; infinite where a token could not
        be computed."""
        left = self.n_bytes - part.dense_bytes
        for_slots = left if self.most_slot_bytes is None else min(left, self.most_slot_bytes)
        return part.expert_bytes / max(1, for_slots) if for_slots >= part.least_expert_bytes else math.inf


@dataclass(frozen=True)
class LayerBytes:
    """What a layer, or several, takes on its device: everything but experts, slots for all of its experts, and slots
    for those of a token."""

    dense_bytes: int
    expert_bytes: int
    least_expert_bytes: int

    def __add__(self, other: LayerBytes) -> LayerBytes:
        return LayerBytes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: LayerBytes) -> LayerBytes:
        return LayerBytes(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def count_layers(layout: ExpertLayout) -> int:
    """Layers that llama.cpp counts in `n_gpu_layers`, those of multi-token prediction too; without the output."""
    n_layer = layout.metadata.get(f"{layout.arch}.block_count", layout.n_layer)
    return n_layer if isinstance(n_layer, int) else layout.n_layer


def split_layers(layers: Sequence[LayerBytes], rooms: Sequence[DeviceRoom]) -> list[int]:
    """How many of these layers, in order, each device computes, so that the fullest device is least full.

    Raises BudgetError, which says what the memory holds, where they do not fit.
    """
    sums = list(itertools.accumulate(layers, initial=LayerBytes(0, 0, 0)))
    # [n]: the best split of the first n layers over the devices so far
    best = [_Split(0.0, ())] + [_Split(math.inf, ())] * len(layers)
    for room in rooms:
        best = [
            min(  # of equals the one with most layers on the devices before
                (best[first].with_part(room.fullness(sums[n] - sums[first]), n - first) for first in range(n, -1, -1)),
                key=lambda split: split.fullest,
            )
            for n in range(len(layers) + 1)
        ]
    if math.isinf(best[-1].fullest):
        n_held = max(n for n, split in enumerate(best) if not math.isinf(split.fullest))
        raise BudgetError(
            f"holds what a token needs of {n_held} layers, but devices are to compute {len(layers)}; give more, free"
            " memory there, or put fewer layers on them (n_gpu_layers, -ngl)."
        )
    return list(best[-1].counts)


@dataclass(frozen=True)
class _Split:
    """Layers of each device, and how full the fullest is."""

    fullest: float
    counts: tuple[int, ...]

    def with_part(self, fullness: float, n_layers: int) -> _Split:
        """With one more device."""
        return _Split(max(self.fullest, fullness), (*self.counts, n_layers))


def tensor_split_for(counts: Sequence[int]) -> list[float]:
    """The tensor_split that gives each device so many layers in llama.cpp; the last that has any gets the output."""
    last = max(d for d, n in enumerate(counts) if n)
    return [float(n + (d == last)) for d, n in enumerate(counts)]
