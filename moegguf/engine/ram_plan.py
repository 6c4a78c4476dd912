"""Plans RAM beside a device: slots below the device's, or those of layers whose experts the CPU computes."""

from __future__ import annotations

import math

from moegguf.controller.request_cost import allowed_ubatch
from moegguf.engine.machine import Device, Machine, Memory
from moegguf.engine.memory import F16, FIXED_BYTES, VOCAB_TOKEN_BYTES, margin_bytes, row_bytes
from moegguf.engine.plan import Budgets, Plan, Sizes, slot_bytes
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import slot_sizes
from moegguf.quantities import GIB, ExpertCache, format_bytes, format_bytes_up

VRAM_MARGIN_BYTES = GIB  # stays free with "auto": drivers, displays and other programs take some at any time


def host_bytes(layout: ExpertLayout, n_ubatch: int) -> int:
    """RAM that a model takes whose layers are all on a device: token embeddings, logits, the vocabulary, buffers, and
    biases and scales of experts, which the CPU needs where it computes misses."""
    embedding = row_bytes(F16, layout.hparams.n_embd)
    vocabulary = layout.n_vocab * (embedding + 4 * n_ubatch + VOCAB_TOKEN_BYTES)
    return vocabulary + layout.expert_row_bytes + FIXED_BYTES


def short_of_ram(n_bytes: int, memory: Memory) -> tuple[str, ...]:
    """The warning where so much RAM is not free."""
    if n_bytes <= memory.available_bytes:
        return ()
    return (
        f"about {format_bytes(n_bytes)} of RAM are needed, but {format_bytes(memory.available_bytes)} are free"
        f" (limited by {memory.limited_by}); the budget is kept as given, and the system may stop this process;"
        ' give less, or "auto"',
    )


def lower_slots(
    layout: ExpertLayout, ram: ExpertCache, memory: Memory, slot_bytes: int, n_ubatch: int, margin: int | None = None
) -> int:
    """Slots in RAM for a budget; margin: as in `Pool`. Raises BudgetError where it holds no expert at all."""
    n_total = layout.n_expert_total
    if ram.mode == "fraction":
        n_slots = math.floor(ram.fraction * n_total + 1e-9)
    elif ram.mode == "bytes":
        n_slots = ram.n_bytes // slot_bytes
    else:
        margin = margin_bytes(memory.available_bytes) if margin is None else margin
        free = memory.available_bytes - margin - host_bytes(layout, n_ubatch)
        n_slots = max(0, min(free, ram.n_bytes or free)) // slot_bytes
    if n_slots < 1:
        raise BudgetError(
            f"expert_cache={str(ram)!r} holds no expert in the {format_bytes(memory.available_bytes)} of RAM that are"
            f" free; give at least {format_bytes_up(slot_bytes)!r}."
        )
    return min(n_slots, n_total)


def divide_ram_slots(total: int, n_on_cpu: int, n_below: int, least_on_cpu: int) -> tuple[int, int]:
    """(slots of layers that the CPU computes, slots below those of devices) of `total` in RAM, in proportion to
    n_on_cpu and n_below, which are the most of each; at least least_on_cpu, and one below where there are some."""
    n_cpu = max(least_on_cpu, round(total * n_on_cpu / (n_on_cpu + n_below)))
    n_cpu = min(n_on_cpu, n_cpu, total - min(1, n_below))
    return n_cpu, min(n_below, total - n_cpu)


def expert_bytes_on(layout: ExpertLayout, device: Device, budget: ExpertCache, sizes: Sizes) -> int:
    """What a device that computes every layer has for experts within a budget, below 0 where not even everything else
    fits. sizes: without choices left."""
    free = device.free_bytes - sizes.needs(layout, sizes.most_ubatch).total_bytes(0) - VRAM_MARGIN_BYTES
    if budget.mode == "auto":
        return min(free, budget.n_bytes or free)
    if budget.mode == "bytes":
        return budget.n_bytes
    every_slot = layout.n_expert_total * slot_bytes(layout)  # more than the experts, where types differ in size
    return every_slot if budget.fraction >= 1 else round(budget.fraction * layout.expert_bytes)


def plan_layers(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    """The plan for computing everything on a device but the experts of the first layers, which the CPU computes from
    slots in RAM. Experts of as many last layers as fit lie on the device, as every other weight does.

    Raises BudgetError where the device has too little memory for what is no expert, or RAM too few experts of a token.
    """
    (device,), memory, ram = machine.devices, machine.memory, budgets.ram
    sizes = budgets.sizes.within(layout, device.free_bytes, budgets.given_vram_bytes(layout))
    whole = _last_layers(layout, expert_bytes_on(layout, device, budgets.vram[0], sizes))
    rest = layout.only(layer.il for layer in layout.layers if layer.il not in whole)
    size = slot_bytes(rest)
    n_slots = lower_slots(rest, ram, memory, size, sizes.most_ubatch, budgets.margin_bytes)
    if n_slots < rest.n_expert_used:
        raise BudgetError(
            f"expert_cache={str(ram)!r} holds {n_slots} experts, but one token needs {rest.n_expert_used} in a layer;"
            f" give at least {format_bytes_up(rest.n_expert_used * size)!r}."
        )
    streams = budgets.streams and slot_sizes(rest).streams
    allowed = allowed_ubatch(rest, n_slots, streams)
    if allowed < sizes.one_pass_tokens:
        raise BudgetError(
            f"an image takes a pass of {sizes.one_pass_tokens} tokens, but {n_slots} slots in RAM allow {allowed}; give"
            " more with expert_cache."
        )
    n_ubatch = min(sizes.most_ubatch, allowed)
    needs = sizes.needs(rest, n_ubatch)
    if needs.total_bytes(0) > device.free_bytes:
        raise BudgetError(
            f"whole layers, context and buffers take {format_bytes(needs.total_bytes(0))}, but"
            f" {format_bytes(device.free_bytes)} of {device.name}'s memory are free; give less with vram_cache, lower"
            " n_ctx (--ctx), or take placement 'cpu'."
        )
    host = host_bytes(layout, n_ubatch) + n_slots * (size + needs.slot_work_bytes)
    return Plan(
        n_slots=n_slots,
        slot_bytes=size,
        budget_bytes=n_slots * size,
        resident=n_slots == rest.n_expert_total,
        n_ctx=sizes.n_ctx or 0,
        n_ubatch=n_ubatch,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        compute_bytes=needs.compute_bytes,
        total_bytes=needs.total_bytes(0),
        available_bytes=device.free_bytes,
        reasons=(
            f"every layer is computed on {device.name}, but the experts of {len(rest.layers)} of {len(layout.layers)}"
            f" layers by the CPU; those of the other {len(whole)} lie on {device.name}",
            f"{n_slots} of {rest.n_expert_total} experts of these layers fit into RAM ({format_bytes(n_slots * size)})",
        ),
        warnings=short_of_ram(host, memory),
        projector_bytes=needs.projector_bytes,
        streams=streams,
        host_bytes=host,
        layers_on=device.name,
        kv_tokens=sizes.kv_tokens or 0,
        whole_layers=tuple(sorted(whole)),
        n_gpu_layers=-1,
    )


def _last_layers(layout: ExpertLayout, n_bytes: int) -> set[int]:
    """Numbers of the last layers with experts, without the first, whose experts fit into so many bytes."""
    found = set[int]()
    for layer in reversed(layout.layers[1:]):
        n_bytes -= layer.n_expert * layer.expert_bytes
        if n_bytes < 0:
            break
        found.add(layer.il)
    return found
