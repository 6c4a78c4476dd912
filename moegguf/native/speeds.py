"""How fast this machine is with a model's experts: the CPU, a device, and the link between them, measured in place."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass

from moegguf.gguf.experts import ExpertLayout, MoeLayer
from moegguf.native import library
from moegguf.native.store import matrices_of, slot_sizes
from moegguf.quantities import MIB, Link

NO_LINK = Link(0.0)
SECONDS = 0.06  # for each figure
POOL_BYTES = 96 * MIB  # of slots that take turns: more than caches hold


@dataclass(frozen=True)
class Speeds:
    """Speeds with one layer's experts of a model, one token at a time. Those of a device are 0 where none was measured.

    cpu_bytes_per_s, device_bytes_per_s: weights of experts multiplied with. cpu_op_s, device_op_s: of each node of a
    graph besides. copies: of one layer's misses to the device; the latency is that of all of them together. stop_s: a
    stop at a layer. cpu_layer_s: activations of a layer to the CPU and back. pinned: whether the device copies from
    pinned memory.
    """

    cpu_bytes_per_s: float
    cpu_op_s: float
    device_bytes_per_s: float = 0.0
    device_op_s: float = 0.0
    copies: Link = NO_LINK
    stop_s: float = 0.0
    cpu_layer_s: float = 0.0
    pinned: bool = False


def measure_speeds(
    layout: ExpertLayout, device: str | None, n_threads: int, *, repack: bool = True, seconds: float = SECONDS
) -> Speeds:
    """Measures with the first of the model's largest layers with experts; device: ggml's name, None: the CPU alone.

    Takes about a second on a fast link, and about 100 MiB of each memory. Raises AllocationError, ExpertIOError,
    OptionError.
    """
    layer = max(layout.layers, key=lambda layer: layer.expert_bytes)
    of_layer = layout.only([layer.il])
    speeds, matrices = library.SpeedsStruct(), matrices_of(of_layer)
    paths = [str(shard.path).encode() for shard in layout.shards]
    used = (c.c_int32 * layout.n_layer)()
    used[layer.il] = layer.n_expert_used
    config = library.Config(
        abi=library.ABI_VERSION,
        flags=library.FLAG["repack"] if repack else 0,
        n_layer=layout.n_layer,
        n_matrices=len(matrices),
        n_shards=len(paths),
        n_slots=_n_slots(layer, slot_sizes(of_layer).slot_bytes),
        matrices=matrices,
        shard_paths=(c.c_char_p * len(paths))(*paths),
        n_expert_used=used,
        device=device.encode() if device else None,
    )
    library.check(library.load().moegguf_measure_speeds(c.byref(config), n_threads, seconds, c.byref(speeds)))
    return Speeds(
        cpu_bytes_per_s=speeds.cpu_bytes_per_ns * 1e9,
        cpu_op_s=speeds.cpu_op_ns / 1e9,
        device_bytes_per_s=speeds.device_bytes_per_ns * 1e9,
        device_op_s=speeds.device_op_ns / 1e9,
        copies=Link(speeds.copy_bytes_per_ns * 1e9, speeds.copy_ns / 1e9),
        stop_s=speeds.stop_ns / 1e9,
        cpu_layer_s=speeds.cpu_layer_ns / 1e9,
        pinned=bool(speeds.pinned_memory),
    )


def _n_slots(layer: MoeLayer, slot_bytes: int) -> int:
    """Slots that take turns: all experts of a small layer, at least those of two tokens of a large one."""
    return min(layer.n_expert, max(2 * layer.n_expert_used, POOL_BYTES // slot_bytes))
