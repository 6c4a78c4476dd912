"""Builds a wheel that contains only one of ggml's GPU backends, for an extra such as
"moegguf[cuda]".

python -m tools.gpu.plugin cuda13                     # for every card since Turing; takes hours of CPU time
python -m tools.gpu.plugin cuda13 --architectures 90-real --flag=-DGGML_CUDA_FA=OFF
python -m tools.gpu.plugin vulkan

`moegguf/native/plugins.py` finds the library in the wheel, and checks that the wheel's
UPSTREAM file matches moegguf.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moegguf.native.plugins import NAMESPACE
from moegguf.package import __version__
from tools.gpu.build import (
    ROOT,
    VULKAN_FLAGS,
    Backend,
    build,
    cuda,
    cuda_version,
    folder_of,
    library_of,
    nvcc,
)

ARCHITECTURES = "75-virtual;80;86;89;90;120"
DIST = ROOT / "dist"


@dataclass(frozen=True)
class Plugin:
    """The description of a wheel with one GPU backend."""

    backend: Backend
    name: str  # the distribution is called moegguf-NAME
    summary: str
    requirements: Sequence[str] = ()
    # Folders below site-packages that contain the requirements' libraries.
    rpaths: Sequence[str] = ()
    # Libraries that come with requirements and drivers, and are not in the wheel.
    from_elsewhere: Sequence[str] = ()

    @property
    def library(self) -> str:
        """Returns the file name of the backend's library."""
        return f"lib{self.backend.target}.so"


def cuda_plugin(version: int, architectures: str) -> Plugin:
    """Returns the plug-in for a major version of CUDA. Raises ValueError if nvcc has
    another major version."""
    if (found := cuda_version()) != version:
        raise ValueError(
            f"moegguf-cuda{version} needs an nvcc of CUDA {version}, but {nvcc()} is of CUDA"
            f" {found}; name another one in CUDACXX"
        )
    parts = ("cuda-runtime", "cublas")
    suffix, folders = "", [f"cu{version}"]
    if version < 13:
        suffix, folders = f"-cu{version}", ["cuda_runtime", "cublas"]
    return Plugin(
        _apart(cuda(architectures), f"cuda{version}", "ggml-cuda"),
        f"cuda{version}",
        f"moegguf on NVIDIA cards, with CUDA {version}",
        [f"nvidia-{part}{suffix}>={version},<{version + 1}" for part in parts],
        [f"nvidia/{folder}/lib" for folder in folders],
        [
            f"libcudart.so.{version}",
            f"libcublas.so.{version}",
            f"libcublasLt.so.{version}",
            "libcuda.so.1",
        ],
    )


def vulkan_plugin() -> Plugin:
    """Returns the plug-in for cards with a Vulkan driver."""
    backend = _apart(Backend("vulkan", VULKAN_FLAGS), "vulkan", "ggml-vulkan")
    return Plugin(
        backend,
        "vulkan",
        "moegguf on cards with a Vulkan driver",
        from_elsewhere=["libvulkan.so.1"],
    )


def _apart(backend: Backend, name: str, target: str) -> Backend:
    """Returns `backend` with the flags to build it as a separate library, which ggml
    loads at run time."""
    return replace(
        backend,
        name=f"plugin-{name}",
        flags=(*backend.flags, "-DMOEGGUF_PORTABLE=ON"),
        target=target,
    )


def make_wheel(plugin: Plugin) -> None:
    """Packs the built library into a wheel in dist/. Raises
    subprocess.CalledProcessError."""
    tree, unrepaired = (
        folder_of(plugin.backend) / "wheel",
        folder_of(plugin.backend) / "unrepaired",
    )
    for folder in (tree, unrepaired):
        shutil.rmtree(folder, ignore_errors=True)
    package = tree / NAMESPACE / plugin.name
    package.mkdir(parents=True)
    built = library_of(plugin.backend)
    library = Path(shutil.copy(built / plugin.library, package))
    subprocess.run(["strip", "--strip-unneeded", library], check=True)
    rpath = ":".join(f"$ORIGIN/../../{folder}" for folder in plugin.rpaths)
    subprocess.run(
        [
            "patchelf",
            *(["--set-rpath", rpath] if rpath else ["--remove-rpath"]),
            library,
        ],
        check=True,
    )
    pin = (built / "UPSTREAM").read_text()
    of_upstream = pin.replace("version", "package_version", 1)
    (package / "UPSTREAM").write_text(f"{of_upstream}version = {__version__}\n")
    about = tree / f"moegguf_{plugin.name}-{__version__}.dist-info"
    (about / "licenses").mkdir(parents=True)
    shutil.copy(ROOT / "build/vendor/llama.cpp/LICENSE", about / "licenses")
    requirements = [
        f"Requires-Dist: {each}"
        for each in (f"moegguf=={__version__}", *plugin.requirements)
    ]
    metadata = [
        "Metadata-Version: 2.4", f"Name: moegguf-{plugin.name}", f"Version: {__version__}",
        f"Summary: {plugin.summary}", "License-Expression: MIT", "License-File: LICENSE", "Requires-Python: >=3.11",
        *requirements,
    ]  # fmt: skip
    tag = f"py3-none-linux_{platform.machine()}"
    wheel = [
        "Wheel-Version: 1.0",
        "Generator: moegguf",
        "Root-Is-Purelib: false",
        f"Tag: {tag}",
    ]
    (about / "METADATA").write_text("\n".join(metadata) + "\n")
    (about / "WHEEL").write_text("\n".join(wheel) + "\n")
    unrepaired.mkdir()
    pack = [
        sys.executable,
        "-m",
        "wheel",
        "pack",
        str(tree),
        "--dest-dir",
        str(unrepaired),
    ]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    excluded = [
        word
        for name in ("libggml-base.so", *plugin.from_elsewhere)
        for word in ("--exclude", name)
    ]
    made = map(str, unrepaired.glob("*.whl"))
    subprocess.run(
        ["auditwheel", "repair", "--wheel-dir", str(DIST), *excluded, *made], check=True
    )


def main() -> int:
    """Runs the program with the command line's options. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=("cuda12", "cuda13", "vulkan"))
    parser.add_argument(
        "--architectures", default=ARCHITECTURES, help="as CMAKE_CUDA_ARCHITECTURES"
    )
    parser.add_argument(
        "--flag", action="append", default=[], help="another flag of cmake"
    )
    args = parser.parse_args()
    try:
        is_cuda = args.name != "vulkan"
        plugin = (
            cuda_plugin(int(args.name[4:]), args.architectures)
            if is_cuda
            else vulkan_plugin()
        )
        backend = replace(plugin.backend, flags=(*plugin.backend.flags, *args.flag))
        build(backend)
        make_wheel(replace(plugin, backend=backend))
    except (FileNotFoundError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
