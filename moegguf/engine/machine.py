"""Reads how much memory and how many CPUs this process may use, and measures the read
speeds of the disk and of memory.

Free memory is the smallest amount that the machine or any level of a memory cgroup
allows (v1 and v2, nested, mixed). Cgroup files are read below `root`, so that tests can
supply their own files.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from moegguf.errors import ModelNotFoundError
from moegguf.gguf.reader import StrPath

ROOT = Path("/")
MACHINE = "the machine"
# Minimum number of bytes of RAM that an "auto" budget leaves free.
MARGIN_BYTES = 256 << 20
# Bytes to leave free on a shared device, for displays and other programs.
VRAM_MARGIN_BYTES = 1 << 30
# bytes to leave free on a device that only this process uses, for library workspaces
# and captured graphs
OWN_MARGIN_BYTES = 384 << 20
# a device with more than 0 and at most this many bytes in use, for its driver and
# context, is assumed to be used only by this process
IDLE_BYTES = 768 << 20
# Limits of at least this number mean "no limit"; cgroup v1 writes a number near 2^63.
_NO_LIMIT = 1 << 62
# if the load average of the last minute, divided by the number of CPUs, is above this,
# a warning says that measured speeds are too low
BUSY_SHARE = 0.25
# Fields of psutil's cpu_times that count busy time.
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_DISK_THREADS = 4
_DISK_BLOCK_BYTES = 2 << 20
_MEMORY_BUFFER_BYTES = 32 << 20  # a buffer that is larger than most processor caches
_LEAST_MEMORY_TURNS = 5


@dataclass(frozen=True)
class Memory:
    """A memory for weights, contexts and slots: RAM, or the memory of a device."""

    total_bytes: int
    available_bytes: int  # bytes that this process may still use
    limited_by: str  # "the machine", a cgroup, a device or a budget, for messages
    # Bytes that an "auto" budget leaves free; None: `margin_bytes()` of the free bytes.
    margin_bytes: int | None = None

    @property
    def margin(self) -> int:
        """Bytes that an "auto" budget leaves free."""
        if self.margin_bytes is None:
            return margin_bytes(self.available_bytes)
        return self.margin_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes that an "auto" budget may use."""
        return max(0, self.available_bytes - self.margin)


def margin_bytes(free_bytes: int) -> int:
    """Returns how many of RAM's free bytes an "auto" budget leaves free: a twentieth,
    but at least MARGIN_BYTES."""
    return max(free_bytes // 20, MARGIN_BYTES)


@dataclass(frozen=True)
class Device:
    """A device, identified by its name in ggml, and its memory. `index`: its number
    among the GPUs, as in llama.cpp's main_gpu.

    `handle`: address of its ggml_backend_dev in the process that listed the devices, or
    0.
    """

    name: str
    index: int
    free_bytes: int
    total_bytes: int
    description: str = ""
    handle: int = 0
    # Bytes that an "auto" budget leaves free; None: depends on other use of the device.
    margin_bytes: int | None = None

    @property
    def margin(self) -> int:
        """Bytes that an "auto" budget leaves free. A driver that reports 0 bytes in use
        does not measure use, so its device is treated as shared."""
        if self.margin_bytes is not None:
            return self.margin_bytes
        is_idle = 0 < self.total_bytes - self.free_bytes <= IDLE_BYTES
        return OWN_MARGIN_BYTES if is_idle else VRAM_MARGIN_BYTES

    @property
    def memory(self) -> Memory:
        """The device's memory as a `Memory`, the form that planning uses."""
        return Memory(
            self.total_bytes, self.free_bytes, f"the device {self.name}", self.margin
        )


@dataclass(frozen=True)
class Machine:
    """The memory and the devices that this process may use. `devices`: the devices that
    may compute layers."""

    memory: Memory
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second that were read from one file. `direct`: True if the page cache
    was bypassed."""

    bytes_per_s: float
    direct: bool


def file_text(path: Path) -> str:
    """Returns the text of a small system file; "" if the file cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Returns the whole number in a cgroup file; None if the file is absent or contains
    other text, such as "max"."""
    text = file_text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """Reads lines such as "inactive_file 4096", and returns {name: bytes}."""
    pairs = (line.partition(" ")[::2] for line in file_text(path).splitlines())
    return {
        name: int(value) for name, value in pairs if value.isascii() and value.isdigit()
    }


def cgroup_levels(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Yields (1 or 2, folder) for every cgroup that can limit `controller` for this
    process. In each hierarchy, the innermost comes first."""
    paths: dict[int, str] = {}
    for line in file_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            paths[2] = path
        elif controller in names.split(","):
            paths[1] = path
    for line in file_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        kind = right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = (
            2
            if kind[0] == "cgroup2"
            else int(kind[0] == "cgroup" and controller in kind[2].split(","))
        )
        if path := paths.get(version, ""):
            mounted = fields[3].rstrip("/") + "/"
            top = root / fields[4].replace("\\040", " ").lstrip("/")
            known = (path + "/").startswith(mounted) and ".." not in path.split("/")
            leaf = top / path[len(mounted) :].strip("/") if known else top
            for folder in (leaf, *leaf.parents):
                if folder.is_dir():
                    yield version, folder
                if folder == top:
                    break


def _cgroup_free(version: int, folder: Path) -> int | None:
    """Returns the bytes that one memory cgroup still allows, including idle page cache;
    None if it has no limit."""
    limits = ["memory.max", "memory.high"]
    current = "memory.current"
    cached = "inactive_file"
    if version == 1:
        limits = ["memory.limit_in_bytes"]
        current = "memory.usage_in_bytes"
        cached = "total_inactive_file"
    found = [
        n
        for name in limits
        if (n := _number(folder / name)) is not None and n < _NO_LIMIT
    ]
    if not found:
        return None
    stat = _table(folder / "memory.stat")
    used = _number(folder / current) or 0
    return max(
        0, min(found) - max(0, used - stat.get(cached, stat.get("inactive_file", 0)))
    )


def read_memory(root: Path = ROOT) -> Memory:
    """Returns the memory that this process may still use: the smallest amount that the
    machine or any cgroup allows."""
    machine = psutil.virtual_memory()
    total = int(machine.total)
    available = int(machine.available)
    limited_by = MACHINE
    for version, folder in cgroup_levels("memory", root):
        free = _cgroup_free(version, folder)
        if free is not None and free < available:
            available = free
            limited_by = f"cgroup v{version} {folder}"
    return Memory(total, available, limited_by)


def load_warning() -> str:
    """Returns a warning if processors were so busy in the last minute that measured
    speeds are too low; otherwise ""."""
    load = os.getloadavg()[0]
    n_cpus = count_cpus()
    if load <= BUSY_SHARE * n_cpus:
        return ""
    return f"warning: the machine is busy (load {load:.1f} on {n_cpus} processors): speeds are too low"


def count_cpus(root: Path = ROOT) -> int:
    """Returns the number of logical CPUs that this process may keep busy: its affinity,
    limited by each cgroup's quota; at least 1."""
    n_cpu = len(_affinity())
    for version, folder in cgroup_levels("cpu", root):
        files = (
            [folder / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
            if version == 1
            else [folder / "cpu.max"]
        )
        fields = " ".join(map(file_text, files)).split()
        if (
            len(fields) == 2
            and all(field.isdigit() for field in fields)
            and int(fields[1])
        ):
            n_cpu = min(n_cpu, int(fields[0]) // int(fields[1]))
    return max(1, n_cpu)


def _affinity() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except (AttributeError, OSError):
        return set(range(os.cpu_count() or 1))


class ProcessorUse:
    """Measures the CPU time that other processes use on the `n_cpu` logical CPUs that
    this process may use."""

    def __init__(self) -> None:
        self._cpus = _affinity()
        self.n_cpu = len(self._cpus)
        self._last = self._read()

    def others(self) -> float:
        """Returns how many CPUs other processes kept busy on average since the last
        call, or since construction: 0.0 to `n_cpu`."""
        now_s, busy_s, own_s = self._read()
        before = self._last
        self._last = now_s, busy_s, own_s
        others_s = (busy_s - before[1]) - (own_s - before[2])
        return min(max(others_s / max(now_s - before[0], 1e-3), 0.0), float(self.n_cpu))

    def _read(self) -> tuple[float, float, float]:
        """Returns three times in seconds: the clock, the busy time of the allowed CPUs,
        and this process's CPU time."""
        times = [
            cpu
            for number, cpu in enumerate(psutil.cpu_times(percpu=True))
            if number in self._cpus
        ]
        busy_s = sum(sum(getattr(cpu, name, 0.0) for name in _BUSY) for cpu in times)
        return time.perf_counter(), busy_s, time.process_time()


def _measure(
    path: Path, flags: int, block_bytes: int, seconds: float, n_threads: int
) -> float:
    """Returns the combined speed, in bytes per second, at which `n_threads` threads
    read random blocks with these open() flags; 0 if nothing could be read. Raises
    OSError if the file cannot be opened."""
    begin = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    n_blocks = max(1, os.fstat(fd).st_size // block_bytes)

    def read(_thread: int) -> int:
        # Random order of blocks, which defeats read-ahead. Each measurement reads other
        # blocks, because the drive may cache the blocks of the last measurement.
        dice = random.Random()
        n = 1
        n_bytes = 0
        # Anonymous memory is page-aligned, which direct I/O requires.
        with (
            mmap.mmap(-1, block_bytes) as memory,
            memoryview(memory) as buffer,
            contextlib.suppress(OSError),
        ):
            while n > 0 and (n_bytes == 0 or time.perf_counter() < begin + seconds):
                offset = dice.randrange(n_blocks) * block_bytes
                if not flags and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, offset, block_bytes, os.POSIX_FADV_DONTNEED)
                n = os.preadv(fd, [buffer], offset)
                n_bytes += n
        return n_bytes

    try:
        with ThreadPoolExecutor(n_threads) as threads:
            return sum(threads.map(read, range(n_threads))) / max(
                time.perf_counter() - begin, 1e-9
            )
    finally:
        os.close(fd)


def disk_read_speed(
    path: StrPath,
    seconds: float = 0.5,
    block_bytes: int = _DISK_BLOCK_BYTES,
    n_threads: int = _DISK_THREADS,
    direct: bool = True,
) -> DiskSpeed:
    """Returns the combined speed at which `n_threads` threads read random blocks of
    `path`. direct: the reads bypass the page cache if the file system allows it.

    Raises ModelNotFoundError if the file cannot be opened.
    """
    path = Path(path)
    # Direct I/O reads whole pages.
    block_bytes = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    direct_flag = getattr(os, "O_DIRECT", 0) if direct else 0
    if direct_flag:
        with contextlib.suppress(OSError):
            speed = _measure(path, direct_flag, block_bytes, seconds, n_threads)
            if speed > 0:
                return DiskSpeed(speed, direct=True)
    try:
        return DiskSpeed(
            _measure(path, 0, block_bytes, seconds, n_threads), direct=False
        )
    except OSError as error:
        raise ModelNotFoundError(
            f"{str(path)!r} cannot be read ({error.strerror}); check the path."
        ) from error


def memory_read_speed(n_threads: int, seconds: float = 0.05) -> float:
    """Returns the combined speed, in bytes per second, at which `n_threads` threads
    read main memory, each from its own buffer.

    The result is the best of several measurements, because other processes may slow
    some of them down.
    """
    import numpy as np

    buffers = [np.ones(_MEMORY_BUFFER_BYTES // 8) for _ in range(n_threads)]
    turns_s: list[float] = []
    begin = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as threads:
        while (
            len(turns_s) < _LEAST_MEMORY_TURNS or time.perf_counter() < begin + seconds
        ):
            start = time.perf_counter()
            list(threads.map(np.sum, buffers))
            turns_s.append(time.perf_counter() - start)
    return n_threads * _MEMORY_BUFFER_BYTES / max(min(turns_s), 1e-9)
