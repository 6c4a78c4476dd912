"""Files replaced as a whole, and what killed writers leave behind."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moegguf.atomic_write import locked_temporary, remove_abandoned, write_atomically

KILLED = """
import os, signal, sys
from pathlib import Path
from moegguf import atomic_write
atomic_write.os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
atomic_write.write_atomically(Path(sys.argv[1]), b"new")
"""


def test_the_file_of_a_killed_writer_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "eamc.safetensors"
    path.write_bytes(b"old")
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2 and path.read_bytes() == b"old"
    write_atomically(path, b"newer")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"newer"


def test_the_file_of_a_live_writer_stays(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json"
    handle, name = locked_temporary(tmp_path, f".{path.name}.", "")
    write_atomically(path, b"new")
    assert sorted(tmp_path.iterdir()) == sorted([path, Path(name)])
    os.close(handle)
    (tmp_path / ".other.json.abc").write_bytes(b"")
    write_atomically(path, b"new")
    assert sorted(tmp_path.iterdir()) == [tmp_path / ".other.json.abc", path], "and those of other files"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    link = tmp_path / ".link.x"
    link.symlink_to(target)
    remove_abandoned([link, tmp_path / "nothing"])
    assert target.read_bytes() == b"kept" and link.is_symlink()


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for data in (b"old", b"new"):
        write_atomically(tmp_path / "a.json", data)
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [data]
