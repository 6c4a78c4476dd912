"""Plans slots on several devices, or on devices and the CPU: which layers each computes, and its slots for them.

RAM has slots below those of all devices together, and those of layers that are left to the CPU. Layers go to devices in
order (`request_cost.device_of_layers`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moegguf.controller.request_cost import NO_LIMIT, ON_CPU, allowed_ubatch, device_of_layers, share_out, staging_bytes
from moegguf.engine.budgets import AUTO, Budgets
from moegguf.engine.machine import Device, Machine, Memory
from moegguf.engine.memory import F16, row_bytes
from moegguf.engine.plan import DevicePlan, Plan
from moegguf.engine.pool_plan import VRAM_MARGIN_BYTES, Pool, divide_ram_slots, host_bytes, ram_slots
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import slot_sizes, slot_tokens
from moegguf.quantities import ExpertCache, format_bytes, format_bytes_up

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


class SplitPlanner:
    """One plan with so many staging tensors on each device; sizes of `budgets` leave nothing to choose.

    Raises BudgetError, OptionError for a split or budgets that do not fit the devices.
    """

    def __init__(self, layout: ExpertLayout, machine: Machine, budgets: Budgets, n_staging: int) -> None:
        self._layout, self._devices, self._memory, self._budgets = layout, machine.devices, machine.memory, budgets
        vram, tensor_split, names = budgets.vram, budgets.tensor_split, ", ".join(d.name for d in machine.devices)
        if len(vram) not in (1, len(machine.devices)):
            raise BudgetError(
                f"vram_cache has {len(vram)} budgets for {len(machine.devices)} devices ({names}); give one for all"
                " of them together, or one for each."
            )
        if tensor_split is not None and len(tensor_split) != len(machine.devices):
            raise OptionError(
                f"tensor_split has {len(tensor_split)} proportions for {len(machine.devices)} devices ({names}); give"
                " one for each."
            )
        self._n_staging, self._staging_bytes = n_staging, staging_bytes(layout, n_staging)  # of each device
        total, free = (sum(getattr(d, name) for d in machine.devices) for name in ("total_bytes", "free_bytes"))
        self._joint = Pool(
            layout, self._joint_budget(), Memory(total, free, f"the devices {names}"), budgets.sizes,
            VRAM_MARGIN_BYTES * len(machine.devices), n_staging > 0, "vram_cache",
            len(machine.devices) * self._staging_bytes, budgets.staging is None,
        ).plan()  # fmt: skip
        self._cpu_streams = budgets.streams and slot_sizes(layout).streams
        self._n_layer = count_layers(layout)
        self._moe_layers = {layer.il: layer for layer in layout.layers}
        embedding_bytes = layout.n_vocab * row_bytes(F16, layout.hparams.n_embd)
        self._output_bytes = min(self._joint.dense_bytes, max(layout.tied_output_bytes, embedding_bytes))
        self._layer_bytes = self._bytes_by_layer()

    def _joint_budget(self) -> ExpertCache:
        vram = self._budgets.vram
        if len(vram) == 1:
            return vram[0]
        if any(cache.mode == "auto" for cache in vram):
            return AUTO
        given = sum(cache.n_bytes or round(cache.fraction * self._layout.expert_bytes) for cache in vram)
        return ExpertCache("bytes", n_bytes=given)

    def _bytes_by_layer(self) -> list[int]:
        """Bytes of each layer: its own weights but experts, its part of the KV cache, and of what belongs to none."""
        layout, joint, n_layer = self._layout, self._joint, self._n_layer
        own = [layout.layer_dense_bytes.get(il, 0) for il in range(n_layer)]
        heads = [*layout.hparams.n_head_kv[:n_layer], *([0] * n_layer)][:n_layer]
        heads = heads if any(heads) else [1] * n_layer
        rest = max(0, joint.dense_bytes - self._output_bytes - sum(own))
        return [
            dense + -(-joint.kv_bytes * n // sum(heads)) + -(-rest // n_layer)
            for dense, n in zip(own, heads, strict=True)
        ]

    def plan(self) -> Plan:
        """The plan."""
        tensor_split, on = self._device_of_layers()
        layers = [tuple(il for il, d in enumerate(on) if d == index) for index in range(len(self._devices))]
        cpu_layers = tuple(il for il, d in enumerate(on) if d == ON_CPU)
        used = [index for index, of in enumerate(layers) if self._experts_of(of)]
        slots, n_on_cpu, size = self._slots(layers), self._experts_of(cpu_layers), self._joint.slot_bytes
        below = sum(self._experts_of(layers[d]) for d in used if slots[d] < self._experts_of(layers[d]))
        n_cpu, n_ram = self._ram_slots(cpu_layers, n_on_cpu, below)
        allowed = [self._allowed(slots[d], self._devices[d].name, self._experts_of(layers[d])) for d in used]
        allowed += [self._allowed(n_cpu, None, n_on_cpu)] if n_cpu else []
        n_ubatch = min(self._joint.n_ubatch, *allowed)
        parts = [
            DevicePlan(device.name, of, n_slots, self._beside_bytes(of) + n_slots * size)
            for device, of, n_slots in zip(self._devices, layers, slots, strict=True)
        ]
        host = host_bytes(self._layout, n_ubatch) + (n_ram + n_cpu) * size + self._bytes_of(cpu_layers)
        of_cpu = [DevicePlan(None, cpu_layers, n_cpu, host - n_ram * size)] if n_cpu else []
        n_slots = sum(slots) + n_cpu
        return replace(
            self._joint,
            n_slots=n_slots,
            budget_bytes=n_slots * size,
            resident=n_slots == self._layout.n_expert_total,
            n_ubatch=n_ubatch,
            slot_tokens=min(slot_tokens(self._devices[d].name) for d in used),
            total_bytes=sum(part.total_bytes for part in parts),
            streams=self._cpu_streams if n_cpu else self._n_staging > 0,
            reasons=tuple(self._reasons([*parts, *of_cpu], n_ram)),
            warnings=tuple(self._warnings(parts, host)),
            device=", ".join(device.name for device in self._devices),
            devices=(*parts, *of_cpu),
            n_ram_slots=n_ram,
            host_bytes=host,
            staging_bytes=self._staging_bytes * sum(part.n_slots > 0 for part in parts),
            tensor_split=tensor_split,
        )

    def _device_of_layers(self) -> tuple[tuple[float, ...], list[int]]:
        """The tensor_split with which llama.cpp does as planned, and the device of each layer."""
        n_gpu_layers = self._budgets.n_gpu_layers
        split: Sequence[float] | None = self._budgets.tensor_split
        if split is None:
            n_on_devices = self._n_layer if n_gpu_layers < 0 else min(n_gpu_layers - 1, self._n_layer)
            if n_on_devices < 1:
                raise OptionError(
                    f"with vram_cache devices compute layers, but n_gpu_layers is {n_gpu_layers}, which is none beside"
                    " the output; give more, or leave vram_cache out."
                )
            try:
                layers = [self._layer(il) for il in range(self._n_layer - n_on_devices, self._n_layer)]
                rooms = [self._room(d) for d in range(len(self._devices))]
                split = tensor_split_for(split_layers(layers, rooms))
            except BudgetError as error:
                raise BudgetError(f"vram_cache={','.join(map(str, self._budgets.vram))!r} {error}") from None
        on = device_of_layers(self._n_layer, split, n_gpu_layers)
        if not any(d != ON_CPU and il in self._moe_layers for il, d in enumerate(on)):
            raise OptionError(
                f"with vram_cache devices compute layers, but n_gpu_layers={n_gpu_layers} puts no layer with experts on"
                " one; give more, or leave vram_cache out."
            )
        return tuple(map(float, split)), on

    def _layer(self, il: int) -> LayerBytes:
        size, layer = self._joint.slot_bytes, self._moe_layers.get(il)
        dense_bytes = self._layer_bytes[il] + (self._output_bytes if il == self._n_layer - 1 else 0)
        n_experts, n_used = (layer.n_expert, layer.n_expert_used) if layer else (0, 0)
        return LayerBytes(dense_bytes, n_experts * size, n_used * size)

    def _room(self, d: int) -> DeviceRoom:
        """A budget that was given is kept: it may take what "auto" leaves free."""
        device, auto = self._devices[d], self._budgets.vram_of(d).mode == "auto"
        return DeviceRoom(self._free_bytes(device) if auto else device.free_bytes, self._limit_bytes(d))

    def _free_bytes(self, device: Device) -> int:
        """For layers, with "auto"."""
        return max(0, device.free_bytes - VRAM_MARGIN_BYTES - self._joint.compute_bytes - self._staging_bytes)

    def _limit_bytes(self, d: int) -> int | None:
        """The budget for slots on a device; its part, by free memory, of one for all. None: what is free."""
        cache, vram = self._budgets.vram_of(d), self._budgets.vram
        if cache.mode == "auto":
            return cache.n_bytes or None
        share = math.floor(cache.fraction * self._layout.n_expert_total + 1e-9) * self._joint.slot_bytes
        n_bytes = cache.n_bytes or share
        if len(vram) > 1:
            return max(0, n_bytes - self._staging_bytes) if self._budgets.staging is None else n_bytes
        free = [max(1, self._free_bytes(device)) for device in self._devices]
        return n_bytes * free[d] // sum(free)

    def _experts_of(self, layers: Sequence[int]) -> int:
        return sum(self._moe_layers[il].n_expert for il in layers if il in self._moe_layers)

    def _beside_bytes(self, layers: Sequence[int]) -> int:
        """What a device with these layers holds beside slots."""
        output = self._output_bytes if self._n_layer - 1 in layers else 0
        staged = self._staging_bytes if self._experts_of(layers) else 0
        return self._bytes_of(layers) + output + self._joint.compute_bytes + staged

    def _bytes_of(self, layers: Iterable[int]) -> int:
        return sum(self._layer_bytes[il] for il in layers)

    def _slots(self, layers: Sequence[Sequence[int]]) -> list[int]:
        """Slots of each device, with these layers."""
        size, most, vram = self._joint.slot_bytes, [self._experts_of(of) for of in layers], self._budgets.vram
        left = [d.free_bytes - self._beside_bytes(of) for d, of in zip(self._devices, layers, strict=True)]
        if vram[0].mode != "auto" and len(vram) == 1:
            return self._shared_slots(most, left)
        slots = []
        for d, n in enumerate(most):
            limit, free = self._limit_bytes(d), max(0, left[d] - VRAM_MARGIN_BYTES)
            if limit is None or self._budgets.vram_of(d).mode == "auto":
                limit = min(free, limit or free)
            slots.append(min(n, limit // size))
        return slots

    def _shared_slots(self, most: Sequence[int], left: Sequence[int]) -> list[int]:
        """Slots of one budget for all devices: what the layers of one do not need, or its memory does not hold, goes to
        the others."""
        size, least, total = self._joint.slot_bytes, self._layout.n_expert_used, min(self._joint.n_slots, sum(most))
        shares = most
        if self._budgets.tensor_split is None:
            shares = [(self._limit_bytes(d) or 0) if n else 0 for d, n in enumerate(most)]
        held = [min(n, max(least, n_bytes // size)) for n, n_bytes in zip(most, left, strict=True)]
        within = share_out(total, shares, held, least)
        return within if sum(within) >= total else share_out(total, shares, most, least)

    def _allowed(self, n_slots: int, device: str | None, n_experts: int) -> int:
        """Tokens of a pass on a device, or on the CPU, whose layers have so many experts.

        Raises BudgetError for fewer slots than a token needs.
        """
        least = self._layout.n_expert_used
        if n_slots < least:
            option, where = ("vram_cache", device) if device else ("expert_cache", "the CPU")
            raise BudgetError(
                f"{option} holds {n_slots} experts on {where}, but a token needs {least} of each of its layers; give at"
                f" least {format_bytes_up(least * self._joint.slot_bytes)!r} for {where}, or other layers"
                " (tensor_split, n_gpu_layers)."
            )
        if n_slots >= n_experts:
            return NO_LIMIT
        streams = self._cpu_streams if device is None else self._n_staging > 0
        return allowed_ubatch(self._layout, n_slots, streams, slot_tokens(device))

    def _ram_slots(self, cpu_layers: Sequence[int], n_on_cpu: int, n_below: int) -> tuple[int, int]:
        """(slots of the layers that the CPU computes, slots below those of devices): in proportion to their experts.

        Raises BudgetError where there are too few.
        """
        if n_on_cpu + n_below == 0:
            return 0, 0
        taken = self._bytes_of(cpu_layers) + (self._joint.compute_bytes if n_on_cpu else 0)
        memory = replace(self._memory, available_bytes=max(0, self._memory.available_bytes - taken))
        ram, size, joint = self._budgets.ram, self._joint.slot_bytes, self._joint
        total = ram_slots(self._layout, ram, memory, size, joint.n_ubatch, self._budgets.margin_bytes)
        total = min(total, n_on_cpu + n_below)
        least_cpu, least_below = min(n_on_cpu, self._layout.n_expert_used), min(1, n_below)
        if total < least_cpu + least_below:
            least = format_bytes_up((least_cpu + least_below) * size)
            raise BudgetError(
                f"expert_cache={str(ram)!r} holds {total} experts in RAM, but {len(cpu_layers)} layers are"
                f" computed by the CPU; give at least {least!r}, or put more layers on devices (n_gpu_layers)."
            )
        return divide_ram_slots(total, n_on_cpu, n_below, least_cpu)

    def _reasons(self, parts: Sequence[DevicePlan], n_ram: int) -> Iterator[str]:
        size = self._joint.slot_bytes
        yield from self._joint.reasons[:-1]
        for part in filter(lambda part: part.layers, parts):
            yield (
                f"{len(part.layers)} layers ({part.layers[0]} to {part.layers[-1]}) are computed on"
                f" {part.name or 'the CPU'}, with slots for {part.n_slots} of their {self._experts_of(part.layers)}"
                f" experts ({format_bytes(part.n_slots * size)})"
            )
        if n_ram:
            yield f"{n_ram} experts ({format_bytes(n_ram * size)}) fit into RAM below the devices"

    def _warnings(self, parts: Sequence[DevicePlan], host: int) -> Iterator[str]:
        found = [
            (f"on {part.name}", part.total_bytes, device.free_bytes)
            for part, device in zip(parts, self._devices, strict=True)
        ]
        for where, needed, free in [*found, ("of RAM", host, self._memory.available_bytes)]:
            if needed > free:
                yield (
                    f"about {format_bytes(needed)} {where} are needed, but {format_bytes(free)} are free; the budget is"
                    ' kept as given, and loading may fail; give less, or "auto"'
                )
