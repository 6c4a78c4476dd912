"""Creates a folder for a GPU machine without a network: for the whole trial, or for the
short run with a built library.

The trial's folder contains an archive of the patched sources, and wheels. The GPU
machine needs a compiler, cmake, ninja and Python 3.12. `gpu_trial.py` in the folder is
a copy of `start.py`, which unpacks the sources and wheels, and starts
`tools/gpu_trial.py` from the sources.

python -m tools.gpu.pack FOLDER        # the folder for the short run, with the library of `make check-cuda`
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools import vendor
from tools.gpu.build import CARRIED

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60_000_000
SHORT_RUN_BYTES = 64 << 20
OPENMP = "libgomp.so.1"
SOURCES, WHEELS, START, SHORT_RUN = (
    "sources.tar.xz",
    "wheels",
    "gpu_trial.py",
    "short_run.sh",
)

PARTS = (
    "moegguf/",
    "patches/",
    "predictors/demo/",
    "tests/",
    "tools/",
    "pyproject.toml",
    "LICENSE",
)
NOT_PACKED = re.compile(r"moegguf/demo/.*\.gguf|tests/(frontends|pure|native)/.*")
# ggml backends that are left out: no trial builds them, and cmake reads a backend's
# files only to build it.
NOT_BUILT = re.compile(
    r"ggml/src/ggml-(blas|cann|et|hexagon|hip|metal|musa|opencl|openvino|rpc|sycl|virtgpu|webgpu|zdnn|zendnn)/.*"
)

# Dependencies of moegguf that the test models, tests and measurements import. BESIDE
# lists the other packages they need.
PRODUCT = (
    "diskcache",
    "gguf",
    "jinja2",
    "numpy",
    "platformdirs",
    "psutil",
    "safetensors",
    "typing-extensions",
    "xxhash",
)
BESIDE = (
    "markupsafe",
    "pyyaml",
    "tqdm",
    "pytest",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
)
# Compiled packages depend on the version of Python, so the short run uses the packages
# already installed on the GPU machine.
COMPILED = ("markupsafe", "numpy", "psutil", "pyyaml", "safetensors", "xxhash")
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 17, 12, 5)] + [
    f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")
]


def _name(requirement: str) -> str:
    return re.split(r"[<>=\[ ]", requirement)[0].replace("_", "-")


def requirements() -> list[str]:
    """Returns the requirements for pip: the packages in PRODUCT with the versions from
    pyproject.toml, and the packages in BESIDE."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        lines = tomllib.load(file)["project"]["dependencies"]
    bounds = {_name(line): line for line in lines}
    return [*(bounds[name] for name in PRODUCT), *BESIDE]


def own_sources() -> Iterator[tuple[str, Path]]:
    """Yields (path in the archive, file) for the sources that tests and measurements
    need, without the library.

    llama.cpp's Python bindings are included.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in sorted(listed.stdout.splitlines()):
        if (
            name.startswith(PARTS)
            and not NOT_PACKED.fullmatch(name)
            and (ROOT / name).is_file()
        ):
            yield name, ROOT / name
    bindings = vendor.VENDOR / "bindings"
    for path in sorted(bindings.rglob("*.py")):
        yield f"moegguf/bindings/{path.relative_to(bindings).as_posix()}", path


def sources() -> Iterator[tuple[str, Path]]:
    """Yields (path in the archive, file) for the sources that a build, the tests and
    the measurements need."""
    tree = vendor.prepare()
    yield from own_sources()
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if (
            path.is_file()
            and name.startswith(vendor.BUILT)
            and not NOT_BUILT.fullmatch(name)
        ):
            yield f"build/vendor/llama.cpp/{name}", path
    yield "build/vendor/llama.cpp.stamp", vendor.VENDOR / "llama.cpp.stamp"


def stripped_library(library: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields (path in the archive, file) for the files of a build, and for libgomp.

    Libraries and programs are stripped of unneeded symbols; the stripped copies are
    written to `folder`.

    Raises subprocess.CalledProcessError, FileNotFoundError.
    """
    for path in sorted(library.iterdir()):
        if path.is_file():
            is_program = path.suffix == ".so" or path.name == "micro"
            if is_program:
                subprocess.run(
                    [
                        "strip",
                        "--strip-unneeded",
                        "-o",
                        str(folder / path.name),
                        str(path),
                    ],
                    check=True,
                )
            yield f"library/{path.name}", folder / path.name if is_program else path
    command = ["c++", f"-print-file-name={OPENMP}"]  # the GPU machine may lack libgomp
    found = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()
    yield f"library/{OPENMP}", Path(found)


def _write_sources(archive: Path, files: Iterable[tuple[str, Path]]) -> None:
    with tarfile.open(archive, "w:xz") as tar:
        for name, path in files:
            data = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = (
                len(data),
                int(path.stat().st_mtime),
                0o644,
            )
            tar.addfile(member, io.BytesIO(data))


def _fetch_wheels(folder: Path, wanted: Sequence[str]) -> None:
    options = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *options,
        "--dest", str(folder), *wanted,
    ]  # fmt: skip
    subprocess.run(command, check=True)


def pack(folder: Path) -> int:
    """Creates the trial's folder, or replaces the folder of an earlier call. Returns
    its size in bytes.

    Raises ValueError if `folder` contains other files or becomes too large.
    """
    _make(folder, START)
    _fetch_wheels(folder / WHEELS, requirements())
    _write_sources(folder / SOURCES, sources())
    shutil.copyfile(Path(__file__).with_name("start.py"), folder / START)
    return _size(folder, MOST_BYTES)


def pack_short_run(folder: Path, library: Path) -> int:
    """Creates the short run's folder with the built libraries in `library`, or replaces
    the folder of an earlier call. Returns the folder's size in bytes.

    Raises ValueError if `folder` contains other files or becomes too large.
    """
    _make(folder, SHORT_RUN)
    _fetch_wheels(
        folder / WHEELS,
        [line for line in requirements() if _name(line) not in COMPILED],
    )
    with tempfile.TemporaryDirectory() as stripped:
        _write_sources(
            folder / SOURCES,
            [*own_sources(), *stripped_library(library, Path(stripped))],
        )
    shutil.copy(Path(__file__).with_name(SHORT_RUN), folder / SHORT_RUN)
    return _size(folder, SHORT_RUN_BYTES)


def _make(folder: Path, script: str) -> None:
    if folder.exists() and not (folder / script).exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} is no folder of an earlier pack, and not empty: name another"
        )
    shutil.rmtree(folder, ignore_errors=True)
    (folder / WHEELS).mkdir(parents=True)


def _size(folder: Path, most_bytes: int) -> int:
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if n_bytes > most_bytes:
        raise ValueError(
            f"{folder} has {n_bytes / 1e6:.1f} MB, more than {most_bytes / 1e6:.0f} MB"
        )
    return n_bytes


def main() -> int:
    """Creates the short run's folder. Returns the exit status."""
    folder = Path(sys.argv[1])
    try:
        print(
            f"{pack_short_run(folder, CARRIED) / 1e6:.1f} MB in {folder}: run {folder}/{SHORT_RUN} beside the card"
        )
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
