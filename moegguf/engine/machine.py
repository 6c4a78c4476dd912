"""Memory that this process may still take, CPUs that it may use, read speed of the disk.

Free memory is the least that /proc/meminfo and every level of every memory cgroup (v1 and v2, nested, mixed) allow.
All files are read below `root`, so that tests can use a machine made of files.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from moegguf.errors import ModelNotFoundError
from moegguf.processor import read_processor

ROOT = Path("/")
CPU_FLAGS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8",
    "asimddp", "i8mm", "sve",
)  # fmt: skip

MACHINE = "the machine"
_NO_LIMIT = 1 << 62  # cgroup v1 writes a number near 2^63 for "no limit"
BUSY_SHARE = 0.25  # of the processors, by the load of the last minute, from which speeds are too low
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # fields of psutil's cpu_times
_DISK_THREADS = 4
_DISK_BLOCK_BYTES = 2 << 20
_MEMORY_BUFFER_BYTES = 32 << 20  # beyond most caches
_LEAST_MEMORY_TURNS = 5


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory: total, and what this process may still take. `limited_by`: "the machine" or a cgroup."""

    total_bytes: int
    available_bytes: int
    limited_by: str


@dataclass(frozen=True)
class Device:
    """A device by ggml's name for it, and its memory. `index`: among the GPUs, as llama.cpp's main_gpu counts.

    `handle`: the address of its ggml_backend_dev, 0 where there is none.
    """

    name: str
    index: int
    free_bytes: int
    total_bytes: int
    description: str = ""
    handle: int = 0

    @property
    def memory(self) -> Memory:
        """The memory as a plan takes it."""
        return Memory(self.total_bytes, self.free_bytes, f"the device {self.name}")


@dataclass(frozen=True)
class Machine:
    """Memory, CPUs and devices as this process may use them. `n_cpu` counts logical CPUs, `n_core` physical cores;
    `devices`: those that may compute layers."""

    memory: Memory
    n_cpu: int = 1
    n_core: int = 1
    cpu_model: str = ""
    cpu_flags: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second read from one file; `direct` when the page cache was bypassed."""

    bytes_per_s: float
    direct: bool


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The whole number in a cgroup file; None when it is absent or "max"."""
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """Lines such as "MemTotal:  24684096 kB" or "inactive_file 4096" as {name: bytes}."""
    table: dict[str, int] = {}
    for line in _text(path).splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) >= 2 and fields[1].isascii() and fields[1].isdigit():
            table[fields[0]] = int(fields[1]) * (1024 if fields[-1] == "kB" else 1)
    return table


def cgroup_levels(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """(1 or 2, folder) of every cgroup that can limit `controller` for this process, innermost first."""
    paths: dict[int, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            paths[2] = path
        elif controller in names.split(","):
            paths[1] = path
    for version, mounted, top in _cgroup_mounts(controller, root):
        path = paths.get(version, "")
        if not path:
            continue
        inside = "/" if mounted == "/" else mounted + "/"
        known = (path + "/").startswith(inside) and ".." not in path.split("/")
        leaf = top / path[len(inside) :].strip("/") if known else top
        while True:
            if leaf.is_dir():
                yield version, leaf
            if leaf == top or top not in leaf.parents:
                break
            leaf = leaf.parent


def _cgroup_mounts(controller: str, root: Path) -> Iterator[tuple[int, str, Path]]:
    """(version, path of the cgroup that is mounted, folder it is mounted on)."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        top = root / fields[4].replace("\\040", " ").lstrip("/")
        if kind[0] == "cgroup2":
            yield 2, fields[3], top
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, fields[3], top


def _cgroup_free(version: int, folder: Path) -> int | None:
    """Bytes that one memory cgroup still allows, idle page cache included; None without a limit."""
    stat = _table(folder / "memory.stat")
    if version == 2:
        limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
        used, reclaimable = _number(folder / "memory.current"), stat.get("inactive_file", 0)
    else:
        limits = [_number(folder / "memory.limit_in_bytes")]
        used = _number(folder / "memory.usage_in_bytes")
        reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    limit = min((n for n in limits if n is not None and n < _NO_LIMIT), default=None)
    if limit is None:
        return None
    return max(0, limit - max(0, (used or 0) - reclaimable))


def read_memory(root: Path = ROOT) -> Memory:
    """The memory this process may still take: the least of the machine's and every cgroup's."""
    meminfo = _table(root / "proc/meminfo")
    if "MemAvailable" in meminfo:
        total, available = meminfo.get("MemTotal", 0), meminfo["MemAvailable"]
    else:
        virtual = psutil.virtual_memory()
        total, available = int(virtual.total), int(virtual.available)
    limited_by = MACHINE
    for version, folder in cgroup_levels("memory", root):
        free = _cgroup_free(version, folder)
        if free is not None and free < available:
            available, limited_by = free, f"cgroup v{version} {folder}"
    return Memory(total, available, limited_by)


def _cpu_quota(version: int, folder: Path) -> float | None:
    if version == 2:
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    else:
        quota, period = (_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def load_warning() -> str:
    """A sentence where other processes have used the processors within the last minute, so that figures are too low."""
    load, n_cpus = os.getloadavg()[0], count_cpus()
    if load <= BUSY_SHARE * n_cpus:
        return ""
    return f"warning: this machine is busy (a load of {load:.1f} on {n_cpus} processors): speeds are too low"


def count_cpus(root: Path = ROOT) -> int:
    """Logical CPUs this process may keep busy: its affinity, cut by every cgroup's quota; at least 1."""
    try:
        n_cpu = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        n_cpu = os.cpu_count() or 1
    for version, folder in cgroup_levels("cpu", root):
        quota = _cpu_quota(version, folder)
        if quota is not None:
            n_cpu = min(n_cpu, int(quota))
    return max(1, n_cpu)


class ProcessorUse:
    """Processor time that other processes take on the logical CPUs that this process may use, `n_cpu` of them."""

    def __init__(self) -> None:
        try:
            self._cpus = os.sched_getaffinity(0)
        except (AttributeError, OSError):
            self._cpus = set(range(os.cpu_count() or 1))
        self.n_cpu = len(self._cpus)
        self._last = self._read()

    def others(self) -> float:
        """CPUs that others kept busy since the last call, or since construction: 0.0 to `n_cpu`."""
        (now_s, busy_s, own_s), before = self._read(), self._last
        self._last = now_s, busy_s, own_s
        others_s = (busy_s - before[1]) - (own_s - before[2])
        return min(max(others_s / max(now_s - before[0], 1e-3), 0.0), float(self.n_cpu))

    def _read(self) -> tuple[float, float, float]:
        """Seconds by the clock, in use on all CPUs, in use by this process."""
        times = [cpu for number, cpu in enumerate(psutil.cpu_times(percpu=True)) if number in self._cpus]
        busy_s = sum(sum(getattr(cpu, name, 0.0) for name in _BUSY) for cpu in times)
        return time.perf_counter(), busy_s, time.process_time()


def read_machine(root: Path = ROOT) -> Machine:
    """Memory, CPUs, CPU model and the flags of CPU_FLAGS."""
    processor = read_processor(root)
    n_cpu = count_cpus(root)
    n_core = psutil.cpu_count(logical=False) or n_cpu
    chosen = tuple(flag for flag in CPU_FLAGS if flag in processor.flags)
    return Machine(read_memory(root), n_cpu, max(1, min(n_core, n_cpu)), processor.model, chosen)


def _offsets(n_bytes: int, block_bytes: int, start: int) -> Iterator[int]:
    """Offsets of every block, in an order that defeats read-ahead, repeated without end."""
    n_blocks = max(1, n_bytes // block_bytes)
    step = max(1, int(n_blocks * 0.6180339887)) | 1
    while n_blocks % step == 0 and step > 1:
        step -= 2
    for at in itertools.count(start * n_blocks // _DISK_THREADS, step):
        yield at % n_blocks * block_bytes


def _measure(path: Path, flags: int, block_bytes: int, seconds: float) -> float:
    """Bytes per second of _DISK_THREADS threads with the given open() flags; 0 when nothing could be read."""
    begin = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)

    def read(thread: int) -> int:
        # anonymous memory is page-aligned, which direct I/O requires
        with mmap.mmap(-1, block_bytes) as memory, memoryview(memory) as buffer, contextlib.suppress(OSError):
            n_bytes = 0
            for offset in _offsets(os.fstat(fd).st_size, block_bytes, thread):
                if not flags and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, offset, block_bytes, os.POSIX_FADV_DONTNEED)
                n = os.preadv(fd, [buffer], offset)
                n_bytes += n
                if n <= 0 or time.perf_counter() >= begin + seconds:
                    break
        return n_bytes

    try:
        with ThreadPoolExecutor(_DISK_THREADS) as threads:
            return sum(threads.map(read, range(_DISK_THREADS))) / max(time.perf_counter() - begin, 1e-9)
    finally:
        os.close(fd)


def disk_read_speed(
    path: str | os.PathLike[str], seconds: float = 0.5, block_bytes: int = _DISK_BLOCK_BYTES
) -> DiskSpeed:
    """Speed of 4 threads that read blocks of `path`, past the page cache where the file system allows.

    Raises ModelNotFoundError when the file cannot be opened.
    """
    path = Path(path)
    block_bytes = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # direct I/O reads whole blocks
    direct_flag = getattr(os, "O_DIRECT", 0)
    if direct_flag:
        with contextlib.suppress(OSError):
            speed = _measure(path, direct_flag, block_bytes, seconds)
            if speed > 0:
                return DiskSpeed(speed, direct=True)
    try:
        return DiskSpeed(_measure(path, 0, block_bytes, seconds), direct=False)
    except OSError as error:
        raise ModelNotFoundError(f"{str(path)!r} cannot be read ({error.strerror}); check the path.") from error


def memory_read_speed(n_threads: int, seconds: float = 0.05) -> float:
    """Bytes per second that `n_threads` threads together read from main memory, each from a buffer of its own.

    The best of several turns: in the others, other processes may have had the processors.
    """
    import numpy as np

    buffers = [np.ones(_MEMORY_BUFFER_BYTES // 8) for _ in range(n_threads)]
    turns_s: list[float] = []
    begin = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as threads:
        while len(turns_s) < _LEAST_MEMORY_TURNS or time.perf_counter() < begin + seconds:
            start = time.perf_counter()
            list(threads.map(np.sum, buffers))
            turns_s.append(time.perf_counter() - start)
    return n_threads * _MEMORY_BUFFER_BYTES / max(min(turns_s), 1e-9)
