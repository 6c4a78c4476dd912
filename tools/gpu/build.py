"""Builds of the library with one of ggml's GPU backends, each in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VULKAN_HEADERS = Path(__file__).parent / "vulkan_headers"  # for releases of Vulkan's that are older than ggml's


@dataclass(frozen=True)
class Backend:
    """flags: of cmake; environment: of every process that uses the build."""

    name: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def cuda(architecture: str) -> Backend:
    """For cards of one architecture, such as "90" for compute capability 9.0: it is built in minutes, all in hours."""
    return Backend("cuda", ("-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"))


def vulkan(driver: Path, devices: str = "0") -> Backend:
    """On the devices of one driver, by their numbers there: software devices are hidden unless they are named.

    What Mesa has compiled stays in the build's folder: a software device takes minutes for the kernels of a model.
    """
    return Backend(
        "vulkan",
        ("-DGGML_VULKAN=ON", f"-DVulkan_INCLUDE_DIR={VULKAN_HEADERS}"),
        {
            "VK_DRIVER_FILES": str(driver),
            "VK_ICD_FILENAMES": str(driver),
            "GGML_VK_VISIBLE_DEVICES": devices,
            "MESA_SHADER_CACHE_DIR": str(ROOT / "build/vulkan/shaders"),
        },
    )


def folder_of(backend: Backend) -> Path:
    """The build's folder."""
    return ROOT / "build" / backend.name


def library_of(backend: Backend) -> Path:
    """Where the libraries are, for MOEGGUF_LIBRARY."""
    return folder_of(backend) / "bin"


def build(backend: Backend, timeout_s: float | None = None) -> None:
    """Builds what is missing; after a timeout the next call goes on from there.

    Raises subprocess.CalledProcessError, subprocess.TimeoutExpired.
    """
    folder = folder_of(backend)
    configure = [
        "cmake", "-S", str(ROOT / "moegguf/native"), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython3_EXECUTABLE={sys.executable}", *backend.flags,
    ]  # fmt: skip
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    ninja = subprocess.Popen(["ninja", "-C", str(folder), "moegguf_all"])
    try:
        status = ninja.wait(timeout_s)
    except BaseException:  # also an interrupt
        ninja.terminate()  # it ends its compilers and forgets what they had not finished
        ninja.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, ninja.args)
