#!/usr/bin/env python3
"""Build ggml and the store with a sanitizer, and run tests/native over them.

python tools/sanitize.py thread
python tools/sanitize.py address -- tests/native/test_store_faults.py -x
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FOLDER = {"thread": "tsan", "address": "asan", "undefined": "ubsan"}
# Leaks are looked for in our code by the fault tests; what an interpreter keeps until it ends is no leak.
OPTIONS = {
    "TSAN_OPTIONS": f"suppressions={ROOT}/tests/native/tsan.supp halt_on_error=0 exitcode=66 report_signal_unsafe=0",
    "ASAN_OPTIONS": "detect_leaks=0 halt_on_error=1 abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1 halt_on_error=1",
}
NATIVE_ROOM = ["tests/native", "--ignore", "tests/native/test_rpc.py"]


def build(sanitizer: str) -> Path:
    """The folder with the instrumented libraries."""
    folder = ROOT / "build" / FOLDER[sanitizer]
    configure = [
        "cmake", "-S", str(ROOT / "moegguf/native"), "-B", str(folder), "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DMOEGGUF_STORE_ONLY=ON", f"-DMOEGGUF_SANITIZE={sanitizer}",
        "-DGGML_OPENMP=OFF", "-DGGML_NATIVE=OFF", f"-DPython3_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", str(folder), "moegguf"], check=True)
    return folder / "bin"


def preload(sanitizer: str) -> str:
    """The sanitizer's runtime, which has to come before the interpreter's own allocations, and the C++ library, whose
    exceptions it wants to find when it starts."""
    names = [f"lib{FOLDER[sanitizer]}.so", "libstdc++.so"]
    compiler = os.environ.get("CXX", "c++")
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout
        for name in names
    ]
    return " ".join(str(Path(path.strip()).resolve()) for path in found)


def main() -> int:
    """Run the command line; returns pytest's exit status, or 66 when ThreadSanitizer saw a race."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizer", choices=FOLDER)
    parser.add_argument("pytest", nargs="*", default=NATIVE_ROOM, help="arguments for pytest, after --")
    args = parser.parse_args()
    environment = {
        **os.environ, **OPTIONS, "MOEGGUF_LIBRARY": str(build(args.sanitizer)), "LD_PRELOAD": preload(args.sanitizer),
        "PYTHONPATH": str(ROOT), "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args.pytest]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
