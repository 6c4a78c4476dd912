"""What is known of this machine and a model for placing its experts: speeds, measured once, and hit rates.

Speeds lie in the cache folder, in a file for each model, under a key for the device, its driver, the processor, the
number of threads, the file system that the model lies on and the build of the native library. Where that folder cannot
be written, each load measures again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moegguf.atomic_write import write_atomically
from moegguf.child import child_command, child_environment
from moegguf.controller.artifacts import Artifacts
from moegguf.controller.shape import MoeShape
from moegguf.engine.devices import Device, gpus
from moegguf.engine.machine import disk_read_speed, memory_read_speed
from moegguf.engine.placement import DeviceSpeeds, HitCurve, published_curve
from moegguf.errors import AllocationError, ExpertIOError, MoeggufError, OptionError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.fingerprint import header_digest
from moegguf.native import library
from moegguf.native.speeds import Speeds, measure_speeds
from moegguf.processor import read_processor
from moegguf.quantities import Link
from moegguf.settings import cache_folder

DISK_S = 0.15
MEASURING_S = 120  # at most, of a process that does nothing else
MOST_BLOCK_BYTES = 8 << 20
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"), Path("/proc/version"))
SUPPOSED_LINK = Link(12e9)  # of a device that could not be measured: half of PCIe 4 x16
SUPPOSED_MEMORY_BYTES_PER_S = 270e9  # the slowest card of those that were published
MOST_READ_THREADS = 16  # of the memory read to suppose a speed
BLOCK_BYTES = 512  # of st_blocks
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)
LEAST_TOKENS = 256  # of runs whose counts say something


@dataclass(frozen=True)
class MachineSpeeds:
    """Speeds with a model, and when they were measured (seconds since 1970)."""

    speeds: Speeds
    disk_bytes_per_s: float
    time_s: float

    @property
    def source(self) -> str:
        """Where they come from, as words."""
        return f"measured on {time.strftime('%Y-%m-%d', time.localtime(self.time_s))}"

    @classmethod
    def of(cls, facts: dict[str, Any]) -> MachineSpeeds:
        """From what `asdict` gave. Raises KeyError, TypeError, ValueError."""
        speeds = facts["speeds"]
        found = Speeds(**speeds | {"copies": Link(**speeds["copies"])})
        numbers = (found.cpu_bytes_per_s, found.device_bytes_per_s, found.copies.bytes_per_s, facts["disk_bytes_per_s"])
        if not all(isinstance(number, float) and 0 < number < float("inf") for number in numbers):
            raise ValueError("speeds are above zero")
        times = (found.cpu_op_s, found.device_op_s, found.copies.latency_s, found.stop_s, found.cpu_layer_s)
        if not all(isinstance(number, float) and 0 <= number < 1 for number in times):
            raise ValueError("times are not")
        time.localtime(facts["time_s"])
        return cls(found, facts["disk_bytes_per_s"], float(facts["time_s"]))


class KnownSpeeds:
    """The file about one model."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._layout = layout
        self._path = cache_folder() / "placements" / f"{header_digest(layout.shards)}.json"

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return dict(json.loads(self._path.read_bytes()))
        return {}

    def _write(self, facts: dict[str, Any]) -> None:
        with suppress(OSError):  # found out again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(facts).encode())

    def speeds(self, device: Device, n_threads: int, repack: bool = True) -> DeviceSpeeds:
        """Those of this machine with this model: as measured before, or now, or supposed where that fails.

        Raises OptionError where the device has no kernel for the model's experts.
        """
        try:
            return self._found(device, n_threads, repack)
        except OptionError:
            raise
        except MoeggufError as error:
            return _supposed(n_threads, error)

    def _found(self, device: Device, n_threads: int, repack: bool) -> DeviceSpeeds:
        """Speeds as measured before, or now. Raises what measuring raises."""
        key = self._key(device, n_threads, repack)
        if known := self._known(key):
            return known
        found = self._measure(device, n_threads, repack)
        facts = self._read()
        of_all = facts.get("speeds")
        facts["speeds"] = (of_all if isinstance(of_all, dict) else {}) | {key: asdict(found)}
        self._write(facts)
        return DeviceSpeeds.measured(found.speeds, found.disk_bytes_per_s, found.source)

    def speeds_apart(self, device: Device, n_threads: int, repack: bool = True) -> DeviceSpeeds:
        """`speeds`, measured in a process of its own: a driver keeps memory of a device for every process that computes
        there. Raises as `speeds` does."""
        if known := self._known(self._key(device, n_threads, repack)):
            return known
        arguments = json.dumps([str(self._layout.shards[0].path), vars(device), n_threads, repack])
        command = (*child_command("moegguf.engine.known_speeds"), arguments)
        try:
            asked = subprocess.run(
                command, capture_output=True, env=child_environment(), timeout=MEASURING_S, check=False
            )
            found = json.loads(asked.stdout)
            if "refused" not in found:
                return DeviceSpeeds(**found | {"copies": Link(**found["copies"])})
        except (OSError, ValueError, TypeError, KeyError, subprocess.TimeoutExpired) as error:
            return _supposed(n_threads, error)
        raise OptionError(found["refused"])

    def _key(self, device: Device, n_threads: int, repack: bool) -> str:
        drivers = [path.read_text(errors="replace") for path in DRIVERS if path.is_file()]
        of_device = [device.name, device.description, device.total_bytes, drivers, self._file_system()]
        processor = read_processor()
        of_cpu = [processor.model, sorted(processor.flags), n_threads, repack, library.build_identity()]
        return _digest([*of_device, *of_cpu])

    def _file_system(self) -> int:
        with suppress(OSError):  # of a model of which only the headers are here
            return self._layout.shards[0].path.stat().st_dev
        return 0

    def _known(self, key: str) -> DeviceSpeeds | None:
        with suppress(*DAMAGED):
            known = MachineSpeeds.of(self._read()["speeds"][key])
            return DeviceSpeeds.measured(known.speeds, known.disk_bytes_per_s, known.source)
        return None

    def _measure(self, device: Device, n_threads: int, repack: bool) -> MachineSpeeds:
        layout = self._layout
        file = os.stat(layout.shards[0].path)
        if file.st_blocks * BLOCK_BYTES < file.st_size // 2:
            raise ExpertIOError(f"{layout.shards[0].path.name} has only its header here")
        if all(device.name != known.name for known in gpus()):
            raise AllocationError(f"the process that measures has no device {device.name}")
        speeds = measure_speeds(layout, device.name, n_threads, repack=repack)
        block_bytes = min(max(matrix.expert_bytes for matrix in layout.matrices), MOST_BLOCK_BYTES)
        disk = disk_read_speed(layout.shards[0].path, DISK_S, block_bytes)
        if not disk.bytes_per_s > 0:
            raise AllocationError("nothing was read from the disk")
        return MachineSpeeds(speeds, disk.bytes_per_s, time.time())

    def hits(self) -> HitCurve:
        """Hit rates to expect of this model's slots: measured on its routing, of its saved counts, or published."""
        with suppress(ExpertIOError):  # of a model of which only the headers are here
            if found := self._measured_hits() or self._hits_of_counts():
                return found
        return published_curve(self._layout.n_expert, self._layout.n_expert_used)

    def _measured_hits(self) -> HitCurve | None:
        measured = Artifacts(self._layout).measured()
        if measured is None or not measured.hit_rates:
            return None
        policy = measured.choose(0.5).policy
        n = measured.about.get("requests", "some")
        return HitCurve(measured.hit_rates[policy], f"measured on this model: {n} requests, {policy}")

    def _hits_of_counts(self) -> HitCurve | None:
        """What the experts that earlier runs used most would hit, if they stayed: caches of recent use hit more."""
        uses = Artifacts(self._layout).uses(MoeShape.of(self._layout))
        if uses is None or uses.sum() < LEAST_TOKENS * self._layout.token_cycle_slots:
            return None
        ordered = np.sort(uses, axis=None)[::-1]
        total = self._layout.n_expert_total
        rates = {n / 10: float(ordered[: n * total // 10].sum() / ordered.sum()) for n in range(1, 10)}
        return HitCurve(rates, "from this model's saved counts: those used most would stay")


def _digest(about: list[Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def _supposed(n_threads: int, error: Exception) -> DeviceSpeeds:
    found = DeviceSpeeds.supposed(
        SUPPOSED_MEMORY_BYTES_PER_S, SUPPOSED_LINK, memory_read_speed(min(max(1, n_threads), MOST_READ_THREADS))
    )
    return DeviceSpeeds(**vars(found) | {"source": f"supposed, not measured ({error})"})


def _answer(path: str, device: dict[str, Any], n_threads: int, repack: bool) -> dict[str, Any]:
    try:
        return asdict(KnownSpeeds(read_layout(path)).speeds(Device(**device), n_threads, repack))
    except OptionError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    print(json.dumps(_answer(*json.loads(sys.argv[1]))))
