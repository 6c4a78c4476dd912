"""Memory groups on machines made of files, and files leaving the page cache."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moegguf.bench import memory_limit as limits
from moegguf.bench.memory_limit import LimitError, cached_bytes, drop_page_cache, make_group, memory_limit

GIB = 1 << 30
V2_MOUNT = "30 23 0:27 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v1(root: Path, place: str = "/job") -> Path:
    write(root / "proc/self/mountinfo", V1_MOUNT)
    write(root / "proc/self/cgroup", f"4:memory:{place}\n0::/\n")
    folder = root / "sys/fs/cgroup/memory" / place.strip("/")
    write(folder / "memory.limit_in_bytes", "9223372036854771712\n")
    return folder


def v2(root: Path, *, leaf_has_processes: bool) -> Path:
    """A group in a slice; a group with processes of its own refuses to pass controllers on."""
    write(root / "proc/self/mountinfo", V2_MOUNT)
    write(root / "proc/self/cgroup", "0::/slice/leaf\n")
    leaf = root / "sys/fs/cgroup/slice/leaf"
    for folder, passed_on in ((leaf.parent, "cpu memory"), (leaf, "" if leaf_has_processes else "memory")):
        write(folder / "cgroup.controllers", "cpu memory\n")
        write(folder / "cgroup.subtree_control", passed_on)
    return leaf


@pytest.fixture(autouse=True)
def rmdir_like_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel removes a group with the files in it."""
    monkeypatch.setattr(limits, "_rmdir", shutil.rmtree)


def test_v1_limits_memory_and_swap(tmp_path: Path) -> None:
    parent = v1(tmp_path)
    group = make_group(4 * GIB, tmp_path)
    assert group.folder.parent == parent
    assert (group.folder / "memory.limit_in_bytes").read_text() == str(4 * GIB)
    assert (group.folder / "memory.memsw.limit_in_bytes").read_text() == str(4 * GIB)
    group.remove()
    assert list(parent.iterdir()) == [parent / "memory.limit_in_bytes"]


def test_v2_group_below_this_one(tmp_path: Path) -> None:
    leaf = v2(tmp_path, leaf_has_processes=False)
    group = make_group(GIB, tmp_path)
    assert group.folder.parent == leaf
    assert (group.folder / "memory.max").read_text() == str(GIB)
    assert (group.folder / "memory.swap.max").read_text() == "0"


def test_v2_group_beside_this_one_when_it_has_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = v2(tmp_path, leaf_has_processes=True)
    real_write = limits._write

    def busy(path: Path, text: str) -> bool:
        return False if path == leaf / "cgroup.subtree_control" else real_write(path, text)

    monkeypatch.setattr(limits, "_write", busy)
    assert make_group(GIB, tmp_path).folder.parent == leaf.parent


def test_without_cgroups_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LimitError, match="systemd-run"):
        make_group(GIB, tmp_path)


def test_groups_of_the_dead_are_swept(tmp_path: Path) -> None:
    parent = v1(tmp_path)
    (parent / "moegguf-999999999-1").mkdir()
    (parent / f"moegguf-{os.getpid()}-0").mkdir()
    make_group(GIB, tmp_path).remove()
    assert sorted(path.name for path in parent.glob("moegguf-*")) == [f"moegguf-{os.getpid()}-0"]


def test_group_is_removed_after_an_error(tmp_path: Path) -> None:
    v1(tmp_path)
    with pytest.raises(ZeroDivisionError), memory_limit(GIB, tmp_path) as group:
        print(1 // 0)
    assert not group.folder.exists()


def test_no_limit_is_no_group(tmp_path: Path) -> None:
    with memory_limit(None, tmp_path) as group:
        assert group is None


@pytest.mark.parametrize(
    ("make", "peak", "events"),
    [
        (v1, "memory.max_usage_in_bytes", ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")),
        (
            lambda root: v2(root, leaf_has_processes=False),
            "memory.peak",
            ("memory.events", "low 0\noom 3\noom_kill 2\n"),
        ),
    ],
)
def test_peak_and_kills(tmp_path: Path, make, peak: str, events: tuple[str, str]) -> None:  # noqa: ANN001
    make(tmp_path)
    group = make_group(GIB, tmp_path)
    assert (group.peak_bytes, group.oom_kills) == (0, 0)  # an old kernel says nothing
    write(group.folder / peak, "123456789\n")
    write(group.folder / events[0], events[1])
    assert (group.peak_bytes, group.oom_kills) == (123456789, 2)


def test_a_command_joins_the_group_before_it_runs(tmp_path: Path) -> None:
    v1(tmp_path)
    with memory_limit(GIB, tmp_path) as group:
        words = subprocess.run(group.command(["echo", "a b", "$HOME"]), capture_output=True, check=True, text=True)
        assert words.stdout == "a b $HOME\n"
        assert int((group.folder / "cgroup.procs").read_text()) > 0


def test_dropped_pages_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    kept = drop_page_cache([path])
    assert kept in (0, 1 << 20)  # a file system in memory (tmpfs) keeps all
    fd = os.open(path, os.O_RDONLY)
    try:
        os.read(fd, 1 << 20)
        assert cached_bytes(fd) == 1 << 20
    finally:
        os.close(fd)


def test_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert drop_page_cache([tmp_path / "empty"]) == 0
