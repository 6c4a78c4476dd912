"""How many layers of a model suit each of several devices, by what layers take and by the devices' memory.

Each device then has slots for the experts of its own layers, which come in order (`controller.layer_split`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout

_Split = tuple[float, tuple[int, ...]]  # how full the fullest device is, and layers of each device


class LayerBytes(NamedTuple):
    """What a layer, or several, takes on its device: everything but experts, slots for all of its experts, and slots
    for those of a token."""

    dense_bytes: int
    expert_bytes: int
    least_expert_bytes: int


class DeviceRoom(NamedTuple):
    """What a device offers to layers: memory for them, and how much of it slots may take (None: all that is left)."""

    n_bytes: int
    most_slot_bytes: int | None = None

    def fullness(self, part: LayerBytes) -> float:
        """The experts of these layers, as a share of the memory for slots beside them; infinite where a token could not
        be computed."""
        left = self.n_bytes - part.dense_bytes
        for_slots = left if self.most_slot_bytes is None else min(left, self.most_slot_bytes)
        return part.expert_bytes / max(1, for_slots) if for_slots >= part.least_expert_bytes else math.inf


def count_layers(layout: ExpertLayout) -> int:
    """Layers that llama.cpp counts in `n_gpu_layers`, those of multi-token prediction too; without the output."""
    n_layer = layout.metadata.get(f"{layout.arch}.block_count", layout.n_layer)
    return n_layer if isinstance(n_layer, int) else layout.n_layer


def split_layers(layers: Sequence[LayerBytes], rooms: Sequence[DeviceRoom]) -> list[int]:
    """How many of these layers, in order, each device computes, so that the fullest device is least full.

    Raises BudgetError, which says what the memory holds, where they do not fit.
    """
    sums = np.zeros((len(layers) + 1, len(LayerBytes._fields)), np.int64)
    sums[1:] = np.cumsum(layers, axis=0)

    def with_part(before: _Split, room: DeviceRoom, first: int, n: int) -> _Split:
        part = LayerBytes(*(sums[n] - sums[first]).tolist())
        return max(before[0], room.fullness(part)), (*before[1], n - first)

    # [n]: the best split of the first n layers over the devices so far
    best: list[_Split] = [(0.0, ()), *[(math.inf, ())] * len(layers)]
    for room in rooms:
        best = [  # of equals the one with most layers on the devices before
            min((with_part(best[first], room, first, n) for first in range(n, -1, -1)), key=lambda split: split[0])
            for n in range(len(layers) + 1)
        ]
    fullest, counts = best[-1]
    if math.isinf(fullest):
        n_held = max(n for n, split in enumerate(best) if not math.isinf(split[0]))
        raise BudgetError(
            f"holds what a token needs of {n_held} layers, but devices are to compute {len(layers)}; give more, free"
            " memory there, or put fewer layers on them (n_gpu_layers, -ngl)."
        )
    return list(counts)


def tensor_split_for(counts: Sequence[int]) -> list[float]:
    """The tensor_split that gives each device so many layers in llama.cpp; the last that has any gets the output."""
    last = max(d for d, n in enumerate(counts) if n)
    return [float(n + (d == last)) for d, n in enumerate(counts)]
