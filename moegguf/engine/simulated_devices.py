"""Simulated devices for `trace simulate`: a plan divides a budget among devices with
unlimited memory."""

from __future__ import annotations

from collections.abc import Sequence

from moegguf.controller.shape import MoeShape
from moegguf.engine.load_spec import Budgets, LoadSpec
from moegguf.engine.machine import Device, Machine, Memory
from moegguf.engine.memory import Sizes
from moegguf.engine.plan import slot_bytes
from moegguf.engine.solver import Task, plan_slots
from moegguf.errors import OptionError
from moegguf.native.store import DeviceSlots, StoreOptions
from moegguf.quantities import ExpertCache, Link, parse_link
from moegguf.trace.simulate import SIMULATED, layout_of, slots_of

_ENOUGH_BYTES = 1 << 60


def simulated_budgets(
    shape: MoeShape,
    shares: Sequence[float],
    tensor_split: Sequence[float],
    device_links: Sequence[str],
) -> dict[float, tuple[DeviceSlots, ...]]:
    """Returns {share of the experts in VRAM: devices}. Without a tensor_split, each of
    `shares` is a separate budget for one device. With a tensor_split, several devices
    together get all of `shares` (`devices_of`), and the only key is the sum of
    `shares`. device_links: links as the user writes them. Raises the same errors as
    `devices_of`."""
    links = [parse_link(text) for text in device_links]
    if not tensor_split:
        if len(links) > 1:
            raise OptionError(
                f"--device-link is given {len(links)} times, but without --tensor-split there is one GPU; give one"
                " link, or add --tensor-split."
            )
        return {share: devices_of(shape, (share,), (1.0,), links) for share in shares}
    return {sum(shares): devices_of(shape, shares, tensor_split, links)}


def devices_of(
    shape: MoeShape,
    shares: Sequence[float],
    tensor_split: Sequence[float],
    links: Sequence[Link],
) -> tuple[DeviceSlots, ...]:
    """Returns simulated devices with slots and staging tensors. Layers are divided
    among them as llama.cpp divides them.

    shares: share of all experts (0 to 1), one for all devices together or one for each.

    tensor_split: proportions of layers, one for each device.

    links: links from RAM, one for all devices or one for each; (): copies take no time.

    Raises OptionError or BudgetError.
    """
    n_devices = len(tensor_split)
    layout = layout_of(shape)
    for option, given in (
        ("--vram-cache", shares),
        ("--device-link", links or (None,)),
    ):
        if len(given) not in (1, n_devices):
            raise OptionError(
                f"{option} is given for {len(given)} devices, but --tensor-split has {n_devices}; give one for all, or"
                " one for each."
            )
    size = slot_bytes(layout, on_device=True)
    caches = tuple(
        ExpertCache("bytes", n_bytes=slots_of(shape, share) * size, tier="VRAM")
        for share in shares
    )
    devices = tuple(
        Device(f"{SIMULATED}{d}", d, _ENOUGH_BYTES, _ENOUGH_BYTES)
        for d in range(n_devices)
    )
    memory = Memory(_ENOUGH_BYTES, _ENOUGH_BYTES, "nothing")
    spec = LoadSpec(
        n_ctx=1,
        budgets=Budgets(vram=caches),
        tensor_split=tuple(tensor_split),
        store=StoreOptions(overlap=False),
    )
    plan = plan_slots(
        Task(layout, Machine(memory, devices=devices), Sizes.of(layout, spec))
    )
    return tuple(
        DeviceSlots(
            part.name, part.n_slots, tuple(il for il in part.layers if il in shape.row_of), through_ram=True,
            staging=plan.supply.n_staging, link=links[d] if len(links) > 1 else next(iter(links), None),
        )
        for d, part in enumerate(plan.memories) if part.n_slots
    )  # fmt: skip
