"""Computes slot and pool sizes before a store is opened."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moegguf.gguf.experts import ExpertLayout, Kind
from moegguf.native import abi, library

KIND = abi.enum("kind")
SIZE_CLASSES = 128  # bit of the remedy size_classes (switches.h)


def matrices_of(layout: ExpertLayout, devices: Iterable[str | None] = ()) -> Any:
    """Returns an array of struct moegguf_matrix with every expert matrix, padded for
    these devices (see `padded`)."""
    rows = [
        abi.Matrix(
            m.name.encode(), m.il, KIND[m.kind], m.ggml_type, m.n_expert, m.ne0, m.ne1, m.shard, m.padding_bytes,
            m.offset, m.expert_bytes,
        )
        for m in layout.matrices
    ]  # fmt: skip
    matrices = (abi.Matrix * len(rows))(*rows)
    pad(matrices, devices)
    return matrices


def pad(matrices: Any, devices: Iterable[str | None]) -> None:
    """Raises padding_bytes of these structs to the padding that the devices need (see
    `padded`)."""
    for name in devices:
        library.load().moegguf_pad(name and name.encode(), matrices, len(matrices))


def padded(layout: ExpertLayout, devices: Iterable[str | None]) -> ExpertLayout:
    """Returns the layout with padding_bytes set for these devices.

    padding_bytes is the largest number of bytes that any of the devices' kernels read
    after an expert in a slot. devices: ggml's names; None is the CPU. A device that
    ggml does not know needs no padding.
    """
    padding = iter([m.padding_bytes for m in matrices_of(layout, devices)])
    layers = [
        replace(
            layer,
            matrices=tuple(
                replace(m, padding_bytes=next(padding)) for m in layer.matrices
            ),
        )
        for layer in layout.layers
    ]
    return replace(layout, layers=tuple(layers))


@dataclass(frozen=True)
class SlotSizes:
    """The sizes of slots and of a pool in bytes, and whether the CPU kernels can stream
    experts."""

    # Bytes from one slot to the next in the arena of each matrix kind. If slots are
    # packed, the arena of the kind "gate" holds all kinds, and the other kinds have 0.
    stride_bytes: Mapping[Kind, int]
    # Size of one slot in bytes, summed over the arenas of all matrix kinds.
    slot_bytes: int
    # Size of all arenas in bytes, including the guard bytes after the last slot of each
    # arena.
    pool_bytes: int
    # True: the CPU kernels can stream experts (streamed_supply.cpp), so a pass of
    # several tokens may use more experts of a layer than there are slots.
    streams: bool


def slot_sizes(
    layout: ExpertLayout, n_slots: int = 0, on_device: bool = False
) -> SlotSizes:
    """Returns the sizes of a pool with n_slots slots for this layout.

    on_device: True if the pool is on a device other than the CPU, or fills slots on
    such a device. Raises OptionError for a negative n_slots, and for matrices of a kind
    or type that does not exist.
    """
    sizes, matrices = abi.Sizes(), matrices_of(layout)
    library.load().moegguf_slot_sizes(
        matrices, len(matrices), n_slots, on_device, c.byref(sizes)
    )
    strides = {kind: sizes.stride_bytes[KIND[kind]] for kind in layout.kinds}
    return SlotSizes(strides, sizes.slot_bytes, sizes.pool_bytes, bool(sizes.streams))


def has_size_classes() -> bool:
    """Returns True if plans may give layers with large experts slots of their own size
    (the remedy size_classes is on)."""
    return bool(library.load().moegguf_switched_on() & SIZE_CLASSES)


def slot_tokens(device: str | None) -> int:
    """Returns the largest number of tokens in a pass for which a device rounds exactly
    as it does with all experts resident.

    Up to this number of tokens, results are bit-identical for any number of slots.
    device: ggml's name; None is the CPU, which has no limit.
    """
    return int(library.load().moegguf_slot_tokens(device and device.encode()))


def maps(device: str) -> bool:
    """Returns True if a device's backend offers one range of addresses for its memory
    and RAM. device: ggml's name."""
    return bool(library.load().moegguf_maps(device.encode()))


def most_slots(layout: ExpertLayout, device: str | None, n_slots: int) -> int:
    """Returns the largest number of slots, from 1 to n_slots, that one pool can have on
    a device.

    The limits are the device's largest buffer, the largest tensor by which its kernels
    can multiply, and 32-bit offsets in kernels. device: ggml's name; None is the CPU.
    Raises OptionError for an unknown name, and for n_slots below 1.
    """
    most, matrices = c.c_int32(), matrices_of(layout, [device])
    library.load().moegguf_most_slots(
        device and device.encode(), matrices, len(matrices), n_slots, c.byref(most)
    )
    return most.value
