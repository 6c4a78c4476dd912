"""Kills a process at every change that it makes to the file system, in one run for each
change.

Run as a program: `crashing.py ACTION FOLDER`. For N = 1, 2, ... a child starts from a
fresh copy of FOLDER, performs the action and kills itself with SIGKILL just before its
N-th change. The parent then checks the folder. The program exits when a child completes
the action, and prints the number of points at which children were killed.

Python's audit hooks report changes before they happen: calls such as renaming, and
opening a file for writing.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = (
    "os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod",
    "shutil.rmtree",
)  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
MOST = 300


def run(action: str, folder: Path) -> str:
    """Runs this program in another process. Asserts that it succeeds, and returns its
    output."""
    command = [sys.executable, __file__, action, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def die_at(n: int) -> None:
    """Makes this process kill itself just before its `n`-th change to the file system,
    counted from now."""
    count = itertools.count(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        opened = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        )
        if (event in CHANGES or opened) and next(count) >= n:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def crash_everywhere(
    folder: Path, action: Callable[[], None], check: Callable[[], None]
) -> int:
    """Kills `action` at each change to the file system. Calls `check` after each kill,
    and after the complete action.

    Returns the number of changes at which `action` was killed.
    """
    before = folder.with_name("before")
    shutil.copytree(folder, before, symlinks=True)
    for n in range(1, MOST):
        shutil.rmtree(folder)
        shutil.copytree(before, folder, symlinks=True)
        child = os.fork()
        if child == 0:
            die_at(n)
            action()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check()
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"the action failed at point {n}"
            return n - 1
    raise AssertionError(f"more than {MOST} points")


def prepare_pull() -> None:
    """Imports the modules that a pull imports when it begins. Otherwise each child
    would import huggingface_hub."""
    import moegguf.models.hub  # noqa: F401


def pull_again() -> None:
    from moegguf.models.catalog import Catalog
    from moegguf.models.pull import pull

    pull("user/repo-gguf", Catalog(), lambda status: None)


def old_or_new() -> None:
    """Asserts that all files of the model belong to one version, that each complete
    blob's name is the digest of its bytes, and that huggingface_hub finds no damage.
    """
    from huggingface_hub import scan_cache_dir

    from moegguf.models.catalog import Catalog
    from moegguf.models.sources import hub_cache

    entry = Catalog().find("user/repo-gguf")
    contents = {path.read_bytes()[:8] for path in entry.files}
    assert contents in ({b"GGUF old"}, {b"GGUF new"}), contents
    check_blobs()
    assert not scan_cache_dir(hub_cache()).warnings, (
        "huggingface_hub finds the cache damaged"
    )


def check_blobs() -> None:
    import hashlib

    from moegguf.models.sources import hub_cache
    from moegguf.settings import data_folder

    for blob in [*hub_cache().glob("*/blobs/*"), *data_folder().glob("blobs/sha256-*")]:
        if not blob.name.endswith(".incomplete"):
            digest = blob.name.removeprefix("sha256-")
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == digest, blob


def make_and_remove() -> None:
    """Creates the models "made", from a blob, and "kept", from "made". Then removes
    "made" and "gone"."""
    from catalog_helpers import send

    from moegguf.models.catalog import Catalog
    from moegguf.models.recipe import Recipe
    from moegguf.models.sources import demo_path

    catalog, demo = Catalog(), demo_path()
    assert demo
    digest = send(catalog, demo.read_bytes())
    catalog.create("made", Recipe(files={"demo.gguf": digest}, system="new"))
    catalog.create("kept", Recipe(from_="made", system="new"))
    catalog.remove("made")
    catalog.remove("gone")


def all_or_nothing() -> None:
    """Asserts that every entry of the catalog has all its files, and that "kept"
    exists. "kept" and "made" must have the old or the new system message."""
    from moegguf.models.catalog import Catalog

    for entry in Catalog().entries():
        assert all(path.is_file() for path in entry.files)
        if entry.name in ("made:latest", "kept:latest"):
            assert entry.system in ("old", "new")
    assert Catalog().find("kept").system in ("old", "new")
    check_blobs()


def take_over() -> None:
    """Opens the folder of batches that an older version left behind, as a server of
    this version does."""
    import asyncio

    from batch_files import Endpoint

    from moegguf.serving.batch.batches import Batches

    async def opened() -> None:
        async with Batches(
            Path(sys.argv[2]),
            Endpoint(),
            max_bytes=1 << 30,
            n_parallel=1,
            window_s=float("inf"),
            now=lambda: 1.0,
        ):
            pass

    asyncio.run(opened())


def nothing_lost() -> None:
    """Opens the folder again, as the next server does. Asserts that the folder contains
    every batch, the two answers, and exactly the files that the database lists."""
    import sqlite3

    take_over()
    folder = Path(sys.argv[2])
    with sqlite3.connect(folder / "batches.db") as database:
        assert database.execute(
            "SELECT count(*), count(needs) FROM batch"
        ).fetchone() == (3, 2)
        assert database.execute("SELECT count(*) FROM answer").fetchone() == (2,)
        known = {
            name
            for (name,) in database.execute(
                "SELECT id FROM file UNION SELECT needs FROM batch"
            )
        } - {None}
    database.close()
    assert len(known) == 5 and {path.name for path in (folder / "files").iterdir()} == {
        f"{name}.data" for name in known
    }
    assert {path.name for path in folder.iterdir()} == {"batches.db", "files"}


ACTIONS = {"pull": (pull_again, old_or_new), "create": (make_and_remove, all_or_nothing),
           "batches": (take_over, nothing_lost)}  # fmt: skip


if __name__ == "__main__":
    action, check = ACTIONS[sys.argv[1]]
    if action is pull_again:
        prepare_pull()
    print(crash_everywhere(Path(sys.argv[2]), action, check))
