"""Plans a model over several devices: which layers each computes, its slots for their experts, and RAM for the rest.

RAM has slots below those of all devices together, and those of layers that are left to the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moegguf.controller.layer_split import ON_CPU, device_of_layers, share_out
from moegguf.controller.request_cost import NO_LIMIT, allowed_ubatch, staging_bytes
from moegguf.engine.device_split import DeviceRoom, LayerBytes, count_layers, split_layers, tensor_split_for
from moegguf.engine.devices import Device
from moegguf.engine.machine import Memory
from moegguf.engine.memory import F16, row_bytes
from moegguf.engine.plan import DevicePlan, Plan, make_plan
from moegguf.engine.tiers import VRAM_MARGIN_BYTES, host_bytes, lower_slots, plan_tiers, with_best_staging
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import slot_sizes, slot_tokens
from moegguf.quantities import ExpertCache, format_bytes, format_bytes_up


@dataclass(frozen=True)
class SplitOptions:
    """How a user splits a model over devices. n_gpu_layers, tensor_split: as llama.cpp's; None: layers are split here
    (`device_split.split_layers`). staging: tensors of each device, as in `tiers.with_best_staging`. streams: of the
    CPU's layers, as in `make_plan`."""

    n_gpu_layers: int = -1
    tensor_split: Sequence[float] | None = None
    staging: int | None = None
    streams: bool = True


def plan_devices(
    layout: ExpertLayout,
    vram: Sequence[ExpertCache],
    ram: ExpertCache,
    devices: Sequence[Device],
    memory: Memory,
    split: SplitOptions = SplitOptions(),
    **options: Any,
) -> tuple[Plan, list[float] | None]:
    """(the plan for running `layout` on these devices, the tensor_split with which llama.cpp does as it says).

    vram: slots of all devices together, or of each. ram: slots below them, and those of layers that the CPU computes.
    Every device has weights, context and buffers of its own layers. One device that computes every layer is planned as
    the CPU is, and has no tensor_split. options: those of `make_plan`. Raises BudgetError where a budget is too small,
    OptionError for a split that does not fit the devices.
    """
    if len(devices) == len(vram) == 1 and not 0 <= split.n_gpu_layers <= count_layers(layout):
        return plan_tiers(layout, vram[0], ram, devices[0], memory, **options), None
    planners = dict[int, _DevicePlanner]()

    def on_devices(n_staging: int) -> Plan:
        planners[n_staging] = _DevicePlanner(layout, vram, ram, devices, memory, split, options, n_staging)
        return planners[n_staging].plan()

    plan = with_best_staging(layout, on_devices, split.staging)
    return plan, planners[plan.n_staging].tensor_split


class _DevicePlanner:
    def __init__(
        self,
        layout: ExpertLayout,
        vram: Sequence[ExpertCache],
        ram: ExpertCache,
        devices: Sequence[Device],
        memory: Memory,
        split: SplitOptions,
        options: dict[str, Any],
        n_staging: int,
    ) -> None:
        self.layout, self.vram, self.ram, self.devices, self.memory, self.split = (
            layout,
            vram,
            ram,
            devices,
            memory,
            split,
        )
        if len(vram) not in (1, len(devices)):
            raise BudgetError(
                f"vram_cache has {len(vram)} budgets for {len(devices)} devices ({_names(devices)}); give one for all"
                " of them together, or one for each."
            )
        if split.tensor_split is not None and len(split.tensor_split) != len(devices):
            raise OptionError(
                f"tensor_split has {len(split.tensor_split)} proportions for {len(devices)} devices"
                f" ({_names(devices)}); give one for each."
            )
        self.n_staging = n_staging
        self.staging_bytes = staging_bytes(layout, n_staging)  # of each device
        self.joint = make_plan(
            layout, self._joint_budget(), self._joint_memory(), margin=VRAM_MARGIN_BYTES * len(devices),
            option="vram_cache", streams=False, staged_bytes=len(devices) * self.staging_bytes,
            staging_within=split.staging is None, **options,
        )  # fmt: skip
        self.cpu_streams = split.streams and slot_sizes(layout).streams
        self.n_layer = count_layers(layout)
        self.moe_layers = {layer.il: layer for layer in layout.layers}
        self.n_experts = {il: layer.n_expert for il, layer in self.moe_layers.items()}
        embedding_bytes = layout.n_vocab * row_bytes(F16, layout.hparams.n_embd)
        self.output_bytes = min(self.joint.dense_bytes, max(layout.tied_output_bytes, embedding_bytes))
        self.layer_bytes = self._layer_bytes()

    def _layer_bytes(self) -> list[int]:
        """Of each layer: its own weights but experts, its part of the KV cache, and of what belongs to none."""
        layout, joint, n_layer = self.layout, self.joint, self.n_layer
        own = [layout.layer_dense_bytes.get(il, 0) for il in range(n_layer)]
        heads = [*layout.hparams.n_head_kv[:n_layer], *([0] * n_layer)][:n_layer]
        heads = heads if any(heads) else [1] * n_layer
        rest = max(0, joint.dense_bytes - self.output_bytes - sum(own))
        return [
            dense + -(-joint.kv_bytes * n // sum(heads)) + -(-rest // n_layer)
            for dense, n in zip(own, heads, strict=True)
        ]

    def _joint_memory(self) -> Memory:
        total, free = (
            sum(getattr(d.memory, name) for d in self.devices) for name in ("total_bytes", "available_bytes")
        )
        return Memory(total, free, f"the devices {_names(self.devices)}")

    def _joint_budget(self) -> ExpertCache:
        if len(self.vram) == 1:
            return self.vram[0]
        if any(cache.mode == "auto" for cache in self.vram):
            return ExpertCache("auto")
        given = sum(cache.n_bytes or round(cache.fraction * self.layout.expert_bytes) for cache in self.vram)
        return ExpertCache("bytes", n_bytes=given)

    def plan(self) -> Plan:
        on = self._device_of_layers()
        layers = [[il for il, d in enumerate(on) if d == index] for index in range(len(self.devices))]
        used = [index for index, of in enumerate(layers) if self._experts_of(of)]
        slots = self._slots(layers)
        cpu_layers = tuple(il for il, d in enumerate(on) if d == ON_CPU)
        n_on_cpu = sum(self.n_experts.get(il, 0) for il in cpu_layers)
        below = sum(self._experts_of(layers[d]) for d in used if slots[d] < self._experts_of(layers[d]))
        n_cpu, n_lower = self._ram_slots(cpu_layers, n_on_cpu, below)
        of_devices = (self._allowed(slots[d], self.devices[d].name, self._experts_of(layers[d])) for d in used)
        n_ubatch = min(self.joint.n_ubatch, *of_devices)
        if n_cpu:
            n_ubatch = min(n_ubatch, self._allowed(n_cpu, None, n_on_cpu))
        size = self.joint.slot_bytes
        parts = [
            DevicePlan(device.name, tuple(layers[d]), slots[d], self._beside_bytes(layers[d]) + slots[d] * size)
            for d, device in enumerate(self.devices)
        ]
        host = host_bytes(self.layout, n_ubatch) + (n_lower + n_cpu) * size + self._bytes_of(cpu_layers)
        if n_cpu:
            parts.append(DevicePlan(None, cpu_layers, n_cpu, host - n_lower * size))
        n_slots = sum(part.n_slots for part in parts)
        on_devices = [part for part in parts if part.name]
        return replace(
            self.joint,
            n_slots=n_slots,
            budget_bytes=n_slots * size,
            resident=n_slots == self.layout.n_expert_total,
            n_ubatch=n_ubatch,
            slot_tokens=min(slot_tokens(self.devices[d].name) for d in used),
            total_bytes=sum(part.total_bytes for part in on_devices),
            streams=self.cpu_streams if n_cpu else self.n_staging > 0,
            reasons=tuple(self._reasons(parts, n_lower)),
            warnings=tuple(self._warnings(on_devices, host)),
            device=", ".join(part.name for part in on_devices if part.name),
            devices=tuple(parts),
            n_lower_slots=n_lower,
            host_bytes=host,
            staging_bytes=self.staging_bytes * len([part for part in on_devices if part.n_slots]),
        )

    def _device_of_layers(self) -> list[int]:
        given, n_gpu_layers = self.split.tensor_split, self.split.n_gpu_layers
        if given is None:
            n_on_devices = self.n_layer if n_gpu_layers < 0 else min(n_gpu_layers - 1, self.n_layer)
            if n_on_devices < 1:
                raise OptionError(
                    f"with vram_cache devices compute layers, but n_gpu_layers is {n_gpu_layers}, which is none beside"
                    " the output; give more, or leave vram_cache out."
                )
            try:
                layers = [self._layer(il) for il in range(self.n_layer - n_on_devices, self.n_layer)]
                given = tensor_split_for(split_layers(layers, self._rooms()))
            except BudgetError as error:
                raise BudgetError(f"vram_cache={','.join(map(str, self.vram))!r} {error}") from None
        self.tensor_split = [float(share) for share in given]
        on = device_of_layers(self.n_layer, given, n_gpu_layers)
        if not any(d != ON_CPU and il in self.n_experts for il, d in enumerate(on)):
            raise OptionError(
                f"with vram_cache devices compute layers, but n_gpu_layers={n_gpu_layers} puts no layer with experts on"
                " one; give more, or leave vram_cache out."
            )
        return on

    def _layer(self, il: int) -> LayerBytes:
        size, layer = self.joint.slot_bytes, self.moe_layers.get(il)
        dense_bytes = self.layer_bytes[il] + (self.output_bytes if il == self.n_layer - 1 else 0)
        if layer is None:
            return LayerBytes(dense_bytes, 0, 0)
        return LayerBytes(dense_bytes, layer.n_expert * size, layer.n_expert_used * size)

    def _rooms(self) -> list[DeviceRoom]:
        rooms = []
        for d, device in enumerate(self.devices):
            # A budget that was given is kept: it may take what "auto" leaves free.
            auto = self.vram[d if len(self.vram) > 1 else 0].mode == "auto"
            rooms.append(DeviceRoom(self._free_bytes(device) if auto else device.free_bytes, self._limit_bytes(d)))
        return rooms

    def _free_bytes(self, device: Device) -> int:
        """For layers, with "auto"."""
        return max(0, device.free_bytes - VRAM_MARGIN_BYTES - self.joint.compute_bytes - self.staging_bytes)

    def _limit_bytes(self, d: int) -> int | None:
        """The budget for slots on a device; its part, by free memory, of one for all. None: what is free."""
        cache = self.vram[d if len(self.vram) > 1 else 0]
        if cache.mode == "auto":
            return cache.n_bytes or None
        n_bytes = (
            cache.n_bytes or math.floor(cache.fraction * self.layout.n_expert_total + 1e-9) * self.joint.slot_bytes
        )
        if len(self.vram) > 1:
            return max(0, n_bytes - self.staging_bytes) if self.split.staging is None else n_bytes
        free = [max(1, self._free_bytes(device)) for device in self.devices]
        return n_bytes * free[d] // sum(free)

    def _experts_of(self, layers: Sequence[int]) -> int:
        return sum(self.n_experts.get(il, 0) for il in layers)

    def _beside_bytes(self, layers: Sequence[int]) -> int:
        """What a device with these layers holds beside slots."""
        output = self.output_bytes if self.n_layer - 1 in layers else 0
        staged = self.staging_bytes if self._experts_of(layers) else 0
        return self._bytes_of(layers) + output + self.joint.compute_bytes + staged

    def _bytes_of(self, layers: Iterable[int]) -> int:
        return sum(self.layer_bytes[il] for il in layers)

    def _slots(self, layers: Sequence[Sequence[int]]) -> list[int]:
        """Of each device. What its layers do not need, or its memory does not hold, of one budget for all goes to the
        others."""
        size, most = self.joint.slot_bytes, [self._experts_of(of) for of in layers]
        if self.vram[0].mode != "auto" and len(self.vram) == 1:
            total = min(self.joint.n_slots, sum(most))
            shares = (
                most
                if self.split.tensor_split is not None
                else [(self._limit_bytes(d) or 0) if most[d] else 0 for d in range(len(layers))]
            )
            least = self.layout.n_expert_used
            left = [device.free_bytes - self._beside_bytes(of) for device, of in zip(self.devices, layers, strict=True)]
            held = [min(n, max(least, n_bytes // size)) for n, n_bytes in zip(most, left, strict=True)]
            within = share_out(total, shares, held, least)
            return within if sum(within) >= total else share_out(total, shares, most, least)
        slots = []
        for d, device in enumerate(self.devices):
            limit = self._limit_bytes(d)
            cache = self.vram[d if len(self.vram) > 1 else 0]
            free = device.free_bytes - VRAM_MARGIN_BYTES - self._beside_bytes(layers[d])
            if limit is None or cache.mode == "auto":
                limit = min(max(0, free), limit or max(0, free))
            slots.append(min(most[d], limit // size))
        return slots

    def _allowed(self, n_slots: int, device: str | None, n_experts: int) -> int:
        """Tokens of a pass on a device, or on the CPU, whose layers have so many experts.

        Raises BudgetError for fewer slots than a token needs.
        """
        least = self.layout.n_expert_used
        if n_slots < least:
            option, where = ("vram_cache", device) if device else ("expert_cache", "the CPU")
            raise BudgetError(
                f"{option} holds {n_slots} experts on {where}, but a token needs {least} of each of its layers; give at"
                f" least {format_bytes_up(least * self.joint.slot_bytes)!r} for {where}, or other layers (tensor_split,"
                " n_gpu_layers)."
            )
        if n_slots >= n_experts:
            return NO_LIMIT
        streams = self.cpu_streams if device is None else self.n_staging > 0
        return allowed_ubatch(self.layout, n_slots, streams, slot_tokens(device))

    def _ram_slots(self, cpu_layers: Sequence[int], n_on_cpu: int, n_below: int) -> tuple[int, int]:
        """(slots of the layers that the CPU computes, slots below those of devices): in proportion to their experts.

        Raises BudgetError where there are too few.
        """
        if n_on_cpu + n_below == 0:
            return 0, 0
        taken = self._bytes_of(cpu_layers) + (self.joint.compute_bytes if n_on_cpu else 0)
        memory = replace(self.memory, available_bytes=max(0, self.memory.available_bytes - taken))
        total = lower_slots(self.layout, self.ram, memory, self.joint.slot_bytes, self.joint.n_ubatch)
        total = min(total, n_on_cpu + n_below)
        least_cpu, least_below = min(n_on_cpu, self.layout.n_expert_used), min(1, n_below)
        if total < least_cpu + least_below:
            least = format_bytes_up((least_cpu + least_below) * self.joint.slot_bytes)
            raise BudgetError(
                f"expert_cache={str(self.ram)!r} holds {total} experts in RAM, but {len(cpu_layers)} layers are"
                f" computed by the CPU; give at least {least!r}, or put more layers on devices (n_gpu_layers)."
            )
        return divide_ram_slots(total, n_on_cpu, n_below, least_cpu)

    def _reasons(self, parts: Sequence[DevicePlan], n_lower: int) -> Sequence[str]:
        size, reasons = self.joint.slot_bytes, list(self.joint.reasons[:-1])
        for part in filter(lambda part: part.layers, parts):
            n_experts = self._experts_of(part.layers)
            reasons.append(
                f"{len(part.layers)} layers ({part.layers[0]} to {part.layers[-1]}) are computed on"
                f" {part.name or 'the CPU'}, with slots for {part.n_slots} of their {n_experts} experts"
                f" ({format_bytes(part.n_slots * size)})"
            )
        if n_lower:
            reasons.append(f"{n_lower} experts ({format_bytes(n_lower * size)}) fit into RAM below the devices")
        return reasons

    def _warnings(self, parts: Sequence[DevicePlan], host: int) -> Sequence[str]:
        free = {device.name: device.free_bytes for device in self.devices}
        found = [(f"on {part.name}", part.total_bytes, free[part.name or ""]) for part in parts]
        found.append(("of RAM", host, self.memory.available_bytes))
        return [
            f"about {format_bytes(needed)} {where} are needed, but {format_bytes(there)} are free; the budget is kept"
            ' as given, and loading may fail; give less, or "auto"'
            for where, needed, there in found
            if needed > there
        ]


def divide_ram_slots(total: int, n_on_cpu: int, n_below: int, least_on_cpu: int) -> tuple[int, int]:
    """(slots of layers that the CPU computes, slots below those of devices) of `total` in RAM, in proportion to
    n_on_cpu and n_below, which are the most of each; at least least_on_cpu, and one below where there are some."""
    n_cpu = max(least_on_cpu, round(total * n_on_cpu / (n_on_cpu + n_below)))
    n_cpu = min(n_on_cpu, n_cpu, total - min(1, n_below))
    return n_cpu, min(n_below, total - n_cpu)


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)
