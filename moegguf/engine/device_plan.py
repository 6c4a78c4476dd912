"""Plans slots on devices: which layers each computes, its slots for them, and the tensors that prompts are staged in.

RAM has slots below those of all devices together, and those of layers that are left to the CPU. Layers go to devices in
order, as llama.cpp splits a model: the last `n_gpu_layers` of it, its output counted as one, in the proportions of
`tensor_split`, or else of the memory that devices have for layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from moegguf.engine.cost import request_cost
from moegguf.engine.machine import Machine, Memory
from moegguf.engine.memory import F16, row_bytes
from moegguf.engine.plan import AUTO, NO_LIMIT, Budgets, DevicePlan, Plan, allowed_ubatch, staging_bytes
from moegguf.engine.pool_plan import (
    VRAM_MARGIN_BYTES,
    Pool,
    budget_slots,
    cycle_warnings,
    divide_ram_slots,
    host_bytes,
    ram_slots,
    short_of,
    too_few,
)
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import padded, slot_sizes, slot_tokens
from moegguf.native.store import STAGING_SHARE, STAGING_TENSORS
from moegguf.quantities import ExpertCache, format_bytes, format_bytes_up

ON_CPU = -1


def device_of_layers(n_layer: int, tensor_split: Sequence[float], n_gpu_layers: int = -1) -> list[int]:
    """The index of the device that computes each layer, ON_CPU for none (llama-model.cpp, load_tensors).

    n_layer: those that llama.cpp counts. n_gpu_layers: -1 is every layer and the output. Raises OptionError for a split
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


def count_layers(layout: ExpertLayout) -> int:
    """Layers that llama.cpp counts in `n_gpu_layers`, those of multi-token prediction too; without the output."""
    n_layer = layout.metadata.get(f"{layout.arch}.block_count", layout.n_layer)
    return n_layer if isinstance(n_layer, int) else layout.n_layer


def share_out(total: int, shares: Sequence[int], most: Sequence[int], least: int) -> list[int]:
    """`total` slots of several devices in proportion to `shares`, none with more than its `most`, and none with fewer
    than `least`, where it can have as many and there are; what is over goes to the others."""
    least = min(least, total // max(1, sum(of > 0 for of in most)))
    given = [min(of, least) for of in most]
    while (left := total - sum(given)) > 0 and (free := [d for d in range(len(most)) if given[d] < most[d]]):
        weight = sum(shares[d] for d in free)
        more = {d: min(most[d] - given[d], left * shares[d] // weight if weight else 0) for d in free}
        if not any(more.values()):
            more = {free[0]: 1}
        for d, n in more.items():
            given[d] += n
    return given


def plan_slots(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    """The plan with slots on the machine's devices, and others below them in RAM. Weights that every token uses, the
    context, the buffers of a pass and staging tensors are on the devices, too.

    Of STAGING_TENSORS, 1 and no staging tensors on each device it has the most that fit and pay (`_pays`), none where
    every expert has a slot; so many as `budgets` say, beside the budget in VRAM, where they fit. Raises BudgetError,
    stating the minimum, where a budget is too small, OptionError for a split or a number of tensors that cannot be.
    """
    wanted = budgets.staging
    if wanted is not None and not 0 <= wanted <= STAGING_TENSORS:
        raise OptionError(f"staging is {wanted}, but prompts are staged in at most {STAGING_TENSORS} tensors.")
    layout = padded(layout, [device.name for device in machine.devices])

    def planned(n_staging: int) -> Plan | BudgetError:
        try:
            return _DevicePlanner(layout, machine, budgets, n_staging).plan()
        except BudgetError as error:  # without staging also where an image takes a pass of more tokens than have slots
            return error

    without = planned(0)
    if isinstance(without, BudgetError) or without.n_ram_slots:  # some expert has no slot on a device
        for n in range(STAGING_TENSORS, 0, -1) if wanted is None else (wanted,) * (wanted > 0):
            staged = planned(n)
            if isinstance(staged, Plan) and (wanted is not None or _pays(layout, n, staged, without)):
                reason = (
                    f"prompts are staged in {n} tensor{'s' * (n > 1)} of a layer's experts"
                    f" ({format_bytes(staged.staging_bytes)}): slots keep theirs meanwhile"
                )
                return replace(staged, reasons=(*staged.reasons, reason))
    if isinstance(without, BudgetError):
        raise without
    return without


def _pays(layout: ExpertLayout, n: int, staged: Plan, without: Plan | BudgetError) -> bool:
    """Whether prompts are to be staged in n tensors: several within STAGING_SHARE of the memory for experts; one where
    a typical request costs less so than with prompts in passes that slots are exact for, and a token's experts over all
    layers keep their slots where there are as many without."""
    if staged.total_bytes > staged.available_bytes:
        return False
    if n > 1:
        n_bytes = staged.staging_bytes
        return n_bytes <= STAGING_SHARE * (n_bytes + staged.device_slots * staged.slot_bytes)
    if isinstance(without, BudgetError):
        return True
    if staged.device_slots < layout.token_cycle_slots <= without.device_slots:
        return False
    cost, otherwise = (
        request_cost(layout, plan.slot_bytes, plan.device_slots, plan.n_ubatch, prompts_take_slots=plan is without)
        for plan in (staged, without)
    )
    return cost < otherwise


class _DevicePlanner:
    """One plan with so many staging tensors on each device.

    Raises BudgetError, OptionError for a split or budgets that do not fit the devices.
    """

    def __init__(self, layout: ExpertLayout, machine: Machine, budgets: Budgets, n_staging: int) -> None:
        self._layout, self._devices, self._memory, self._budgets = layout, machine.devices, machine.memory, budgets
        vram, n_devices, self._n_layer = budgets.vram, len(machine.devices), count_layers(layout)
        self._names = ", ".join(device.name for device in machine.devices)
        self._is_alone = n_devices == len(vram) == 1 and not 0 <= budgets.n_gpu_layers <= self._n_layer
        if len(vram) not in (1, n_devices):
            raise BudgetError(
                f"vram_cache has {len(vram)} budgets for {n_devices} devices ({self._names}); give one for all of them"
                " together, or one for each."
            )
        if not self._is_alone and budgets.tensor_split is not None and len(budgets.tensor_split) != n_devices:
            raise OptionError(
                f"tensor_split has {len(budgets.tensor_split)} proportions for {n_devices} devices ({self._names});"
                " give one for each."
            )
        joint_budget = vram[0]
        if len(vram) > 1:
            given = sum(cache.n_bytes or round(cache.fraction * layout.expert_bytes) for cache in vram)
            has_auto = any(cache.mode == "auto" for cache in vram)
            joint_budget = AUTO if has_auto else ExpertCache("bytes", n_bytes=given)
        self._is_shared = len(vram) == 1 and vram[0].mode != "auto"  # a budget for all devices together
        self._n_staging, self._staging_bytes = n_staging, staging_bytes(layout, n_staging)  # of each device
        total, free = (sum(getattr(d, name) for d in machine.devices) for name in ("total_bytes", "free_bytes"))
        self._slot_tokens = min(slot_tokens(device.name) for device in machine.devices)
        self._joint = Pool(
            layout, joint_budget, Memory(total, free, f"the device{'s' * (n_devices > 1)} {self._names}"),
            budgets.sizes, VRAM_MARGIN_BYTES * n_devices, n_staging > 0, "vram_cache", n_devices * self._staging_bytes,
            budgets.staging is None, self._slot_tokens if self._is_alone else NO_LIMIT,  # of several: `_allowed`
        ).plan()  # fmt: skip
        self._slot_bytes = self._joint.slot_bytes
        self._cpu_streams = budgets.streams and slot_sizes(layout).streams
        counts = {layer.il: layer.n_expert for layer in layout.layers}
        self._n_experts = [counts.get(il, 0) for il in range(self._n_layer)]
        embedding_bytes = layout.n_vocab * row_bytes(F16, layout.hparams.n_embd)
        self._output_bytes = min(self._joint.dense_bytes, max(layout.tied_output_bytes, embedding_bytes))
        self._layer_bytes = self._bytes_by_layer()

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
        """The plan. Lists of parts have the CPU's last."""
        joint, size, names = self._joint, self._slot_bytes, [*(device.name for device in self._devices), None]
        tensor_split, on = (None, [0] * self._n_layer) if self._is_alone else self._device_of_layers()
        order = (*range(len(self._devices)), ON_CPU)
        layers = [tuple(il for il, d in enumerate(on) if d == index) for index in order]
        counts, on_cpu = [self._experts_of(of) for of in layers], layers[-1]
        slots = [joint.n_slots] if self._is_alone else self._slots(layers[:-1])
        below = sum(n for n, n_slots in zip(counts, slots, strict=False) if n_slots < n)
        n_cpu, n_ram = self._ram_slots(on_cpu, counts[-1], below)
        slots.append(n_cpu)
        allowed = [self._allowed(*part) for part in zip(slots, names, counts, strict=True) if part[-1]]
        n_ubatch = min(joint.n_ubatch, *allowed)
        host = host_bytes(self._layout, n_ubatch) + (n_ram + n_cpu) * size + self._bytes_of(on_cpu)
        on_devices = [self._beside_bytes(of) + n * size for of, n in zip(layers, slots[:-1], strict=False)]
        if self._is_alone:
            on_devices = [joint.total_bytes]
        parts = [
            DevicePlan(*part)
            for part in zip(names, layers, slots, (*on_devices, host - n_ram * size), strict=True)
            if part[0] or n_cpu
        ]
        n_slots = sum(slots)
        warnings = [*cycle_warnings(self._layout, n_slots, size), *short_of(host, self._memory, " of RAM")]
        for device, n_bytes in zip(self._devices, on_devices, strict=True):
            warnings += short_of(n_bytes, device.memory, f" on {device.name}")
        return replace(
            joint,
            n_slots=n_slots,
            budget_bytes=n_slots * size,
            resident=n_slots == self._layout.n_expert_total,
            n_ubatch=n_ubatch,
            slot_tokens=self._slot_tokens,
            total_bytes=sum(on_devices),
            streams=self._cpu_streams if n_cpu else self._n_staging > 0,
            reasons=(*joint.reasons[:-1], *self._reasons(parts, n_ram)),
            warnings=tuple(warnings),
            device=self._names,
            devices=() if self._is_alone else tuple(parts),
            n_ram_slots=n_ram,
            host_bytes=host,
            n_staging=self._n_staging,
            staging_bytes=self._staging_bytes * sum(n > 0 for n in slots[:-1]),
            n_gpu_layers=self._budgets.n_gpu_layers,
            tensor_split=tensor_split,
        )

    def _device_of_layers(self) -> tuple[tuple[float, ...], list[int]]:
        """The tensor_split with which llama.cpp does as planned, given or by the memory that devices have for layers,
        and the device of each layer."""
        n_gpu_layers, rooms = self._budgets.n_gpu_layers, list[int]()
        beside = VRAM_MARGIN_BYTES + self._joint.compute_bytes + self._staging_bytes
        for d, device in enumerate(self._devices):
            free = max(1, device.free_bytes - beside)
            rooms.append(min(free, self._slots_bytes(d, free)))
        split = tuple(map(float, self._budgets.tensor_split or rooms))
        on = device_of_layers(self._n_layer, split, n_gpu_layers)
        if not any(d != ON_CPU and n for d, n in zip(on, self._n_experts, strict=True)):
            raise OptionError(
                f"with vram_cache devices compute layers, but n_gpu_layers is {n_gpu_layers}, which puts no layer with"
                " experts on one; give more, or leave vram_cache out."
            )
        return split, on

    def _slots_bytes(self, d: int, free_bytes: int) -> int:
        """What a device has for slots: its own budget, or what is free there."""
        vram, size = self._budgets.vram, self._slot_bytes
        cache = vram[0] if len(vram) == 1 else vram[d]
        if self._is_shared:
            return free_bytes
        if cache.mode == "auto":
            return min(free_bytes, cache.n_bytes or free_bytes)
        n_bytes = cache.n_bytes or budget_slots(cache, self._layout, size) * size
        return max(0, n_bytes - self._staging_bytes) if self._budgets.staging is None else n_bytes

    def _experts_of(self, layers: Iterable[int]) -> int:
        return sum(self._n_experts[il] for il in layers)

    def _bytes_of(self, layers: Iterable[int]) -> int:
        return sum(self._layer_bytes[il] for il in layers)

    def _beside_bytes(self, layers: Sequence[int]) -> int:
        """What a device with these layers holds beside slots."""
        output = self._output_bytes if self._n_layer - 1 in layers else 0
        staged = self._staging_bytes if self._experts_of(layers) else 0
        return self._bytes_of(layers) + output + self._joint.compute_bytes + staged

    def _slots(self, layers: Sequence[Sequence[int]]) -> list[int]:
        """Slots of each device, with these layers. Of one budget for all, what the memory of one does not hold goes to
        the others."""
        size, least, most = self._slot_bytes, self._layout.n_expert_used, [self._experts_of(of) for of in layers]
        left = [d.free_bytes - self._beside_bytes(of) for d, of in zip(self._devices, layers, strict=True)]
        if not self._is_shared:
            own = (self._slots_bytes(d, max(0, free - VRAM_MARGIN_BYTES)) // size for d, free in enumerate(left))
            return [min(pair) for pair in zip(most, own, strict=True)]
        total = min(self._joint.n_slots, sum(most))
        held = [min(n, max(least, n_bytes // size)) for n, n_bytes in zip(most, left, strict=True)]
        return share_out(total, most, held if sum(held) >= total else most, least)

    def _allowed(self, n_slots: int, device: str | None, n_experts: int) -> int:
        """Tokens of a pass on a device, or on the CPU, whose layers have so many experts.

        Raises BudgetError for fewer slots than a token needs.
        """
        least = self._layout.n_expert_used
        if n_slots < least:
            option, where = ("vram_cache", device) if device else ("expert_cache", "the CPU")
            raise too_few(option, n_slots, least, self._slot_bytes, f" on {where}")
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
        total = ram_slots(self._layout, self._budgets, memory, self._slot_bytes, self._joint.n_ubatch)
        total = min(total, n_on_cpu + n_below)
        least_cpu, least_below = min(n_on_cpu, self._layout.n_expert_used), min(1, n_below)
        if total < least_cpu + least_below:
            least = format_bytes_up((least_cpu + least_below) * self._slot_bytes)
            raise BudgetError(
                f"expert_cache={str(self._budgets.ram)!r} holds {total} experts, but {len(cpu_layers)} layers are"
                f" computed by the CPU; give at least {least!r}, or put more layers on devices (n_gpu_layers)."
            )
        return divide_ram_slots(total, n_on_cpu, n_below, least_cpu)

    def _reasons(self, parts: Iterable[DevicePlan], n_ram: int) -> Iterator[str]:
        for part in parts:
            if part.layers:
                yield (
                    f"{len(part.layers)} layers ({part.layers[0]} to {part.layers[-1]}) are computed on"
                    f" {part.name or 'the CPU'}, with slots for {part.n_slots} of their"
                    f" {self._experts_of(part.layers)} experts ({format_bytes(part.n_slots * self._slot_bytes)})"
                )
        if n_ram:
            yield f"{n_ram} experts ({format_bytes(n_ram * self._slot_bytes)}) fit into RAM below the devices"
        elif all(part.name for part in parts):
            yield "every expert has a slot on a device: none is kept in RAM"
