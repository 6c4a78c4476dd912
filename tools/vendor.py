"""Fetches the pinned llama.cpp, unpacks it, and applies `patches/series`.

The source is the llama.cpp inside the llama-cpp-python source distribution named in `patches/UPSTREAM`. pip fetches
it, its sha256 is checked before anything is unpacked, and a stamp file lets later calls return at once. The result is
in `build/vendor/`.

Usage: python tools/vendor.py [--print-llama-dir | --print-sdist]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
VENDOR = Path(os.environ.get("MOEGGUF_VENDOR_DIR", ROOT / "build" / "vendor"))

# What the build reads; the rest of the distribution (tests, media, web UI) is not unpacked.
WANTED = ("CMakeLists.txt", "LICENSE", "cmake/", "ggml/", "include/", "src/", "vendor/", "common/", "tools/mtmd/")


class VendorError(RuntimeError):
    """The pinned source cannot be fetched, or its digest is not the pinned one."""


def read_pin() -> dict[str, str]:
    """Returns the `key = value` lines of patches/UPSTREAM."""
    lines = (PATCHES / "UPSTREAM").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line.strip() and not line.startswith("#"))
    return {key.strip(): value.strip() for key, value in pairs}


def series() -> list[Path]:
    """Returns the patches in the order in which they apply."""
    lines = (PATCHES / "series").read_text().splitlines()
    return [PATCHES / line.strip() for line in lines if line.strip() and not line.startswith("#")]


def sha256(path: Path) -> str:
    """The file's SHA-256 in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(pin: dict[str, str]) -> Path:
    """Returns the checked source distribution, downloaded with pip when it is missing. Raises VendorError."""
    name = f"{pin['package'].replace('-', '_')}-{pin['version']}.tar.gz"
    path = VENDOR / name
    if not path.exists():
        VENDOR.mkdir(parents=True, exist_ok=True)
        print(f"fetching {pin['package']} {pin['version']} (77 MB)", file=sys.stderr)
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
            "--disable-pip-version-check", "--dest", str(VENDOR), f"{pin['package']}=={pin['version']}",
        ]  # fmt: skip
        environment = os.environ | {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
        if subprocess.run(command, stdout=sys.stderr, env=environment).returncode != 0:
            raise VendorError(f"pip could not fetch {pin['package']} {pin['version']}: is a package index reachable?")
    found = sha256(path)
    if found != pin["sha256"]:
        raise VendorError(f"{path.name} has sha256 {found}, patches/UPSTREAM has {pin['sha256']}: delete it and retry")
    return path


def unpack(sdist: Path, target: Path) -> None:
    """Unpacks the llama.cpp part of the distribution into `target`."""
    prefix = f"{sdist.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
    with tarfile.open(sdist) as archive:
        for member in archive:
            inside = member.name.removeprefix(prefix)
            if member.name.startswith(prefix) and inside.startswith(WANTED) and (member.isfile() or member.isdir()):
                member.name = inside
                archive.extract(member, target, filter="data")


def apply(patch: Path, tree: Path) -> None:
    """Applies one patch to `tree` without fuzz, and without git using the repository around it. Raises VendorError."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    done = subprocess.run(["git", "apply", str(patch)], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise VendorError(f"{patch.name} does not apply: {done.stderr.strip()}")


def wanted_state(pin: dict[str, str]) -> str:
    """The stamp of a finished tree: what was unpacked, and the digests of the pin and of every patch."""
    return "\n".join([pin["sha256"], " ".join(WANTED), *(f"{patch.name} {sha256(patch)}" for patch in series())])


def prepare() -> Path:
    """Returns the folder of the patched llama.cpp, made again when the pin or a patch has changed."""
    pin = read_pin()
    tree = VENDOR / "llama.cpp"
    stamp = VENDOR / "llama.cpp.stamp"
    state = wanted_state(pin)
    if tree.is_dir() and stamp.is_file() and stamp.read_text() == state:
        return tree
    fresh = VENDOR / "llama.cpp.new"
    shutil.rmtree(fresh, ignore_errors=True)
    unpack(fetch(pin), fresh)
    for patch in series():
        apply(patch, fresh)
    keep_unchanged(tree, fresh)
    shutil.rmtree(tree, ignore_errors=True)
    fresh.rename(tree)
    stamp.write_text(state)
    return tree


def keep_unchanged(old: Path, new: Path) -> None:
    """Copies the modification times of unchanged files, so that a changed patch recompiles only what it touches."""
    for path in new.rglob("*"):
        previous = old / path.relative_to(new)
        if path.is_file() and previous.is_file() and path.read_bytes() == previous.read_bytes():
            times = previous.stat()
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Fetch the pinned llama.cpp and apply our patches.")
    parser.add_argument("--print-llama-dir", action="store_true", help="print where the patched tree is")
    parser.add_argument("--print-sdist", action="store_true", help="print where the source distribution is")
    options = parser.parse_args()
    try:
        tree = prepare()
        sdist = fetch(read_pin()) if options.print_sdist else None
    except VendorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.print_llama_dir:
        print(tree)
    if sdist:
        print(sdist)
    return 0


if __name__ == "__main__":
    sys.exit(main())
