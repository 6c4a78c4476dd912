"""Puts faults into the native core and the planner by hand, one at a time, and runs the test that has to catch each.

    python tools/fault_check.py                 # all of tools/faults.toml; minutes, as each C++ fault is a build
    python tools/fault_check.py pin engine/     # faults whose name or file has one of these words
    python tools/fault_check.py --anchors       # only whether each fault's place is still found

A fault is a file, a text that is there once, another text for its place, and tests. One of the tests must fail. When
the code has changed and a text is not found exactly once, find the line that now does what the fault's name leaves out.
Write its text there. The name counts; the text only finds the place. Texts are kept short, so that they outlive changes
around them. A fault without a place is removed, with the reason in the commit.

Files are changed in place, and restored also after Ctrl-C. The C++ is built into build/native (`make` once before), and
tests use the library from there. The exit status is 1 if a fault was not caught, or has no place.
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
LONGEST_TEST_S = 150  # a test that hangs has caught the fault, too
LONGEST_RUN_S = 600


@dataclass(frozen=True)
class Fault:
    """A fault that replaces `old` by `new` in `file`. `tests` are arguments of pytest; the first failure ends it."""

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
        """True if a library has to be built."""
        return self.path.suffix != ".py"

    def lost(self) -> str | None:
        """Returns the reason why the fault has no place, or None."""
        if not self.path.exists():
            return f"{self.file} does not exist"
        n = self.path.read_text(encoding="utf-8").count(self.old)
        return None if n == 1 else f"{self.file} has {self.old!r} {n} times"


def read_faults() -> list[Fault]:
    """Returns the faults of the list, in order. A fault without tests has the tests of its group."""
    groups = tomllib.loads((ROOT / "tools/faults.toml").read_text(encoding="utf-8"))["group"]
    rows = [{"file": group["file"], "tests": group["tests"], **fault} for group in groups for fault in group["fault"]]
    return [Fault(row["name"], row["file"], row["old"], row["new"], tuple(row["tests"])) for row in rows]


@contextmanager
def put_in(fault: Fault) -> Iterator[None]:
    """Puts the fault into its file until the end of the `with`."""
    text = fault.path.read_text(encoding="utf-8")
    fault.path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        fault.path.write_text(text, encoding="utf-8")


def build() -> str:
    """Builds the store's library; why that fails, or nothing."""
    ninja = [str(Path(sys.executable).with_name("ninja")), "-C", str(BUILD), "libmoegguf.so", "libmoegguf-testing.so"]
    found = subprocess.run(ninja, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return found.stdout if found.returncode else ""


def failing(tests: Sequence[str], is_native: bool) -> str:
    """The first test that fails, or how they end otherwise; nothing where all pass. Native: with the library that was
    built here, and as the first example fails."""
    environment = {**os.environ, "MOEGGUF_LONGEST_TEST_S": str(LONGEST_TEST_S), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
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
    if found.returncode in (2, 3, 4, 5):  # pytest itself: no such test, or none
        raise RuntimeError(f"{' '.join(command)}\n{found.stdout}")
    failed = [line.split(" ")[1] for line in found.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else f"exit status {found.returncode}, or a test that hangs"


def check(fault: Fault) -> str:
    """The test that catches the fault; nothing where none does."""
    with put_in(fault):
        if fault.is_native and (why := build()):
            raise RuntimeError(f"{fault.name}: {why}")
        return failing(fault.tests, fault.is_native)


def check_all(faults: Sequence[Fault], is_native: bool) -> int:
    """Prints which test catches each fault; how many are not caught. Raises SystemExit where tests fail without any."""
    try:
        why = (is_native and build()) or failing(sorted({test for fault in faults for test in fault.tests}), is_native)
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
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the names of faults; without any: all of them")
    parser.add_argument("--anchors", action="store_true", help="only look whether every fault still has its place")
    args = parser.parse_args()
    faults = [
        fault
        for fault in read_faults()
        if not args.words or any(word in f"{fault.name} {fault.file}" for word in args.words)
    ]
    lost = {fault.name: why for fault in faults if (why := fault.lost())}
    for name, why in lost.items():
        print(f"{name}: no place: {why}", file=sys.stderr)
    if args.anchors:
        return 1 if lost else 0
    missed = 0
    for is_native in (False, True):
        of_kind = [fault for fault in faults if fault.is_native == is_native and fault.name not in lost]
        if of_kind:
            missed += check_all(of_kind, is_native)
    print(f"{len(faults)} faults, {missed} not caught, {len(lost)} without a place")
    return 1 if missed or lost else 0


if __name__ == "__main__":
    sys.exit(main())
