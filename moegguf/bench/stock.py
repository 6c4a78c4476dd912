"""Builds unpatched llama.cpp, at the release that moegguf uses. pip builds it once from
the pinned source, and the result is kept.

libmoegguf is copied into the folder of these libraries, so that moegguf's own program
can load and measure them. The program runs with MOEGGUF_HOOKS=0, so that llama.cpp runs
without libmoegguf's hooks.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from moegguf.atomic_write import write_atomically
from moegguf.engine.doctor import read_pin
from moegguf.errors import LibraryError
from moegguf.native import library
from moegguf.processor import read_processor
from moegguf.settings import cache_folder

# The pinned release segfaults in its first matrix product with AMX (llama.cpp pull
# request 26954).
FLAGS = "-mno-amx-tile -mno-amx-int8"


def stock_library(progress: Callable[[str], object]) -> Path:
    """Returns the folder with the libraries of unpatched llama.cpp. Calls `progress`
    with a message before the libraries are built. Raises LibraryError when pip
    fails."""
    own = library.find_library()
    pin = read_pin()
    flags = FLAGS if "amx_tile" in read_processor().flags else ""
    own_flags = [
        f'-DCMAKE_{language}_FLAGS="{flags}"' for language in ("C", "CXX") if flags
    ]
    # The flags above come after the user's CMAKE_ARGS
    arguments = " ".join([os.environ.get("CMAKE_ARGS", ""), *own_flags]).strip()
    key = hashlib.sha256(
        repr((pin, arguments, sorted(read_processor().flags))).encode()
    ).hexdigest()[:16]
    folder = cache_folder() / "stock" / f"{pin['version']}-{key}"
    if not folder.exists():
        progress(
            f"building llama.cpp {pin['llama_cpp_commit']} without patches, once; this takes some minutes"
        )
        _build(pin, arguments, folder)
    # Atomic, because a process may have loaded the old file.
    for built in own.glob("libmoegguf.*"):
        write_atomically(folder / built.name, built.read_bytes())
    return folder


def _build(pin: dict[str, str], arguments: str, folder: Path) -> None:
    """Compiles the package with pip and moves its libraries to `folder`. The folder
    appears only when it is complete. Raises LibraryError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text(
            f"{pin['package']}=={pin['version']} --hash=sha256:{pin['sha256']}\n"
        )
        command = [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-cache-dir",
            "--no-binary", pin["package"], "--find-links", str(cache_folder()), "--target", f"{scratch}/package",
            "--requirement", str(wanted),
        ]  # fmt: skip
        environment = os.environ | {"CMAKE_ARGS": arguments}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode != 0:
            last = "\n".join(done.stdout.decode(errors="replace").splitlines()[-5:])
            raise LibraryError(
                f"llama.cpp without patches cannot be built; correct the fault that pip reports, and retry:\n{last}"
            )
        Path(scratch, "package/llama_cpp/lib").rename(folder)
