"""Measures this machine's speeds with a model's own experts, once, and keeps them to
compare the model's placements.

The native library measures the CPU, a device, and the link between them. The speeds are
kept (`known_facts`) separately for each model, device, number of threads, file system
that holds the model, and layout of the CPU's slots (interleaved or not).
"""

from __future__ import annotations

import ctypes as c
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moegguf.child import child_command, child_environment
from moegguf.engine.cost import Speeds
from moegguf.engine.devices import gpus
from moegguf.engine.known_facts import KnownFact
from moegguf.engine.machine import (
    Device,
    DiskSpeed,
    disk_read_speed,
    memory_read_speed,
    read_memory,
)
from moegguf.engine.recurrent import row_bytes
from moegguf.errors import AllocationError, ExpertIOError, MoeggufError, OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.reader import GGML_TYPES, ggml_type
from moegguf.gguf.shards import mirror_paths
from moegguf.native import abi, library
from moegguf.native.slot_sizes import matrices_of, pad, slot_sizes
from moegguf.native.store import StoreOptions
from moegguf.quantities import MIB, Link, parse_size

SECONDS = 0.06  # total seconds spent measuring one figure, over all turns
# Measurements of each figure, spread over time: other programs run in bursts, and only
# make figures worse.
TURNS = 3
# Approximate bytes of the matrix that represents the weights of one type outside
# experts.
DENSE_BYTES = 4 * MIB
# Types with a smaller share of the weights outside experts are not measured.
LEAST_SHARE = 0.05
# bytes of the slots on the device, which are used in turn so that caches do not help;
# in RAM, the minimum
POOL_BYTES = 96 * MIB
# The CPU's slots have at least this many times the bytes of its last-level cache, if
# enough memory is free.
CACHES = 4
MOST_SLOTS = 1024
# A text like "32768K".
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
# Assumed combined speed of a model's kernels, as a share of the measured speed.
GRAPH_SHARE = 0.85
DISK_S = 0.15
MEASURING_S = 120  # time limit of the measurement process in seconds
MOST_BLOCK_BYTES = 8 << 20
# Assumed for a device that could not be measured: about half of PCIe 4 x16.
SUPPOSED_LINK = Link(12e9)
# assumed for a device that could not be measured: the slowest card with published
# figures
SUPPOSED_MEMORY_BYTES_PER_S = 270e9
MOST_READ_THREADS = 16  # maximum number of threads that read memory to estimate a speed
BLOCK_BYTES = 512  # bytes per block in st_blocks
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OSError, OptionError)


@dataclass(frozen=True)
class KnownSpeeds:
    """The speeds of devices, and of the CPU with `n_threads` threads, for one model."""

    layout: ExpertLayout
    n_threads: int
    repack: bool = True  # True: experts are interleaved in the CPU's slots

    def speeds(self, device: Device) -> Speeds:
        """Returns the speeds that were measured before, or measures them now. Returns
        assumed speeds if that fails.

        Raises OptionError if the device has no kernel for the model's experts.
        """
        if known := self.known(device):
            return known
        try:
            found = self._measure(device)
        except OptionError:
            raise
        except MoeggufError as error:
            return self._supposed(error)
        self._fact(device).write(asdict(found))
        return found

    def speeds_apart(self, device: Device) -> Speeds:
        """Returns the same result as `speeds`, with the same errors, but measures in a
        separate process, because a driver reserves device memory for every process that
        uses the device."""
        if known := self.known(device):
            return known
        arguments = json.dumps(
            [str(self.layout.shards[0].path), vars(device), self.n_threads, self.repack]
        )
        try:
            asked = subprocess.run(
                (*child_command("moegguf.engine.speeds"), arguments),
                capture_output=True, env=child_environment(), timeout=MEASURING_S, check=False,
            )  # fmt: skip
            found = json.loads(asked.stdout)
            if "refused" not in found:
                return _speeds_of(found)
        except (*DAMAGED, subprocess.TimeoutExpired) as error:
            return self._supposed(error)
        raise OptionError(found["refused"])

    def known(self, device: Device) -> Speeds | None:
        """Returns the speeds that were measured before; None if there are none, or if
        their file is damaged."""
        with suppress(*DAMAGED):
            return _speeds_of(self._fact(device).read(dict) or {})
        return None

    def _fact(self, device: Device) -> KnownFact:
        file_system = 0
        with suppress(OSError):  # the model's file may be missing on this machine
            file_system = self.layout.shards[0].path.stat().st_dev
        about = [
            device.name,
            device.description,
            device.total_bytes,
            file_system,
            self.n_threads,
            self.repack,
        ]
        return KnownFact("placements", self.layout, about)

    def _measure(self, device: Device) -> Speeds:
        layout = self.layout
        file = os.stat(layout.shards[0].path)
        if file.st_blocks * BLOCK_BYTES < file.st_size // 2:
            raise ExpertIOError(
                f"{layout.shards[0].path.name} has only its header here"
            )
        if all(device.name != known.name for known in gpus()):
            raise AllocationError(
                f"the process that measures has no device {device.name}"
            )
        disk = expert_read_speed(layout, DISK_S)
        if not disk.bytes_per_s > 0:
            raise AllocationError("the speed test of the drive read nothing")
        return measure_speeds(
            layout, device.name, self.n_threads, self.repack, disk.bytes_per_s
        )

    def _supposed(self, error: Exception) -> Speeds:
        cpu_bytes_per_s = memory_read_speed(
            min(max(1, self.n_threads), MOST_READ_THREADS)
        )
        source = f"assumed, not measured ({str(error).rstrip('.')})"
        return Speeds.supposed(
            SUPPOSED_MEMORY_BYTES_PER_S, SUPPOSED_LINK, cpu_bytes_per_s, source
        )


def expert_read_speed(
    layout: ExpertLayout,
    seconds: float,
    store: StoreOptions = StoreOptions(),
    mirrors: Sequence[str] = (),
) -> DiskSpeed:
    """Returns the disk's speed for reads as large as the largest expert matrix of this
    model, at most MOST_BLOCK_BYTES. Reads with as many threads as a store has readers.
    With mirrors, reads all copies at the same time and adds their speeds. Raises
    ModelNotFoundError."""
    block_bytes = min(
        max(matrix.expert_bytes for matrix in layout.matrices), MOST_BLOCK_BYTES
    )
    paths = [
        layout.shards[0].path,
        *(mirror_paths(mirror, layout.shards)[0] for mirror in mirrors),
    ]

    def measure(path: Path) -> DiskSpeed:
        return disk_read_speed(path, seconds, block_bytes, store.readers, store.direct)

    with ThreadPoolExecutor(len(paths)) as threads:
        speeds = list(threads.map(measure, paths))
    return DiskSpeed(
        sum(speed.bytes_per_s for speed in speeds),
        all(speed.direct for speed in speeds),
    )


def _speeds_of(facts: dict[str, Any]) -> Speeds:
    """Creates the speeds from a dictionary that `asdict` returned. Raises one of the
    exceptions in DAMAGED if the facts are damaged."""
    return Speeds(
        **facts | {name: Link(**facts[name]) for name in ("copies", "pageable")}
    )


def measure_speeds(
    layout: ExpertLayout,
    device: str,
    n_threads: int,
    repack: bool,
    disk_bytes_per_s: float,
) -> Speeds:
    """Measures the speeds with copies of an expert of the model's largest layer.
    device: ggml's name.

    Each figure is the best of TURNS measurements. The measurement takes a few seconds,
    and needs slots of about POOL_BYTES on the device and `cpu_pool_bytes` in RAM.
    Raises AllocationError, ExpertIOError, and OptionError if the device has no kernel
    for these experts.
    """
    layer = max(layout.layers, key=lambda layer: layer.expert_bytes)
    of_layer = layout.only([layer.il])
    n_embd = layout.hparams.n_embd
    dense = dense_types(layout)
    seconds = SECONDS / TURNS
    ram_bytes = cpu_pool_bytes(read_memory().usable_bytes)
    size = slot_sizes(of_layer).slot_bytes
    n_slots, n_ram_slots = (
        max(layer.n_expert_used, min(MOST_SLOTS, n_bytes // size))
        for n_bytes in (POOL_BYTES, ram_bytes)
    )
    matrices = matrices_of(of_layer)
    for matrix in matrices:
        matrix.n_expert = max(n_slots, n_ram_slots)
    paths = [os.fsencode(shard.path) for shard in layout.shards]
    how = (device, n_threads, repack)
    token_bytes = layer.n_expert_used * layer.expert_bytes
    turns = list[Any]()
    dense_turns = defaultdict[int, list[Any]](list)
    for _ in range(TURNS):
        slots = n_slots, n_ram_slots
        turns.append(
            _measure(
                matrices, paths, layer.il, layer.n_expert_used, slots, *how, seconds
            )
        )
        for number in dense:
            n_rows = max(64, DENSE_BYTES // row_bytes(number, n_embd))
            n_bytes = n_rows * row_bytes(number, n_embd)
            matrix = (abi.Matrix * 1)(
                abi.Matrix(
                    b"dense",
                    kind=abi.DOWN,
                    type=number,
                    n_expert=MOST_SLOTS,
                    ne0=n_embd,
                    ne1=n_rows,
                    expert_bytes=n_bytes,
                )
            )
            # if no expert of the model has this type, the device may lack a kernel
            # for it; the type is then not measured
            with suppress(OptionError):
                slots = (
                    max(2, POOL_BYTES // n_bytes),
                    max(2, min(MOST_SLOTS, ram_bytes // n_bytes)),
                )
                found = _measure(matrix, [], 0, 1, slots, *how, seconds / 2)
                dense_turns[number].append(found)
    speeds = best_of(turns, token_bytes)
    cpu_ns = device_ns = 0.0
    for number, of_turns in dense_turns.items():
        of_type = best_of(of_turns, token_bytes)
        cpu_ns += dense[number] / of_type.cpu_bytes_per_ns
        device_ns += dense[number] / of_type.device_bytes_per_ns
    # Bytes/ns become bytes/s.
    n_dense = sum(dense[number] for number in dense_turns)
    share = GRAPH_SHARE * 1e9
    return Speeds(
        device_bytes_per_s=share * speeds.device_bytes_per_ns,
        copies=Link(speeds.copy_bytes_per_ns * 1e9, speeds.copy_ns / 1e9),
        pageable=Link(speeds.pageable_bytes_per_ns * 1e9, speeds.pageable_ns / 1e9),
        cpu_bytes_per_s=share * speeds.cpu_bytes_per_ns,
        stop_s=speeds.stop_ns / 1e9,
        cpu_layer_s=speeds.cpu_layer_ns / 1e9,
        device_node_s=speeds.device_op_ns / 1e9,
        cpu_node_s=speeds.cpu_op_ns / 1e9,
        disk_bytes_per_s=disk_bytes_per_s,
        source=f"measured on {time.strftime('%Y-%m-%d')}",
        device_dense_bytes_per_s=share * n_dense / device_ns if n_dense else 0.0,
        cpu_dense_bytes_per_s=share * n_dense / cpu_ns if n_dense else 0.0,
    )


def cpu_pool_bytes(usable_bytes: int) -> int:
    """Returns the size in bytes of the slots that are used to measure the CPU:
    POOL_BYTES, or CACHES times its last-level cache if that is more. The limit is a
    quarter of the usable bytes."""
    wanted = POOL_BYTES
    with suppress(OSError, ValueError):
        wanted = max(wanted, CACHES * parse_size(LAST_CACHE.read_text()))
    return min(wanted, usable_bytes // 4)


def best_of(turns: Sequence[Any], token_bytes: int) -> Any:
    """Returns a struct moegguf_speeds with the best value of each figure in `turns`.

    The bandwidth and latency of copies from one kind of memory come from the same turn:
    the one that copies `token_bytes` in the shortest time.
    """
    best = abi.Speeds()
    for name in ("cpu_bytes_per_ns", "device_bytes_per_ns"):
        setattr(best, name, max(getattr(turn, name) for turn in turns))
    for name in ("cpu_op_ns", "device_op_ns", "stop_ns", "cpu_layer_ns"):
        setattr(best, name, min(getattr(turn, name) for turn in turns))
    for kind in ("copy", "pageable"):
        figures = (
            (getattr(turn, f"{kind}_ns"), getattr(turn, f"{kind}_bytes_per_ns"))
            for turn in turns
        )
        copy_ns, bytes_per_ns = min(
            figures, key=lambda pair: pair[0] + token_bytes / pair[1]
        )
        setattr(best, f"{kind}_ns", copy_ns)
        setattr(best, f"{kind}_bytes_per_ns", bytes_per_ns)
    return best


def dense_types(layout: ExpertLayout) -> dict[int, int]:
    """Returns {ggml type: bytes of weights outside experts} for the types to measure.
    Leaves out types with too few bytes. Also leaves out a type if n_embd values are not
    a whole number of its blocks."""
    dense = {ggml_type(name): size for name, (_, size) in layout.tensor_types.items()}
    for matrix in layout.matrices:
        dense[matrix.ggml_type] -= matrix.n_expert * matrix.expert_bytes
    return {
        number: size
        for number, size in dense.items()
        if size > LEAST_SHARE * layout.dense_bytes
        and layout.hparams.n_embd % GGML_TYPES[number][1] == 0
    }


def _measure(
    matrices: Any, paths: list[bytes], il: int, n_used: int, slots: tuple[int, int], device: str, n_threads: int,
    repack: bool, seconds: float,
) -> Any:  # fmt: skip
    """Returns a struct moegguf_speeds. slots: the number of slots on the device, and
    the number of slots in RAM."""
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
        devices=(abi.Device * 1)(abi.Device(device.encode(), slots[0])),
        n_ram_slots=slots[1],
    )
    speeds = abi.Speeds()
    library.load().moegguf_measure_speeds(
        c.byref(config), n_threads, seconds, c.byref(speeds)
    )
    return speeds


if __name__ == "__main__":  # `speeds_apart` starts this process
    _path, _device, _n_threads, _repack = json.loads(sys.argv[1])
    try:
        _answer = asdict(
            KnownSpeeds(read_layout(_path), _n_threads, _repack).speeds(
                Device(**_device)
            )
        )
    except OptionError as error:
        _answer = {"refused": str(error)}
    print(json.dumps(_answer))
