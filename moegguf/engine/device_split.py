"""How many layers of a model suit each of several devices, by what layers take and by the devices' memory and links.

Each device then has slots for the experts of its own layers, which come in order (`controller.layer_split`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from moegguf.engine.placement import HitCurve
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout


@dataclass(frozen=True)
class DeviceRoom:
    """What a device offers to layers: memory for them, how much of it slots may take at most (None: all that is left),
    and the bandwidth of the link that its misses come over, in any unit that all of them have."""

    n_bytes: int
    link_speed: float
    most_slot_bytes: int | None = None

    def slot_bytes(self, dense_bytes: int) -> int:
        """For slots, with layers of so many other bytes."""
        left = self.n_bytes - dense_bytes
        return left if self.most_slot_bytes is None else min(left, self.most_slot_bytes)


@dataclass(frozen=True)
class LayerBytes:
    """What a layer, or several, takes on its device: everything but experts, slots for all of its experts, slots for
    those of a token; and what is copied for a token that misses them all."""

    dense_bytes: int
    expert_bytes: int
    least_expert_bytes: int
    token_bytes: int

    def __add__(self, other: LayerBytes) -> LayerBytes:
        return LayerBytes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: LayerBytes) -> LayerBytes:
        return LayerBytes(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def count_layers(layout: ExpertLayout) -> int:
    """Layers that llama.cpp counts in `n_gpu_layers`, those of multi-token prediction too; without the output."""
    n_layer = layout.metadata.get(f"{layout.arch}.block_count", layout.n_layer)
    return n_layer if isinstance(n_layer, int) else layout.n_layer


def split_layers(layers: Sequence[LayerBytes], rooms: Sequence[DeviceRoom], curve: HitCurve) -> list[int]:
    """How many of these layers, in order, each device computes, so that a token waits least for misses in all.

    A device's misses per token are those of its layers, at the hit rate that its memory gives them, and wait for its
    link: so slow links get fewer layers, and these more slots each. Of splits with equal waits, as where nothing would
    be missed, it is the one whose fullest device is least full. Raises BudgetError, which says what the memory holds,
    where they do not fit.
    """
    sums = list(itertools.accumulate(layers, initial=LayerBytes(0, 0, 0, 0)))
    unit_s = max(1, sums[-1].token_bytes) / max(room.link_speed for room in rooms)
    # [i]: the best split of the first i layers over the devices so far
    best: list[_Split | None] = [_Split(0.0, 0.0, ())] + [None] * len(layers)
    for room in rooms:
        best = [_best_split(best, i, room, sums, curve, unit_s) for i in range(len(layers) + 1)]
    if (found := best[-1]) is None:
        n_held = max(i for i, split in enumerate(best) if split is not None)
        raise BudgetError(
            f"holds what a token needs of {n_held} layers, but devices are to compute {len(layers)}; give more, free"
            " memory there, or put fewer layers on them (n_gpu_layers, -ngl)."
        )
    return list(found.counts)


def tensor_split_for(counts: Sequence[int]) -> list[float]:
    """The tensor_split that gives each device so many layers in llama.cpp; the last that has any gets the output."""
    last = max(d for d, n in enumerate(counts) if n)
    return [float(n + (d == last)) for d, n in enumerate(counts)]


@dataclass(frozen=True)
class _Split:
    """Layers of each device, what a token waits with them, and how full the fullest device is: its experts, as a share
    of its memory for slots."""

    waits: float
    fullest: float
    counts: tuple[int, ...]

    @property
    def cost(self) -> tuple[float, float]:
        """What is to be least; on a straight piece of a curve, waits of other splits differ in rounding alone."""
        return round(self.waits, 6), self.fullest


def _best_split(
    before: Sequence[_Split | None],
    n: int,
    room: DeviceRoom,
    sums: Sequence[LayerBytes],
    curve: HitCurve,
    unit_s: float,
) -> _Split | None:
    """The best of n layers over the devices before and this one, which computes the last of them; None: none fits."""
    found: _Split | None = None
    for first in range(n, -1, -1):  # of equals the one with most layers on the devices before
        if (earlier := before[first]) is None:
            continue
        waits = _waits(room, sums[n] - sums[first], curve) / unit_s
        if math.isinf(waits):
            break  # more layers fit even less
        full = _fullness(room, sums[n] - sums[first])
        split = _Split(earlier.waits + waits, max(earlier.fullest, full), (*earlier.counts, n - first))
        if found is None or split.cost < found.cost:
            found = split
    return found


def _fullness(room: DeviceRoom, part: LayerBytes) -> float:
    return part.expert_bytes / max(1, room.slot_bytes(part.dense_bytes))


def _waits(room: DeviceRoom, part: LayerBytes, curve: HitCurve) -> float:
    """For the misses of a token in these layers; infinite where a token could not be computed."""
    slot_bytes = room.slot_bytes(part.dense_bytes)
    if slot_bytes < part.least_expert_bytes:
        return math.inf
    if slot_bytes >= part.expert_bytes:
        return 0.0
    return part.token_bytes * (1 - curve.at(slot_bytes / part.expert_bytes)) / room.link_speed
