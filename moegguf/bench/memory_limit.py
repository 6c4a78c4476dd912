"""Runs a child process under a memory limit, and drops files from the page cache.

The limit is set on a new memory cgroup, v1 or v2, inside this process's cgroup or
inside one of the cgroups above it. The new cgroup is removed afterwards. Anonymous
memory and the page cache that the child fills count towards the limit.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import itertools
import mmap
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from moegguf.engine.machine import ROOT, cgroup_levels, file_text
from moegguf.errors import MoeggufError

_PR_SET_PDEATHSIG = 1
_PEAK = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
_EVENTS = {1: "memory.oom_control", 2: "memory.events"}
_rmdir = os.rmdir
_numbers = itertools.count(1)


class LimitError(MoeggufError):
    """Raised if no memory cgroup can be created on this machine. The message names
    another way to set a limit."""


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class MemoryGroup:
    """One memory cgroup with a limit. The command that `command` returns runs inside
    it."""

    version: int  # cgroup version, 1 or 2
    folder: Path

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns a command in which a shell first joins the group and then runs
        `arguments`. The limit therefore applies to the child from its start."""
        return [
            "/bin/sh",
            "-c",
            'echo $$ > "$0" && exec "$@"',
            str(self.folder / "cgroup.procs"),
            *arguments,
        ]

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the group in bytes, including page cache; 0 if the kernel
        does not report the peak."""
        return int((file_text(self.folder / _PEAK[self.version]).split() or ["0"])[0])

    @property
    def oom_kills(self) -> int:
        """The number of processes that the limit has killed; 0 if the kernel does not
        report it."""
        words = file_text(self.folder / _EVENTS[self.version]).split()
        return sum(
            int(number)
            for name, number in itertools.pairwise(words)
            if name == "oom_kill"
        )

    def remove(self) -> None:
        """Removes the group. Tries for about 5 seconds, because the kernel may take a
        while to free the group's last pages. If all tries fail, the group remains, and
        no error is raised."""
        for _ in range(50):
            try:
                _rmdir(self.folder)
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)


def _limits_memory(version: int, folder: Path) -> bool:
    """Returns whether a new group in `folder` can limit memory. Turns on cgroup v2's
    memory controller if necessary."""
    if version == 1:
        return (folder / "memory.limit_in_bytes").exists()
    control = folder / "cgroup.subtree_control"
    if "memory" in file_text(control).split():
        return True
    # The kernel refuses this write while processes are in `folder` itself. `make_group`
    # then tries the parent folder.
    return "memory" in file_text(folder / "cgroup.controllers").split() and _write(
        control, "+memory"
    )


def _set_limit(version: int, folder: Path, n_bytes: int) -> bool:
    """Sets the memory limit, and turns off swap as far as the kernel allows. Returns
    whether the limit was set."""
    if not _write(
        folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"),
        str(n_bytes),
    ):
        return False
    if version == 2:
        _write(folder / "memory.swap.max", "0")
    elif not _write(folder / "memory.memsw.limit_in_bytes", str(n_bytes)):
        _write(folder / "memory.swappiness", "0")
    return True


def make_group(limit_bytes: int, root: Path = ROOT) -> MemoryGroup:
    """Creates a memory cgroup with this limit and, if the kernel allows it, without
    swap. The caller must call `remove` on the group. Also removes groups that were
    created by moegguf processes that no longer exist. Raises LimitError if no group can
    be created."""
    name = f"moegguf-{os.getpid()}-{next(_numbers)}"
    for version, folder in cgroup_levels("memory", root):
        if not (os.access(folder, os.W_OK) and _limits_memory(version, folder)):
            continue
        for abandoned in folder.glob("moegguf-*-*"):
            pid = abandoned.name.split("-")[1]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                with contextlib.suppress(OSError):
                    _rmdir(abandoned)
        group = MemoryGroup(version, folder / name)
        try:
            group.folder.mkdir()
        except OSError:
            continue
        if _set_limit(version, group.folder, limit_bytes):
            return group
        group.remove()
    raise LimitError(
        "no memory cgroup can be created here; run as root, or inside"
        f" `systemd-run --user --scope -p MemoryMax={limit_bytes} -p MemorySwapMax=0`."
    )


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent exits, even if the parent was
    killed by SIGKILL."""
    c.CDLL(None).prctl(_PR_SET_PDEATHSIG, c.c_ulong(signal.SIGKILL))


@contextlib.contextmanager
def memory_limit(
    limit_bytes: int | None, root: Path = ROOT
) -> Iterator[MemoryGroup | None]:
    """Provides a group with this limit inside the `with` block, and removes the group
    at the end. Provides None if `limit_bytes` is None or 0. Raises LimitError."""
    group = make_group(limit_bytes, root) if limit_bytes else None
    try:
        yield group
    finally:
        if group is not None:
            group.remove()


def drop_page_cache(paths: Sequence[str | os.PathLike[str]]) -> int:
    """Drops the pages of these files from the page cache. Returns the number of bytes
    that remain cached, usually because a process maps them. A file whose cached pages
    cannot be counted adds 0 to the result."""
    kept = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            # Dirty pages (not yet written to the disk) would stay in the page cache.
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            kept += cached_bytes(fd)
        finally:
            os.close(fd)
    return kept


def cached_bytes(fd: int) -> int:
    """Returns how many bytes of an open file are in the page cache; 0 if this number
    cannot be determined."""
    stat = os.fstat(fd)
    # mincore() reports all pages as cached to a user who neither owns the file nor may
    # write to it. Only the answers to root and to the owner are used.
    if stat.st_size == 0 or os.geteuid() not in (0, stat.st_uid):
        return 0
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory:
        file = np.frombuffer(memory, np.uint8)
        pages = np.zeros(-(-file.size // mmap.PAGESIZE), np.uint8)
        failed = c.CDLL(None).mincore(
            c.c_void_p(file.ctypes.data),
            c.c_size_t(file.size),
            c.c_void_p(pages.ctypes.data),
        )
        del file  # the mapping cannot be closed while `file` uses it
    return 0 if failed else min(stat.st_size, int((pages & 1).sum()) * mmap.PAGESIZE)
