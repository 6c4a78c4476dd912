#!/usr/bin/env python3
"""Build ggml and the store with a sanitizer, and run tests/native with them.

Reports are printed at the end and stay in build/{tsan,asan,ubsan}/reports.

python tools/sanitize.py thread
python tools/sanitize.py --runs 20 --busy 1 thread    # races that occur only on a loaded machine
python tools/sanitize.py address -- tests/native/test_store_faults.py -x
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FOLDER = {"thread": "tsan", "address": "asan", "undefined": "ubsan"}
# Leak detection is off, because the interpreter never frees some memory. The fault
# tests check for leaks in the store.
OPTIONS = {
    "TSAN_OPTIONS": f"suppressions={ROOT}/tests/native/tsan.supp halt_on_error=0 exitcode=66 report_signal_unsafe=0",
    "ASAN_OPTIONS": "detect_leaks=0 halt_on_error=1 abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1 halt_on_error=1",
}
# Default time limit of a test in seconds: ten times the limit without a sanitizer.
LONGEST_TEST_S = "1200"
# The build has neither libllama, OpenMP nor the RPC backend, which these tests need.
DESELECTED = [
    "test_other_devices.py::test_rpc_slots_hold_the_files_bytes",
    "test_short_spins.py",
    "test_type_shares.py",
]
NATIVE_ROOM = [
    "tests/native",
    *(f"--deselect=tests/native/{name}" for name in DESELECTED),
]


def build(sanitizer: str) -> Path:
    """Builds ggml, the store and its test equipment with the sanitizer. Returns the
    folder with these libraries."""
    folder = ROOT / "build" / FOLDER[sanitizer]
    configure = [
        "cmake", "-S", str(ROOT / "moegguf/native"), "-B", str(folder), "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DMOEGGUF_STORE_ONLY=ON", f"-DMOEGGUF_SANITIZE={sanitizer}",
        "-DMOEGGUF_CHECK=ON", "-DGGML_OPENMP=OFF", "-DGGML_NATIVE=OFF", f"-DPython3_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        ["ninja", "-C", str(folder), "moegguf", "moegguf-testing"], check=True
    )
    return folder / "bin"


def preload(sanitizer: str) -> str:
    """Returns the value of LD_PRELOAD: the paths of the sanitizer's runtime and the C++
    library.

    The runtime must be loaded before Python allocates memory. When the runtime starts,
    it looks up functions of the C++ library for exceptions, so this library must be
    loaded, too.
    """
    names = [f"lib{FOLDER[sanitizer]}.so", "libstdc++.so"]
    compiler = os.environ.get("CXX", "c++")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in names
    ]
    return " ".join(str(Path(path.strip()).resolve()) for path in found)


@contextmanager
def busy(n_processes: int) -> Iterator[None]:
    """Runs processes that never sleep during the `with` block, so that threads are
    preempted more often."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(n_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(sanitizer: str, library: Path, arguments: list[str]) -> tuple[int, list[Path]]:
    """Runs pytest. Returns the exit status of pytest or the sanitizer, and the paths of
    the sanitizer's reports."""
    prefix = library.parent / "reports" / time.strftime("%Y-%m-%dT%H-%M-%S")
    prefix.parent.mkdir(exist_ok=True)
    options = {name: f"{value} log_path={prefix}" for name, value in OPTIONS.items()}
    environment = {
        "MOEGGUF_LONGEST_TEST_S": LONGEST_TEST_S, **os.environ, **options, "MOEGGUF_LIBRARY": str(library),
        "LD_PRELOAD": preload(sanitizer), "PYTHONPATH": str(ROOT), "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    return status, sorted(prefix.parent.glob(f"{prefix.name}.*"))


def main() -> int:
    """Builds with the sanitizer and runs the tests. Returns the first non-zero exit
    status of a run, or 0 if all runs passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sanitizer", choices=FOLDER)
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="run the tests N times"
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="beside N processes that never sleep",
    )
    parser.add_argument(
        "pytest", nargs="*", default=NATIVE_ROOM, help="arguments for pytest, after --"
    )
    args = parser.parse_args()
    library = build(args.sanitizer)
    with busy(args.busy):
        outcomes = [run(args.sanitizer, library, args.pytest) for _ in range(args.runs)]
    for report in [path for _, reports in outcomes for path in reports]:
        print(
            f"\n== {report.relative_to(ROOT)}\n{report.read_text(errors='replace')}",
            file=sys.stderr,
        )
    statuses = [status for status, _ in outcomes]
    print(f"exit status of {len(statuses)} run(s): {statuses}", file=sys.stderr)
    return next(filter(None, statuses), 0)


if __name__ == "__main__":
    sys.exit(main())
