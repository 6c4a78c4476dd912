"""Plans slots on devices: which layers each computes, its slots for them, and the tensors that prompts are staged in.

RAM has slots below those of all devices together, and those of layers that are left to the CPU. Layers go to devices in
order, as llama.cpp splits a model: the last `n_gpu_layers` of it, its output counted as one, in the proportions of
`tensor_split`, or else of the memory that devices have for layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from moegguf.engine.budgets import AUTO, Budgets
from moegguf.engine.cost import ANSWER_TOKENS, PROMPT_TOKENS, request_cost
from moegguf.engine.machine import Machine, Memory
from moegguf.engine.memory import F16, row_bytes
from moegguf.engine.plan import NO_LIMIT, DevicePlan, Plan, allowed_ubatch, staging_bytes
from moegguf.engine.pool_plan import (
    VRAM_MARGIN_BYTES,
    Pool,
    cycle_warnings,
    divide_ram_slots,
    host_bytes,
    ram_slots,
    short_of,
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
    every expert has a slot; so many as `budgets` say, beside the budget in VRAM, where they fit. Sizes in `budgets`
    leave nothing to choose. Raises BudgetError, stating the minimum, where a budget is too small, OptionError for a
    split or a number of tensors that cannot be.
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
    if isinstance(without, BudgetError) or not _has_every_expert(layout, without):
        for n in range(STAGING_TENSORS, 0, -1) if wanted is None else range(wanted, max(0, wanted - 1), -1):
            staged = planned(n)
            if isinstance(staged, Plan) and (wanted is not None or _pays(layout, n, staged, without)):
                return replace(staged, reasons=(*staged.reasons, *_staging_reasons(layout, n, staged, without)))
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
    keeps_cycle = not staged.device_slots < layout.token_cycle_slots <= without.device_slots
    return keeps_cycle and _cost(layout, staged, True) < _cost(layout, without, False)


def _cost(layout: ExpertLayout, plan: Plan, is_staged: bool) -> float:
    n_slots, n_ubatch = plan.device_slots, plan.n_ubatch
    return request_cost(layout, plan.slot_bytes, n_slots, n_ubatch, prompts_take_slots=not is_staged)


def _staging_reasons(layout: ExpertLayout, n: int, staged: Plan, without: Plan | BudgetError) -> Iterator[str]:
    yield (
        f"prompts are staged in {n} tensor{'s' * (n > 1)} of a layer's experts"
        f" ({format_bytes(staged.staging_bytes)}): slots keep theirs meanwhile"
    )
    if n == 1 and isinstance(without, Plan):
        moved, otherwise = (format_bytes(round(_cost(layout, plan, plan is staged))) for plan in (staged, without))
        yield (
            f"a prompt of {PROMPT_TOKENS} tokens and an answer of {ANSWER_TOKENS} then move about {moved}, against"
            f" {otherwise} with {without.device_slots} slots, which are exact for passes of {without.n_ubatch}"
            f" token{'s' * (without.n_ubatch > 1)}"
        )


def _has_every_expert(layout: ExpertLayout, plan: Plan) -> bool:
    """Whether every device has a slot for each expert of its layers."""
    n_experts = {layer.il: layer.n_expert for layer in layout.layers}
    of_devices = [part for part in plan.devices if part.name is not None]
    return plan.resident or (
        len(of_devices) > 0
        and all(part.n_slots >= sum(n_experts.get(il, 0) for il in part.layers) for part in of_devices)
    )


class _DevicePlanner:
    """One plan with so many staging tensors on each device.

    Raises BudgetError, OptionError for a split or budgets that do not fit the devices.
    """

    def __init__(self, layout: ExpertLayout, machine: Machine, budgets: Budgets, n_staging: int) -> None:
        self._layout, self._devices, self._memory, self._budgets = layout, machine.devices, machine.memory, budgets
        vram, tensor_split, names = budgets.vram, budgets.tensor_split, ", ".join(d.name for d in machine.devices)
        n_devices, self._n_layer = len(machine.devices), count_layers(layout)
        self._is_alone = n_devices == len(vram) == 1 and not 0 <= budgets.n_gpu_layers <= self._n_layer
        if len(vram) not in (1, n_devices):
            raise BudgetError(
                f"vram_cache has {len(vram)} budgets for {n_devices} devices ({names}); give one for all of them"
                " together, or one for each."
            )
        if not self._is_alone and tensor_split is not None and len(tensor_split) != n_devices:
            raise OptionError(
                f"tensor_split has {len(tensor_split)} proportions for {n_devices} devices ({names}); give one for"
                " each."
            )
        self._n_staging, self._staging_bytes = n_staging, staging_bytes(layout, n_staging)  # of each device
        total, free = (sum(getattr(d, name) for d in machine.devices) for name in ("total_bytes", "free_bytes"))
        self._slot_tokens = min(slot_tokens(device.name) for device in machine.devices)
        self._joint = Pool(
            layout, self._joint_budget(), Memory(total, free, f"the device{'s' * (n_devices > 1)} {names}"),
            budgets.sizes, VRAM_MARGIN_BYTES * n_devices, n_staging > 0, "vram_cache", n_devices * self._staging_bytes,
            budgets.staging is None, self._slot_tokens if self._is_alone else NO_LIMIT,  # of several: `_allowed`
        ).plan()  # fmt: skip
        self._cpu_streams = budgets.streams and slot_sizes(layout).streams
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
        tensor_split, on = (None, [0] * self._n_layer) if self._is_alone else self._device_of_layers()
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
            DevicePlan(device.name, of, n_slots, self._total_bytes(of, n_slots))
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
            slot_tokens=self._slot_tokens,
            total_bytes=sum(part.total_bytes for part in parts),
            streams=self._cpu_streams if n_cpu else self._n_staging > 0,
            reasons=tuple(self._reasons([*parts, *of_cpu], n_ram)),
            warnings=tuple(self._warnings(parts, n_slots, host)),
            device=", ".join(device.name for device in self._devices),
            devices=() if self._is_alone else (*parts, *of_cpu),
            n_ram_slots=n_ram,
            host_bytes=host,
            n_staging=self._n_staging,
            staging_bytes=self._staging_bytes * sum(part.n_slots > 0 for part in parts),
            n_gpu_layers=self._budgets.n_gpu_layers,
            tensor_split=tensor_split,
        )

    def _device_of_layers(self) -> tuple[tuple[float, ...], list[int]]:
        """The tensor_split with which llama.cpp does as planned, and the device of each layer."""
        n_gpu_layers = self._budgets.n_gpu_layers
        split = self._budgets.tensor_split or tuple(map(float, self._rooms()))
        on = device_of_layers(self._n_layer, split, n_gpu_layers)
        if not any(d != ON_CPU and il in self._moe_layers for il, d in enumerate(on)):
            raise OptionError(
                f"with vram_cache devices compute layers, but n_gpu_layers is {n_gpu_layers}, which puts no layer with"
                " experts on one; give more, or leave vram_cache out."
            )
        return tuple(map(float, split)), on

    def _rooms(self) -> list[int]:
        """Memory of each device for layers, at most its budget where each has one.

        Raises BudgetError for a budget below a token's experts.
        """
        beside = VRAM_MARGIN_BYTES + self._joint.compute_bytes + self._staging_bytes
        free = [max(1, device.free_bytes - beside) for device in self._devices]
        limits = [self._limit_bytes(d) for d in range(len(self._devices))]
        for d, limit in enumerate(limits):
            if limit is not None:
                self._check_holds_a_token(limit // self._joint.slot_bytes, self._devices[d].name)
        return [n if limit is None else min(n, limit) for n, limit in zip(free, limits, strict=True)]

    def _limit_bytes(self, d: int) -> int | None:
        """The budget of a device for slots; None where it has none of its own, but what is free or a part of one."""
        cache = self._budgets.vram_of(d)
        if cache.mode == "auto":
            return cache.n_bytes or None
        if len(self._budgets.vram) == 1:
            return None
        share = math.floor(cache.fraction * self._layout.n_expert_total + 1e-9) * self._joint.slot_bytes
        n_bytes = cache.n_bytes or share
        return max(0, n_bytes - self._staging_bytes) if self._budgets.staging is None else n_bytes

    def _experts_of(self, layers: Sequence[int]) -> int:
        return sum(self._moe_layers[il].n_expert for il in layers if il in self._moe_layers)

    def _total_bytes(self, layers: Sequence[int], n_slots: int) -> int:
        if self._is_alone:
            return self._joint.total_bytes
        return self._beside_bytes(layers) + n_slots * self._joint.slot_bytes

    def _beside_bytes(self, layers: Sequence[int]) -> int:
        """What a device with these layers holds beside slots."""
        output = self._output_bytes if self._n_layer - 1 in layers else 0
        staged = self._staging_bytes if self._experts_of(layers) else 0
        return self._bytes_of(layers) + output + self._joint.compute_bytes + staged

    def _bytes_of(self, layers: Iterable[int]) -> int:
        return sum(self._layer_bytes[il] for il in layers)

    def _slots(self, layers: Sequence[Sequence[int]]) -> list[int]:
        """Slots of each device, with these layers."""
        if self._is_alone:
            return [self._joint.n_slots]
        size, most = self._joint.slot_bytes, [self._experts_of(of) for of in layers]
        left = [d.free_bytes - self._beside_bytes(of) for d, of in zip(self._devices, layers, strict=True)]
        if len(self._budgets.vram) == 1 and self._budgets.vram[0].mode != "auto":
            return self._shared_slots(most, left)
        slots = []
        for d, n in enumerate(most):
            limit, free = self._limit_bytes(d), max(0, left[d] - VRAM_MARGIN_BYTES)
            if limit is None or self._budgets.vram_of(d).mode == "auto":
                limit = min(free, limit or free)
            slots.append(min(n, limit // size))
        return slots

    def _shared_slots(self, most: Sequence[int], left: Sequence[int]) -> list[int]:
        """Slots of one budget for all devices, by their experts: what the memory of one does not hold goes to the
        others."""
        size, least, total = self._joint.slot_bytes, self._layout.n_expert_used, min(self._joint.n_slots, sum(most))
        held = [min(n, max(least, n_bytes // size)) for n, n_bytes in zip(most, left, strict=True)]
        within = share_out(total, most, held, least)
        return within if sum(within) >= total else share_out(total, most, most, least)

    def _allowed(self, n_slots: int, device: str | None, n_experts: int) -> int:
        """Tokens of a pass on a device, or on the CPU, whose layers have so many experts.

        Raises BudgetError for fewer slots than a token needs.
        """
        self._check_holds_a_token(n_slots, device)
        if n_slots >= n_experts:
            return NO_LIMIT
        streams = self._cpu_streams if device is None else self._n_staging > 0
        return allowed_ubatch(self._layout, n_slots, streams, slot_tokens(device))

    def _check_holds_a_token(self, n_slots: int, device: str | None) -> None:
        least = self._layout.n_expert_used
        if n_slots < least:
            option, where = ("vram_cache", device) if device else ("expert_cache", "the CPU")
            raise BudgetError(
                f"{option} holds {n_slots} experts on {where}, but a token needs {least} of each of its layers; give at"
                f" least {format_bytes_up(least * self._joint.slot_bytes)!r} for {where}, or other layers"
                " (tensor_split, n_gpu_layers)."
            )

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
        elif len(parts) == len(self._devices):
            yield "every expert has a slot on a device: none is kept in RAM"

    def _warnings(self, parts: Sequence[DevicePlan], n_slots: int, host: int) -> Iterator[str]:
        yield from cycle_warnings(self._layout, n_slots, self._joint.slot_bytes)
        for part, device in zip(parts, self._devices, strict=True):
            yield from short_of(part.total_bytes, device.memory, f" on {device.name}")
        yield from short_of(host, self._memory, " of RAM")
