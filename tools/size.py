"""Counts lines by package and fails where one is over its limit: `make lint` runs it.

The goal is at most 46,000 lines of moegguf/, 34,000 of tests/, 14,000 of tools/ and predictors/ together; limits are
lowered as packages become smaller. Raising one is a change with a reason, which its commit says.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".cpp", ".h", ".js", ".css", ".html")
VENDORED = ("moegguf/server/static/vendor/",)  # libraries with a licence of their own: not counted
GOALS = {"moegguf": 46_000, "tests": 34_000, "tools + predictors": 14_000}
LIMITS = {
    "moegguf": 1_100,
    "moegguf/bench": 1_350,
    "moegguf/chat": 1_560,
    "moegguf/cli": 2_080,
    "moegguf/controller": 2_100,
    "moegguf/engine": 7_060,
    "moegguf/generate": 3_980,
    "moegguf/gguf": 1_370,
    "moegguf/models": 2_610,
    "moegguf/native": 13_880,
    "moegguf/server": 7_210,
    "moegguf/serving": 3_780,
    "moegguf/terminal": 1_250,
    "moegguf/trace": 1_860,
    "predictors": 8_080,
    "tests": 33_740,
    "tools": 5_860,
}


def package_of(path: str) -> str:
    """The package of a file: of moegguf/ its folder there, else its topmost folder."""
    folders = path.split("/")[:-1]
    return "/".join(folders[: 2 if folders[0] == "moegguf" else 1])


def count() -> Counter[str]:
    """Lines of each package, of the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "moegguf", "tests", "tools", "predictors"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    lines: Counter[str] = Counter()
    for path in listed.stdout.split("\0"):
        if path.endswith(SUFFIXES) and not path.startswith(VENDORED) and (ROOT / path).exists():
            lines[package_of(path)] += len((ROOT / path).read_bytes().splitlines())
    return lines


def faults(lines: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """One sentence for each package that is over its limit or has none."""
    return [
        f"{package} has {n} lines, more than its {limits.get(package, 0)}; make it smaller, or raise the number in"
        " tools/size.py and say why in the commit."
        for package, n in lines.items()
        if n > limits.get(package, 0)
    ]


def main() -> int:
    """Prints the table; returns the exit status."""
    lines = count()
    for package, n in sorted(lines.items()):
        print(f"{package:<20} {n:>7,} of {LIMITS.get(package, 0):>7,}")
    sums = Counter[str]()
    for package, n in lines.items():
        top = package.split("/")[0]
        sums["tools + predictors" if top in ("tools", "predictors") else top] += n
    for name, goal in GOALS.items():
        print(f"{name:<20} {sums[name]:>7,}, goal {goal:>7,}")
    found = faults(lines, LIMITS)
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
