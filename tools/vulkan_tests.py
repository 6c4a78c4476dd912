#!/usr/bin/env python3
"""Build the library with ggml's Vulkan backend in build/vulkan, and run
tests/live/test_gpu.py on a software driver.

The program needs Mesa's software driver and the tools that build the backend. If
something is missing, the program names it and runs nothing. The first build is slow,
because it compiles hundreds of shaders. The first run is slow, too, because the driver
compiles each kernel at its first use. This takes 15 to 35 seconds of CPU time for each
new number of tokens in a pass and each quantisation. Kernels are kept in
build/vulkan/shaders, so later runs take only half a second for each.

python tools/vulkan_tests.py
python tools/vulkan_tests.py --devices 0,0 -- -k second     # the software device twice, as two GPUs
python tools/vulkan_tests.py -- -k "q4_0 or many or three"  # some tests, which take only minutes on the first run
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.gpu.build import ROOT, build, library_of, vulkan

DRIVERS = Path("/usr/share/vulkan/icd.d")
PACKAGES = "mesa-vulkan-drivers libvulkan-dev glslc spirv-headers"
PREFIXES = ("/usr", "/usr/local")
LONGEST_TEST_S = 1800  # time limit of one test, including the compilation of kernels


def software_drivers() -> Iterator[Path]:
    """Yields the paths of the JSON files in DRIVERS that describe Mesa's software
    Vulkan driver."""
    yield from sorted(DRIVERS.glob("lvp_icd*.json"))


def missing() -> Iterator[str]:
    """Yields the names of everything that a build or a run needs and this machine
    lacks."""
    if not list(software_drivers()):
        yield "Mesa's software Vulkan"
    if not shutil.which("glslc"):
        yield "glslc"
    for name, pattern in {
        "Vulkan's headers": "include/vulkan/vulkan.h",
        "SPIR-V's headers": "share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake",
    }.items():
        if not any((Path(prefix) / pattern).exists() for prefix in PREFIXES):
            yield name


def test(driver: Path, devices: str, arguments: list[str]) -> int:
    """Runs the GPU tests with the driver's devices of these numbers ("0,0"). Returns
    the exit status of pytest."""
    backend = vulkan(driver, devices)
    environment = (
        os.environ | backend.environment | {"MOEGGUF_LIBRARY": str(library_of(backend))}
    )
    environment["MOEGGUF_LONGEST_TEST_S"] = str(LONGEST_TEST_S)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/live/test_gpu.py",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> int:
    """Builds the library and runs the tests. Returns the exit status of pytest, or 0 if
    something is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices",
        default="0,0",
        help="numbers of the driver's devices; one twice is two GPUs",
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    args = parser.parse_args()
    if lacking := ", ".join(missing()):
        print(
            f"passed over, for want of {lacking}; on Debian and Ubuntu: apt install {PACKAGES}",
            file=sys.stderr,
        )
        return 0
    driver = next(software_drivers())
    build(vulkan(driver))
    return test(driver, args.devices, args.pytest)


if __name__ == "__main__":
    sys.exit(main())
