"""Injects faults into moegguf's code, one at a time, and runs the tests that must catch
each fault.

    python tools/fault_check.py                 # all faults of tools/faults.toml; each C++ fault needs a build
    python tools/fault_check.py pin engine/     # faults whose name or file contains one of these words
    python tools/fault_check.py --anchors       # only checks that each fault's old text still occurs once

A fault names a file, an old text that occurs once in this file, a new text that
replaces it, and tests. One of the tests must fail. If a code change moved or removed an
old text, find the line that the fault's name describes, and copy part of it into
tools/faults.toml. Old texts are short so that changes around them do not affect them.
Remove a fault whose line no longer exists, and say why in the commit.

Files are changed in place, and restored even after Ctrl-C. The C++ is built into
build/native (run `make` once before), and the tests use the library from there. The
exit status is 1 if a fault was not caught, or if its text was not found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/native"
# Time limit for one test; a test that exceeds it has caught the fault.
LONGEST_TEST_S = 150
LONGEST_RUN_S = 600


@dataclass(frozen=True)
class Fault:
    """A fault that replaces `old` with `new` in `file`. `tests` are arguments for
    pytest; at least one of these tests must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        return ROOT / self.file

    @property
    def is_native(self) -> bool:
        """True if the faulty file is not Python, so that the native library has to be
        built."""
        return self.path.suffix != ".py"

    def lost(self) -> str | None:
        """Returns an error text if `old` does not occur exactly once in the file, else
        None."""
        if not self.path.exists():
            return f"{self.file} does not exist"
        n = self.path.read_text(encoding="utf-8").count(self.old)
        return None if n == 1 else f"{self.file} has {self.old!r} {n} times"


def read_faults() -> list[Fault]:
    """Returns the faults of tools/faults.toml, in order. A fault without `file` or
    `tests` inherits the value of its group."""
    groups = tomllib.loads((ROOT / "tools/faults.toml").read_text(encoding="utf-8"))[
        "group"
    ]
    rows = [
        {"file": group["file"], "tests": group["tests"], **fault}
        for group in groups
        for fault in group["fault"]
    ]
    return [
        Fault(row["name"], row["file"], row["old"], row["new"], tuple(row["tests"]))
        for row in rows
    ]


@contextmanager
def put_in(fault: Fault) -> Iterator[None]:
    """Writes the fault into its file, and restores the file at the end of the `with`
    block."""
    text = fault.path.read_text(encoding="utf-8")
    fault.path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        fault.path.write_text(text, encoding="utf-8")


def build() -> str:
    """Builds the store's library and the test equipment. Returns the output if the
    build failed, else ""."""
    ninja = [
        str(Path(sys.executable).with_name("ninja")),
        "-C",
        str(BUILD),
        "libmoegguf.so",
        "libmoegguf-testing.so",
    ]
    found = subprocess.run(
        ninja, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return found.stdout if found.returncode else ""


def failing(tests: Sequence[str], is_native: bool) -> str:
    """Runs pytest up to the first failure. Returns the failed test or another reason
    for the failure, or "" if all tests pass.

    For a native fault, the tests use the library of `build`, and Hypothesis does not
    shrink failing examples of tests in tests/native. Raises RuntimeError if pytest
    itself fails.
    """
    environment = {
        **os.environ,
        "MOEGGUF_LONGEST_TEST_S": str(LONGEST_TEST_S),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    if is_native:
        environment["MOEGGUF_LIBRARY"] = str(BUILD / "bin")
        if any("tests/native/" in test for test in tests):
            command.append("--hypothesis-profile=no-shrinking")
    try:
        found = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=LONGEST_RUN_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "the tests hang"
    if found.returncode == 0:
        return ""
    # Pytest itself failed, for example because there is no such test.
    if found.returncode in (2, 3, 4, 5):
        raise RuntimeError(f"{' '.join(command)}\n{found.stdout}")
    failed = [
        line.split(" ")[1]
        for line in found.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return (
        failed[0] if failed else f"exit status {found.returncode}, or a test that hangs"
    )


def check(fault: Fault) -> str:
    """Runs the tests with the fault in place. Returns the test that catches the fault,
    or "" if no test does."""
    with put_in(fault):
        if fault.is_native and (why := build()):
            raise RuntimeError(f"{fault.name}: {why}")
        return failing(fault.tests, fault.is_native)


def check_all(faults: Sequence[Fault], is_native: bool) -> int:
    """Prints which test catches each fault. Returns the number of faults that no test
    catches.

    Raises SystemExit if the build or a test fails without a fault.
    """
    try:
        why = (is_native and build()) or failing(
            sorted({test for fault in faults for test in fault.tests}), is_native
        )
        if why:
            raise SystemExit(f"without any fault: {why}")
        missed = 0
        for fault in faults:
            caught = check(fault)
            missed += not caught
            print(f"{fault.name}: {caught or 'NOT CAUGHT'}", flush=True)
        return missed
    finally:
        if is_native:
            build()


def main() -> int:
    """Runs the program with the command line's options. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help="of the names of faults; without any: all of them"
    )
    parser.add_argument(
        "--anchors",
        action="store_true",
        help="only look whether every fault still has its place",
    )
    args = parser.parse_args()
    faults = [
        fault
        for fault in read_faults()
        if not args.words
        or any(word in f"{fault.name} {fault.file}" for word in args.words)
    ]
    lost = {fault.name: why for fault in faults if (why := fault.lost())}
    for name, why in lost.items():
        print(f"{name}: no place: {why}", file=sys.stderr)
    if args.anchors:
        return 1 if lost else 0
    missed = 0
    for is_native in (False, True):
        of_kind = [
            fault
            for fault in faults
            if fault.is_native == is_native and fault.name not in lost
        ]
        if of_kind:
            missed += check_all(of_kind, is_native)
    print(f"{len(faults)} faults, {missed} not caught, {len(lost)} without a place")
    return 1 if missed or lost else 0


if __name__ == "__main__":
    sys.exit(main())
