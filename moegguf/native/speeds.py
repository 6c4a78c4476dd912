"""How fast this machine is with a model's experts: the CPU, a device, and the link between them, measured in place."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.reader import GGML_TYPES, ggml_type
from moegguf.native import abi, library
from moegguf.native.slot_sizes import matrices_of, pad, slot_sizes
from moegguf.quantities import MIB, Link

SECONDS = 0.06  # for each figure, in all turns together
TURNS = 3  # spread over the measuring: what else the machine does takes some time at once, and only makes slower
DENSE_BYTES = 4 * MIB  # of a matrix that stands for those of no expert
LEAST_SHARE = 0.05  # of the weights that are no experts, of a type that is measured
POOL_BYTES = 96 * MIB  # of slots that take turns: more than caches hold


def measure_speeds(
    layout: ExpertLayout, device: str | None, n_threads: int, *, repack: bool = True, seconds: float = SECONDS
) -> dict[str, Any]:
    """Measures with the first of the model's largest layers with experts; device: ggml's name, None: the CPU alone.
    Returns fields of `cost.Speeds`, as kernels of experts alone reach them, those of a device 0 where none is measured.

    Every figure is measured in TURNS, and is the best of them. Takes a second or two on a fast link, and about 100 MiB
    of each memory, or a token's experts of one layer where these are more. Raises AllocationError, ExpertIOError,
    OptionError where the device has no kernel for these experts.
    """
    layer = max(layout.layers, key=lambda layer: layer.expert_bytes)
    of_layer, dense, seconds = layout.only([layer.il]), dense_types(layout), seconds / TURNS
    # All experts of a small layer take turns, at least those of a token of a large one.
    n_slots = min(layer.n_expert, max(layer.n_expert_used, POOL_BYTES // slot_sizes(of_layer).slot_bytes))
    paths = [str(shard.path).encode() for shard in layout.shards]
    how, token_bytes = (device, n_threads, repack), layer.n_expert_used * layer.expert_bytes
    turns, dense_turns = list[Any](), dict[int, list[Any]]()
    for _ in range(TURNS):
        turns.append(_measure(matrices_of(of_layer), paths, layer.il, layer.n_expert_used, n_slots, *how, seconds))
        for number in dense:
            _, block, block_bytes = GGML_TYPES[number]
            n_blocks, is_whole = layout.hparams.n_embd // block, layout.hparams.n_embd % block == 0
            if is_whole:  # a matrix of this type as wide as the model
                n_rows = max(64, DENSE_BYTES // (n_blocks * block_bytes))
                shape = (1 << 10, n_blocks * block, n_rows, 0, 0, 0, n_rows * n_blocks * block_bytes)
                matrix = (abi.Matrix * 1)(abi.Matrix(b"dense", 0, abi.DOWN, number, *shape))
                with suppress(OptionError):  # no kernel for experts of this type, which it is not
                    found = _measure(matrix, [], 0, 1, max(2, POOL_BYTES // shape[-1]), *how, seconds / 2)
                    dense_turns.setdefault(number, []).append(found)
    speeds = best_of(turns, token_bytes)
    cpu_ns = device_ns = 0.0
    for number, of_turns in dense_turns.items():
        of_type = best_of(of_turns, token_bytes)
        cpu_ns += dense[number] / of_type.cpu_bytes_per_ns
        device_ns += dense[number] / of_type.device_bytes_per_ns if device else 0.0
    n_dense = sum(dense[number] for number in dense_turns)
    cpu_dense, device_dense = (n_dense / ns if ns else 0.0 for ns in (cpu_ns, device_ns))
    return {
        "cpu_bytes_per_s": speeds.cpu_bytes_per_ns * 1e9,
        "cpu_node_s": speeds.cpu_op_ns / 1e9,
        "device_bytes_per_s": speeds.device_bytes_per_ns * 1e9,
        "device_node_s": speeds.device_op_ns / 1e9,
        "copies": Link(speeds.copy_bytes_per_ns * 1e9, speeds.copy_ns / 1e9),
        "stop_s": speeds.stop_ns / 1e9,
        "cpu_layer_s": speeds.cpu_layer_ns / 1e9,
        "cpu_dense_bytes_per_s": cpu_dense * 1e9,
        "device_dense_bytes_per_s": device_dense * 1e9,
    }


def best_of(turns: Sequence[Any], token_bytes: int) -> Any:
    """The best of every figure in some structs moegguf_speeds. Bandwidth and latency of copies belong together: those
    with which so many bytes come soonest."""
    best = abi.Speeds()
    for name in ("cpu_bytes_per_ns", "device_bytes_per_ns"):
        setattr(best, name, max(getattr(turn, name) for turn in turns))
    for name in ("cpu_op_ns", "device_op_ns", "stop_ns", "cpu_layer_ns"):
        setattr(best, name, min(getattr(turn, name) for turn in turns))
    if best.device_bytes_per_ns:
        soonest = min(turns, key=lambda turn: turn.copy_ns + token_bytes / turn.copy_bytes_per_ns)
        best.copy_ns, best.copy_bytes_per_ns = soonest.copy_ns, soonest.copy_bytes_per_ns
    return best


def dense_types(layout: ExpertLayout) -> dict[int, int]:
    """{ggml type: bytes of weights that are no experts}, of those that have a part worth measuring."""
    of_experts = dict[int, int]()
    for matrix in layout.matrices:
        of_experts[matrix.ggml_type] = of_experts.get(matrix.ggml_type, 0) + matrix.n_expert * matrix.expert_bytes
    n_bytes = {ggml_type(name): size for name, (_, size) in layout.tensor_types.items()}
    dense = {number: size - of_experts.get(number, 0) for number, size in n_bytes.items()}
    return {number: size for number, size in dense.items() if size > LEAST_SHARE * layout.dense_bytes}


def _measure(
    matrices: Any, paths: list[bytes], il: int, n_used: int, n_slots: int, device: str | None, n_threads: int,
    repack: bool, seconds: float,
) -> Any:  # fmt: skip
    pad(matrices, [device])
    used = (c.c_int32 * (il + 1))()
    used[il] = n_used
    config = abi.Config(
        abi=abi.ABI_VERSION,
        flags=abi.REPACK * repack | abi.SIMULATE * (not paths),
        n_layer=il + 1,
        n_matrices=len(matrices),
        n_shards=len(paths),
        n_devices=1,
        matrices=matrices,
        shard_paths=(c.c_char_p * len(paths))(*paths),
        n_expert_used=used,
        devices=(abi.Device * 1)(abi.Device(device.encode() if device else None, n_slots)),
    )
    speeds = abi.Speeds()
    library.load().moegguf_measure_speeds(c.byref(config), n_threads, seconds, c.byref(speeds))
    return speeds
