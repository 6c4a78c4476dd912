"""Speeds of this machine with a model's own experts, by which its placements are compared: measured once, and kept.

They are kept (`known_facts`) for the device, its driver, the number of threads and the file system that the model lies
on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moegguf.child import child_command, child_environment
from moegguf.engine.cost import Speeds
from moegguf.engine.devices import gpus
from moegguf.engine.known_facts import KnownFact
from moegguf.engine.machine import Device, DiskSpeed, disk_read_speed, memory_read_speed
from moegguf.errors import AllocationError, ExpertIOError, MoeggufError, OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.native.speeds import measure_speeds
from moegguf.quantities import Link

DISK_S = 0.15
MEASURING_S = 120  # at most, of a process that does nothing else
MOST_BLOCK_BYTES = 8 << 20
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"), Path("/proc/version"))
SUPPOSED_LINK = Link(12e9)  # of a device that could not be measured: half of PCIe 4 x16
SUPPOSED_MEMORY_BYTES_PER_S = 270e9  # the slowest card of those that were published
MOST_READ_THREADS = 16  # of the memory read to suppose a speed
BLOCK_BYTES = 512  # of st_blocks
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OSError, OptionError)


class KnownSpeeds:
    """The speeds of devices, and of the CPU with so many threads, with one model. repack: of the CPU's slots."""

    def __init__(self, layout: ExpertLayout, n_threads: int, repack: bool = True) -> None:
        self._layout, self._n_threads, self._repack = layout, n_threads, repack

    def speeds(self, device: Device) -> Speeds:
        """Speeds as measured before, or now, or supposed where that fails.

        Raises OptionError where the device has no kernel for the model's experts.
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
        """`speeds`, measured in a process of its own: a driver keeps memory of a device for every process that computes
        there. Raises as `speeds` does."""
        if known := self.known(device):
            return known
        arguments = json.dumps([str(self._layout.shards[0].path), vars(device), self._n_threads, self._repack])
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
        """Speeds as measured before; None: they were not."""
        with suppress(*DAMAGED):
            return _speeds_of(self._fact(device).read(dict) or {})
        return None

    def _fact(self, device: Device) -> KnownFact:
        drivers = [path.read_text(errors="replace") for path in DRIVERS if path.is_file()]
        file_system = 0
        with suppress(OSError):  # of a model of which only the headers are here
            file_system = self._layout.shards[0].path.stat().st_dev
        about = [device.name, device.description, device.total_bytes, drivers, file_system]
        return KnownFact("placements", self._layout, [*about, self._n_threads, self._repack])

    def _measure(self, device: Device) -> Speeds:
        layout = self._layout
        file = os.stat(layout.shards[0].path)
        if file.st_blocks * BLOCK_BYTES < file.st_size // 2:
            raise ExpertIOError(f"{layout.shards[0].path.name} has only its header here")
        if all(device.name != known.name for known in gpus()):
            raise AllocationError(f"the process that measures has no device {device.name}")
        speeds = measure_speeds(layout, device.name, self._n_threads, repack=self._repack)
        disk = expert_read_speed(layout, DISK_S)
        if not disk.bytes_per_s > 0:
            raise AllocationError("nothing was read from the disk")
        return Speeds.measured(speeds, disk.bytes_per_s, f"measured on {time.strftime('%Y-%m-%d')}")

    def _supposed(self, error: Exception) -> Speeds:
        cpu_bytes_per_s = memory_read_speed(min(max(1, self._n_threads), MOST_READ_THREADS))
        source = f"supposed, not measured ({error})"
        return Speeds.supposed(SUPPOSED_MEMORY_BYTES_PER_S, SUPPOSED_LINK, cpu_bytes_per_s, source)


def expert_read_speed(layout: ExpertLayout, seconds: float) -> DiskSpeed:
    """The disk's speed for reads as large as this model's matrices. Raises ModelNotFoundError."""
    block_bytes = min(max(matrix.expert_bytes for matrix in layout.matrices), MOST_BLOCK_BYTES)
    return disk_read_speed(layout.shards[0].path, seconds, block_bytes)


def _speeds_of(facts: dict[str, Any]) -> Speeds:
    """From what `asdict` gave. Raises one of DAMAGED."""
    return Speeds(**facts | {"copies": Link(**facts["copies"])})


if __name__ == "__main__":  # for `speeds_apart`
    _path, _device, _n_threads, _repack = json.loads(sys.argv[1])
    try:
        _answer = asdict(KnownSpeeds(read_layout(_path), _n_threads, _repack).speeds(Device(**_device)))
    except OptionError as error:
        _answer = {"refused": str(error)}
    print(json.dumps(_answer))
