"""Tests free memory and CPUs as read from folders that imitate machines.

In these folders, cgroups v1 and v2 are nested, mixed, absent or broken. A library that
was compiled for another CPU is refused. Other tests check read speeds, and the number
of compute threads for made-up times and loads.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from moegguf.engine import machine
from moegguf.engine.machine import (
    cgroup_levels,
    count_cpus,
    disk_read_speed,
    memory_read_speed,
    read_memory,
)
from moegguf.engine.threadpool import MEMORY_S, ThreadGovernor
from moegguf.errors import LibraryError, ModelNotFoundError
from moegguf.native import library
from moegguf.processor import NEEDED_FLAGS, Processor, has_kernels, read_processor

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712\n"
V2_MOUNT = "30 23 0:27 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


class FakeMachine:
    """A folder that imitates a machine with 16 GiB of memory (10 GiB free). At first it
    has no cgroups."""

    MEMORY = {"MemTotal": 16 << 20, "MemAvailable": 10 << 20} | dict.fromkeys(
        ("MemFree", "Buffers", "Cached", "Shmem", "Active", "Inactive", "Slab"), 1
    )

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo",
            "".join(f"{name}: {n} kB\n" for name, n in self.MEMORY.items()),
        )
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "")

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(str(text))

    def v1(self, folder: str, limit: str | int, usage: int = 0, stat: str = "") -> None:
        base = f"sys/fs/cgroup/memory/{folder}"
        self.write(f"{base}/memory.limit_in_bytes", limit)
        self.write(f"{base}/memory.usage_in_bytes", usage)
        self.write(f"{base}/memory.stat", stat)

    def v2(
        self,
        folder: str,
        limit: str | int,
        usage: int = 0,
        stat: str = "",
        high: str | int = "max",
    ) -> None:
        base = f"sys/fs/cgroup/{folder}"
        self.write(f"{base}/memory.max", limit)
        self.write(f"{base}/memory.high", high)
        self.write(f"{base}/memory.current", usage)
        self.write(f"{base}/memory.stat", stat)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    return FakeMachine(tmp_path)


def test_read_memory_without_cgroups_reports_the_machine(fake: FakeMachine) -> None:
    memory = read_memory(fake.root)
    assert (memory.total_bytes, memory.available_bytes) == (16 * GIB, 10 * GIB)
    assert memory.limited_by == "the machine"
    memory = read_memory()
    assert 0 <= memory.available_bytes <= memory.total_bytes
    assert count_cpus() >= 1
    fake.write(
        "proc/cpuinfo",
        "processor : 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f\n\nflags : x\n",
    )
    assert read_processor(fake.root, "x86_64") == Processor(
        "Some CPU", frozenset({"fpu", "avx2", "fma", "avx512f"})
    )


def test_read_processor_ignores_the_flags_of_an_emulators_x86_machine(
    fake: FakeMachine,
) -> None:
    fake.write(
        "proc/cpuinfo",
        "processor : 0\nmodel name\t: Some CPU\nflags\t\t: avx2 fma f16c\n",
    )
    assert has_kernels(read_processor(fake.root, "x86_64"), "")
    assert read_processor(fake.root, "aarch64").flags == frozenset()


def test_read_processor_finds_a_model_after_the_features(fake: FakeMachine) -> None:
    cores = "".join(
        f"processor\t: {n}\nFeatures\t: fp asimd\nCPU part\t: 0xd08\n\n"
        for n in range(2)
    )
    fake.write(
        "proc/cpuinfo",
        f"{cores}Revision\t: c03111\nModel\t\t: Raspberry Pi 4 Model B\n",
    )
    assert read_processor(fake.root) == Processor(
        "Raspberry Pi 4 Model B", frozenset({"fp", "asimd"})
    )
    fake.write("proc/cpuinfo", cores)
    assert read_processor(fake.root) == Processor(
        "unknown CPU", frozenset({"fp", "asimd"})
    )


@pytest.mark.parametrize(
    ("limit", "usage", "stat", "high", "free"),
    [
        # Idle page cache.
        (
            4 * GIB,
            3 * GIB,
            f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n",
            "max",
            2 * GIB,
        ),
        (8 * GIB, GIB, "", 3 * GIB, 2 * GIB),
        (GIB, 2 * GIB, "", "max", 0),
        *(
            (bad, 2 * GIB, "inactive_file\nx y z\n", "max", 10 * GIB)
            for bad in ("", "max", "-1", "abc", "1 2", "\0")
        ),
        # An Arabic digit, which the kernel never writes.
        ("\u0663", 2 * GIB, "", "max", 10 * GIB),
    ],
)
def test_read_memory_respects_a_cgroup_v2_limit(
    fake: FakeMachine,
    limit: str | int,
    usage: int,
    stat: str,
    high: str | int,
    free: int,
) -> None:
    fake.write("proc/self/mountinfo", V2_MOUNT + "broken\n 1 2 3 - \n")
    fake.write("proc/self/cgroup", "0::/app\nnonsense\n:::\n")
    fake.v2("app", limit, usage, stat, high)
    memory = read_memory(fake.root)
    limited_by = (
        "the machine"
        if free == 10 * GIB
        else f"cgroup v2 {fake.root}/sys/fs/cgroup/app"
    )
    assert (memory.available_bytes, memory.limited_by) == (free, limited_by)


def test_read_memory_takes_the_tightest_level_of_nested_cgroups_v2(
    fake: FakeMachine,
) -> None:
    fake.write("proc/self/mountinfo", V2_MOUNT)
    fake.write("proc/self/cgroup", "0::/a/b/c\n")
    fake.v2("a/b/c", "max\n", GIB)
    fake.v2("a/b", 9 * GIB, GIB)
    fake.v2("a", 6 * GIB, 5 * GIB)
    fake.v2("", "max")
    assert read_memory(fake.root).available_bytes == GIB
    assert [path.name for _, path in cgroup_levels("memory", fake.root)] == [
        "c",
        "b",
        "a",
        "cgroup",
    ]


def test_read_memory_uses_hierarchical_statistics_of_nested_cgroups_v1(
    fake: FakeMachine,
) -> None:
    fake.write("proc/self/mountinfo", V1_MOUNT)
    fake.write("proc/self/cgroup", "8:pids:/\n4:cpu,memory:/a/b\n")
    fake.v1("", NO_LIMIT_V1)
    fake.v1("a", 4 * GIB, 4 * GIB, f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    fake.v1("a/b", 8 * GIB, GIB)
    memory = read_memory(fake.root)
    assert memory.available_bytes == GIB and memory.limited_by.endswith("/memory/a")


def test_read_memory_takes_the_tighter_of_cgroup_v1_and_v2(fake: FakeMachine) -> None:
    v2 = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    fake.write("proc/self/mountinfo", V1_MOUNT + v2)
    fake.write("proc/self/cgroup", "4:memory:/box\n0::/box\n")
    fake.v1("box", 5 * GIB, GIB)
    assert read_memory(fake.root).available_bytes == 4 * GIB
    fake.v2("unified/box", 3 * GIB, GIB)
    assert read_memory(fake.root).available_bytes == 2 * GIB


def test_read_memory_finds_the_group_of_a_container_at_the_mount(
    fake: FakeMachine,
) -> None:
    fake.write("proc/self/mountinfo", V1_MOUNT.replace(" / /sys", " /docker/ab /sys"))
    fake.write("proc/self/cgroup", "4:memory:/docker/ab/inner\n")
    fake.v1("", 2 * GIB, GIB)
    fake.v1("inner", 8 * GIB, 0)
    assert read_memory(fake.root).available_bytes == GIB
    for outside in ("/docker/abc", "/../x", "/elsewhere"):
        fake.write("proc/self/cgroup", f"4:memory:{outside}\n")
        assert read_memory(fake.root).available_bytes == GIB


def test_count_cpus_respects_cgroup_quotas(fake: FakeMachine) -> None:
    plain = count_cpus(fake.root)
    assert plain == len(os.sched_getaffinity(0))
    fake.write("proc/self/mountinfo", V2_MOUNT + V1_MOUNT.replace("memory", "cpu"))
    fake.write("proc/self/cgroup", "0::/app\n5:cpu:/box\n")
    fake.write("sys/fs/cgroup/app/cpu.max", "max 100000\n")
    assert count_cpus(fake.root) == plain
    fake.write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1\n")
    fake.write("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    assert count_cpus(fake.root) == plain
    fake.write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "150000\n")
    assert count_cpus(fake.root) == 1
    fake.write("sys/fs/cgroup/app/cpu.max", "50000 100000\n")
    assert count_cpus(fake.root) == 1


@pytest.mark.parametrize("size", [0, 1000, 3 << 20, 17 << 20])
def test_disk_read_speed_measures_direct_and_buffered_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    assert (disk_read_speed(path, seconds=0.05).bytes_per_s > 0) == bool(size)
    buffered = disk_read_speed(path, seconds=0.05, n_threads=1, direct=False)
    assert (buffered.bytes_per_s > 0) == bool(size) and not buffered.direct
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    speed = disk_read_speed(path, seconds=0.05)
    assert (speed.bytes_per_s > 0) == bool(size) and not speed.direct
    with pytest.raises(ModelNotFoundError, match="check the path"):
        disk_read_speed(tmp_path / "none")


def test_each_measurement_of_the_disk_reads_other_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that caches the blocks of the last measurement would look too fast."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096 * 256))
    offsets: list[int] = []

    def read(_fd: int, _buffers: object, offset: int) -> int:
        offsets.append(offset)
        return 4096

    monkeypatch.setattr(os, "preadv", read)
    for _ in range(20):  # measurements of no time read one block each
        disk_read_speed(path, 0.0, 4096, 1)
    assert len(offsets) == 20 and len(set(offsets)) > 1


def test_memory_read_speed_takes_the_fastest_of_five_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, turns_s, read_bytes = 0.0, iter([7.0, 9.0, 0.5, 8.0, 9.0]), []

    def read(buffer: np.ndarray[Any, Any]) -> None:
        nonlocal now_s
        now_s += next(turns_s)  # a turn is slow if other processes occupy the CPU
        read_bytes.append(buffer.nbytes)

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(np, "sum", read)
    assert memory_read_speed(1) == read_bytes[2] / 0.5
    assert len(read_bytes) == 5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries that need AVX2 and AVX-512. The imitated CPU has only AVX2
    and FMA."""
    monkeypatch.setattr(
        library,
        "read_processor",
        lambda: Processor("Some CPU", frozenset({"avx2", "fma"})),
    )
    (tmp_path / "CPU_FEATURES").write_text("avx2\navx512f\n")
    return tmp_path


@pytest.mark.parametrize(
    ("load", "words"), [(0.1, ""), (64.0, "load 64.0 on 2 processors")]
)
def test_load_warning_names_a_high_load(
    monkeypatch: pytest.MonkeyPatch, load: float, words: str
) -> None:
    monkeypatch.setattr(machine, "count_cpus", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert words in machine.load_warning() and bool(words) == bool(
        machine.load_warning()
    )


def test_check_processor_rejects_missing_instructions_and_passes_unknown_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        LibraryError,
        match=r"this one \(Some CPU\) has no avx512f\. Install moegguf from source",
    ):
        library.check_processor(folder)
    for features in ("avx2\n", ""):
        (folder / "CPU_FEATURES").write_text(features)
        library.check_processor(folder)
    (folder / "CPU_FEATURES").write_text("avx512f\n")
    # `folder` has no proc/cpuinfo, so the CPU's instructions are unknown.
    monkeypatch.setattr(library, "read_processor", lambda: read_processor(folder))
    library.check_processor(folder)
    (folder / "CPU_FEATURES").unlink()
    library.check_processor(folder)


class Governed:
    """A governor of threads and its clock. Each decision moves the clock forward by
    0.25 s."""

    def __init__(self, n_cpu: int, n_max: int | None = None) -> None:
        self.governor = ThreadGovernor(n_cpu, n_max or n_cpu)
        self.now_s = 100.0

    def decide(self, others: float, token_s: dict[int, float] | None = None) -> int:
        self.now_s += 0.25
        return self.governor.decide(
            self.now_s, others, token_s[self.governor.n_threads] if token_s else None
        )

    def steps(
        self, n: int, others: float, token_s: dict[int, float] | None = None
    ) -> list[int]:
        return [self.decide(others, token_s) for _ in range(n)]


QUIET = {1: 0.020, 2: 0.011}
BUSY = {1: 0.021, 2: 0.190}


def test_governor_keeps_every_thread_on_a_quiet_machine() -> None:
    assert set(Governed(2).steps(100, 0.05, QUIET)) == {2}
    machine = Governed(2)
    assert machine.steps(9, 0.35, QUIET) == [2] * 9
    machine.decide(1.0, BUSY)
    assert machine.steps(9, 0.35, QUIET) == [1] * 9
    machine = Governed(2)
    assert machine.steps(3, 1.0) + machine.steps(2, 0.0) == [1, 1, 1, 2, 2]


def test_governor_yields_one_thread_to_a_busy_process_and_reclaims_the_thread() -> None:
    machine = Governed(2)
    machine.steps(4, 0.0, QUIET)
    # The governor does not try two threads while the other process is busy.
    assert machine.steps(200, 0.7, BUSY) == [1] * 200
    assert machine.steps(3, 0.05, QUIET) == [2, 2, 2]


def test_governor_measures_once_more_after_a_load_within_the_last_step() -> None:
    machine = Governed(2)
    # Most of this time was measured before the other process started.
    assert machine.decide(0.5, {2: 0.012}) == 1
    assert machine.decide(1.0, BUSY) == 2  # slower than that
    assert machine.steps(30, 1.0, BUSY) == [1] * 30


def test_governor_keeps_all_threads_if_fewer_are_slower() -> None:
    harmless, machine = {1: 0.020, 2: 0.012}, Governed(2)
    n_steps = int(10 * MEMORY_S / 0.25)
    n_fewer = machine.steps(n_steps, 0.6, harmless).count(1)
    assert 1 <= n_fewer <= 12  # tries fewer threads about once every MEMORY_S seconds


@pytest.mark.parametrize(
    ("others", "expected"), [(0.1, 8), (1.0, 7), (3.0, 5), (7.9, 1), (8.0, 1)]
)
def test_governor_leaves_a_processor_to_each_busy_process(
    others: float, expected: int
) -> None:
    assert Governed(8).decide(others) == expected


def test_governor_keeps_its_quota_while_other_processors_are_free() -> None:
    assert Governed(64, n_max=4).steps(3, 40.0) == [4, 4, 4]
    assert Governed(64, n_max=4).steps(3, 62.0) == [2, 2, 2]


@pytest.mark.parametrize(
    ("flags", "chosen", "expected"),
    [
        (NEEDED_FLAGS, "", True),
        (NEEDED_FLAGS | {"avx512f"}, "avx2", True),
        (NEEDED_FLAGS, "upstream", False),
        ({"avx2", "f16c"}, "", False),
        (set(), "", False),
    ],
)
def test_has_kernels_depends_on_flags_and_chosen_kernels(
    flags: set[str], chosen: str, expected: bool
) -> None:
    assert has_kernels(Processor("a processor", frozenset(flags)), chosen) is expected
