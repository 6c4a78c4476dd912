"""The folder for a machine with a compiler, cmake, ninja, Python 3.12 and no network: patched sources, and wheels.

Its `gpu_trial.py` is `start.py` of this package, which unpacks both and calls `tools/gpu_trial.py` of the sources.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tools import vendor

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60_000_000
SOURCES, WHEELS, START = "sources.tar.xz", "wheels", "gpu_trial.py"

PARTS = ("moegguf/", "patches/", "predictors/demo/", "tests/", "tools/", "pyproject.toml", "LICENSE")
NOT_PACKED = re.compile(r"moegguf/demo/.*\.gguf|tests/(frontends|pure|native)/.*")
# Backends of ggml that no trial builds; each is only read by cmake where it is asked for.
NOT_BUILT = re.compile(
    r"ggml/src/ggml-(blas|cann|et|hexagon|hip|metal|musa|opencl|openvino|rpc|sycl|virtgpu|webgpu|zdnn|zendnn)/.*"
)

# Those of moegguf's own dependencies that its models, the tests and the measurements import, and what these import.
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
BESIDE = ("markupsafe", "pyyaml", "tqdm", "pytest", "iniconfig", "packaging", "pluggy", "pygments")
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 17, 12, 5)] + [
    f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")
]


def requirements() -> list[str]:
    """What pip is asked for, with the versions of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        lines = tomllib.load(file)["project"]["dependencies"]
    bounds = {re.split(r"[<>=\[ ]", line)[0].replace("_", "-"): line for line in lines}
    return [*(bounds[name] for name in PRODUCT), *BESIDE]


def sources() -> Iterator[tuple[str, Path]]:
    """(path in the archive, file) of everything a build, the tests and the measurements need."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in sorted(listed.stdout.splitlines()):
        if name.startswith(PARTS) and not NOT_PACKED.fullmatch(name) and (ROOT / name).is_file():
            yield name, ROOT / name
    tree = vendor.prepare()
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if path.is_file() and not NOT_BUILT.fullmatch(name):
            yield f"build/vendor/llama.cpp/{name}", path
    yield "build/vendor/llama.cpp.stamp", vendor.VENDOR / "llama.cpp.stamp"
    bindings = vendor.VENDOR / "bindings"
    for path in sorted(bindings.rglob("*.py")):
        yield f"moegguf/bindings/{path.relative_to(bindings).as_posix()}", path


def _write_sources(archive: Path) -> None:
    with tarfile.open(archive, "w:xz") as tar:
        for name, path in sources():
            data = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(data), int(path.stat().st_mtime), 0o644
            tar.addfile(member, io.BytesIO(data))


def _fetch_wheels(folder: Path) -> None:
    options = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *options,
        "--dest", str(folder), *requirements(),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def pack(folder: Path) -> int:
    """Makes the folder; returns its bytes. Raises ValueError where there is something else, or it becomes too large."""
    if folder.exists() and not (folder / START).exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is no folder of an earlier --pack, and not empty: name another")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / WHEELS).mkdir(parents=True)
    _fetch_wheels(folder / WHEELS)
    _write_sources(folder / SOURCES)
    shutil.copyfile(Path(__file__).with_name("start.py"), folder / START)
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if n_bytes > MOST_BYTES:
        raise ValueError(f"{folder} has {n_bytes / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f} MB")
    return n_bytes
