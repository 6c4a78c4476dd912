"""Builds the library with one of ggml's GPU backends. Each build has its own folder
below build/.

python -m tools.gpu.build 90        # the CUDA build for compute capability 9.0 and today's servers
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "build/cuda-carried/bin"  # the build to copy to a machine with a card
# Adds definitions that ggml needs to older Vulkan headers.
VULKAN_HEADERS = Path(__file__).parent / "vulkan_headers"
VULKAN_FLAGS = ("-DGGML_VULKAN=ON", f"-DVulkan_INCLUDE_DIR={VULKAN_HEADERS}")


@dataclass(frozen=True)
class Backend:
    """The description of one build with a GPU backend."""

    name: str
    flags: tuple[str, ...]  # flags for cmake
    # Set for every process that uses the build.
    environment: Mapping[str, str] = field(default_factory=dict)
    target: str = "moegguf_all"


def cuda(architecture: str) -> Backend:
    """Returns the CUDA build for an architecture ("90" is compute capability 9.0) or
    for several ("80;90").

    Compiling for one architecture takes tens of minutes of CPU time. Propagates errors
    from `nvcc` and `cuda_version`.
    """
    flags = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"]
    wheel = next(_cublas_wheels(), None)
    if wheel is None:
        return Backend("cuda", tuple(flags))
    # cmake's FindCUDAToolkit looks for cublas and the driver's stub only next to nvcc,
    # but wheels are elsewhere.
    library = next(wheel.glob("lib/libcublas.so.*"))
    flags += [
        f"-DCUDA_cublas_LIBRARY={library}",
        f"-DCUDA_cublasLt_LIBRARY={library.with_name(library.name.replace('cublas', 'cublasLt'))}",
        f"-DCMAKE_CUDA_FLAGS=-I{wheel / 'include'}",
        "-DGGML_CUDA_NO_VMM=ON",
    ]
    folders = [str(wheel / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return Backend("cuda", tuple(flags), {"LD_LIBRARY_PATH": os.pathsep.join(folders)})


def to_carry(backend: Backend) -> Backend:
    """Returns `backend` as a small build for the CPUs of today's servers, not for this
    machine's CPU.

    These are Xeon CPUs since Sapphire Rapids and EPYC CPUs since Genoa. The build lacks
    CUDA's flash attention kernels, which the measurements do not use.
    """
    extensions = ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
    flags = [
        "-DGGML_NATIVE=OFF",
        "-DGGML_CUDA_FA=OFF",
        *(f"-DGGML_{name}=ON" for name in extensions),
    ]
    return replace(
        backend, name=f"{backend.name}-carried", flags=(*backend.flags, *flags)
    )


def nvcc() -> Path:
    """Returns the path of the CUDA compiler. Raises FileNotFoundError with a message
    for the user."""
    found = (
        os.environ.get("CUDACXX")
        or shutil.which("nvcc")
        or shutil.which("nvcc", path="/usr/local/cuda/bin")
    )
    if found is None:
        raise FileNotFoundError(
            "nvcc, CUDA's compiler, is neither on PATH nor in /usr/local/cuda/bin: install the CUDA toolkit, or name "
            "its nvcc in CUDACXX"
        )
    return Path(found)


def cuda_version() -> int:
    """Returns the major version of nvcc. Raises FileNotFoundError,
    subprocess.CalledProcessError."""
    text = subprocess.run(
        [nvcc(), "--version"], check=True, capture_output=True, text=True
    ).stdout
    return int(text.partition("release ")[2].partition(".")[0])


def _cublas_wheels() -> Iterator[Path]:
    """Yields the folders of cublas wheels from PyPI that match nvcc's version. Yields
    nothing if nvcc's own toolkit includes cublas."""
    toolkit = nvcc().resolve().parents[1]
    if any(
        next(toolkit.glob(f"{folder}/libcublas.so"), None)
        for folder in ("lib*", "targets/*/lib")
    ):
        return
    for entry in sys.path:
        for library in sorted(
            Path(entry).glob(f"nvidia/*/lib/libcublas.so.{cuda_version()}")
        ):
            if (library.parents[1] / "include/cublas_v2.h").exists():
                yield library.parents[1]


def vulkan(driver: Path, devices: str = "0") -> Backend:
    """Returns the Vulkan build for one driver file. `devices` lists the numbers of the
    driver's devices to use.

    Mesa's compiled kernels are cached in the build's folder, because a software device
    takes minutes to compile them.
    """
    return Backend(
        "vulkan",
        VULKAN_FLAGS,
        {
            "VK_DRIVER_FILES": str(driver),
            "VK_ICD_FILENAMES": str(driver),
            "GGML_VK_VISIBLE_DEVICES": devices,
            "MESA_SHADER_CACHE_DIR": str(ROOT / "build/vulkan/shaders"),
        },
    )


def folder_of(backend: Backend) -> Path:
    """Returns the folder of the build."""
    return ROOT / "build" / backend.name


def library_of(backend: Backend) -> Path:
    """Returns the folder with the build's libraries, a value for MOEGGUF_LIBRARY."""
    return folder_of(backend) / "bin"


def of_processes(library: Path, home: Path) -> dict[str, str]:
    """Returns the environment variables that a process needs to run these sources with
    the library in `library`."""
    folders = [
        str(ROOT),
        str(ROOT / "tests"),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    return {
        "MOEGGUF_LIBRARY": str(library),
        "MOEGGUF_TRIAL_LOAD": "0",
        "MOEGGUF_HOME": str(home),
        # Do not load pytest plugins that happen to be installed on the machine.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }


def runtime_folders() -> list[Path]:
    """Returns the folders with the CUDA runtime or cublas on this machine: toolkits
    first, then wheels from PyPI."""
    toolkits = [
        Path("/usr/local/cuda/lib64"),
        *sorted(Path("/usr/local").glob("cuda-*/lib64")),
    ]
    wheels = [
        folder
        for entry in sys.path
        for folder in sorted(Path(entry).glob("nvidia/*/lib"))
    ]
    names = ("libcudart.so.*", "libcublas.so.*")
    return [
        folder
        for folder in (*toolkits, *wheels)
        if any(next(folder.glob(name), None) for name in names)
    ]


def build(backend: Backend, timeout_s: float | None = None) -> None:
    """Builds the library with cmake and ninja. If a timeout ends the build, the next
    call continues it.

    Raises subprocess.CalledProcessError, subprocess.TimeoutExpired.
    """
    folder = folder_of(backend)
    configure = [
        "cmake", "-S", str(ROOT / "moegguf/native"), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython3_EXECUTABLE={sys.executable}", *backend.flags,
    ]  # fmt: skip
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    ninja = subprocess.Popen(["ninja", "-C", str(folder), backend.target])
    try:
        status = ninja.wait(timeout_s)
    except BaseException:  # reached after a timeout or Ctrl-C
        # ninja stops its compilers and deletes their unfinished outputs.
        ninja.terminate()
        ninja.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, ninja.args)


def build_programs(folder: Path, architecture: str) -> None:
    """Builds `micro` and `libcalls.so` for the short run in `folder`. Raises
    subprocess.CalledProcessError."""
    ggml = ROOT / "build/vendor/llama.cpp/ggml/include"
    common = [str(nvcc()), "-O2", "-std=c++17", f"-arch=sm_{architecture}"]
    micro = [
        "-cudart=shared", f"-I{ggml}", f"-L{folder}", "tools/gpu/micro.cu", "-lggml", "-lggml-base",
        "-Xlinker", "-rpath=$ORIGIN", "-Xlinker", "--allow-shlib-undefined", "-o", str(folder / "micro"),
    ]  # fmt: skip
    calls = [
        "-cudart=none", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden", "tools/gpu/calls.cpp", "-ldl",
        "-o", str(folder / "libcalls.so"),
    ]  # fmt: skip
    for command in (micro, calls):
        subprocess.run([*common, *command], cwd=ROOT, check=True)


def main() -> int:
    """Builds for the CUDA architecture on the command line, and prints how long the
    build took. Returns the exit status."""
    start = time.monotonic()
    try:
        architecture = sys.argv[1]
        # "real": machine code only, no PTX.
        backend = to_carry(cuda(f"{architecture}-real"))
        build(backend)
        build_programs(library_of(backend), architecture)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{library_of(backend)}: compiled and linked in {(time.monotonic() - start) / 60:.1f} minutes, "
        f"{(used.ru_utime + used.ru_stime) / 60:.1f} of processor time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
