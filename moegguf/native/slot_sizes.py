"""The sizes of slots and pools that a store of a layout has, before there is one."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moegguf.gguf.experts import ExpertLayout, Kind
from moegguf.native import abi, library

KIND = abi.enum("kind")


def matrices_of(layout: ExpertLayout, devices: Iterable[str | None] = ()) -> Any:
    """Every expert matrix as an array of struct moegguf_matrix, padded as `padded` says."""
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
    """Raises the padding of these structs to that of devices, as `padded` says."""
    for name in devices:
        library.load().moegguf_pad(name and name.encode(), matrices, len(matrices))


def padded(layout: ExpertLayout, devices: Iterable[str | None]) -> ExpertLayout:
    """The layout with the padding that slots of a store have behind experts for its devices, by ggml's names (None:
    the CPU), whose kernels read on there. Devices that ggml does not know have none."""
    padding = iter([m.padding_bytes for m in matrices_of(layout, devices)])
    layers = [
        replace(layer, matrices=tuple(replace(m, padding_bytes=next(padding)) for m in layer.matrices))
        for layer in layout.layers
    ]
    return replace(layout, layers=tuple(layers))


@dataclass(frozen=True)
class SlotSizes:
    """stride_bytes: {matrix kind: bytes from one slot to the next in its arena}.

    slot_bytes: one expert over all arenas. pool_bytes: all arenas with n_slots slots, and the guards behind the last
    ones. streams: in the CPU's memory a pass may use more experts of a layer than there are slots
    (native/streamed_supply.cpp).
    """

    stride_bytes: Mapping[Kind, int]
    slot_bytes: int
    pool_bytes: int
    streams: bool


def slot_sizes(layout: ExpertLayout, n_slots: int = 0) -> SlotSizes:
    """The sizes that a store of this layout with n_slots slots has.

    Raises OptionError for matrices of a kind or type that does not exist.
    """
    sizes, matrices = abi.Sizes(), matrices_of(layout)
    library.load().moegguf_slot_sizes(matrices, len(matrices), n_slots, c.byref(sizes))
    strides = {kind: sizes.stride_bytes[KIND[kind]] for kind in layout.kinds}
    return SlotSizes(strides, sizes.slot_bytes, sizes.pool_bytes, bool(sizes.streams))


def slot_tokens(device: str | None) -> int:
    """The most tokens of a pass that a device, by ggml's name (None: the CPU), computes as if every expert were
    resident, to the last bit, however many slots there are."""
    return int(library.load().moegguf_slot_tokens(device and device.encode()))


def most_slots(layout: ExpertLayout, device: str | None, n_slots: int) -> int:
    """How many of n_slots slots one pool can have on a device, by ggml's name (None: the CPU): the largest buffer
    there, and the largest tensor that its kernels multiply with, have to hold it. Raises OptionError for an unknown
    name."""
    most, matrices = c.c_int32(), matrices_of(layout, [device])
    library.load().moegguf_most_slots(device and device.encode(), matrices, len(matrices), n_slots, c.byref(most))
    return most.value
