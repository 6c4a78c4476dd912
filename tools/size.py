"""Counts the code of each package and fails if one is over its limit. `make lint` runs
this.

Python is counted in code tokens, without comments, docstrings and imports. C++, CUDA
and JavaScript are counted in lines of code, without comments and blank lines. Comments
and white space are free, so a sentence that explains something costs nothing. The
folder recipes/ is not counted, because each of its programs made one model, and only
tests import them. A new limit is set 5 % above the package's current size. The commit
that raises a limit explains why. A package with more than TOKENS_PER_LINE tokens per
line is marked, because a long line often expresses two thoughts.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("moegguf", "tests", "tools", "predictors")
NATIVE_SUFFIXES = (".cpp", ".h", ".cu", ".js")
# Libraries with licences of their own, which are not counted.
VENDORED = ("moegguf/server/static/vendor/",)
TOKENS_PER_LINE = 8.5

TOKEN_LIMITS = {
    "moegguf": 8_000,
    "moegguf/bench": 18_850,
    "moegguf/chat": 9_450,
    "moegguf/cli": 18_900,
    "moegguf/controller": 13_500,
    "moegguf/engine": 60_300,
    "moegguf/generate": 54_300,
    "moegguf/gguf": 9_350,
    "moegguf/learning": 10_650,
    "moegguf/models": 17_750,
    "moegguf/native": 8_130,
    "moegguf/server": 37_800,
    "moegguf/serving": 26_800,
    "moegguf/terminal": 9_450,
    "moegguf/testing": 670,
    "moegguf/trace": 18_850,
    "predictors": 43_850,
    "tests": 446_000,
    "tools": 63_500,
}
NATIVE_LIMITS = {
    "moegguf/native": 12_570,
    "moegguf/server": 1_920,
    "moegguf/testing": 1_190,
    "tools": 510,
}

_LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
_COMMENT_OR_STRING = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`",
    re.DOTALL,
)


@dataclass
class Size:
    """The size of a file or a package."""

    tokens: int = 0  # tokens of Python
    lines: int = 0  # lines of Python that contain these tokens
    native_lines: int = 0  # lines of C++, CUDA and JavaScript

    def add(self, other: Size) -> None:
        """Adds another size."""
        self.tokens += other.tokens
        self.lines += other.lines
        self.native_lines += other.native_lines


def _free_lines(source: str) -> set[int]:
    """Returns the line numbers of docstrings, other string statements and imports."""
    free = set[int]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Expr(value=ast.Constant(value=str()))
                | ast.Import()
                | ast.ImportFrom()
            ):
                free.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return free


def python_size(source: str) -> Size:
    """Returns the code tokens of a Python file and the number of lines that contain
    them."""
    free = _free_lines(source)
    n_tokens = 0
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and token.start[0] not in free:
            n_tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return Size(n_tokens, len(lines))


def native_size(source: str) -> Size:
    """Returns the number of lines of C++, CUDA or JavaScript that contain more than
    comments and white space."""

    def without_comment(match: re.Match[str]) -> str:
        return (
            " " + "\n" * match[0].count("\n") if match[0].startswith("/") else match[0]
        )

    code = _COMMENT_OR_STRING.sub(without_comment, source)
    return Size(native_lines=sum(1 for line in code.splitlines() if line.strip()))


def package_of(path: str) -> str:
    """Returns the package of a file: its folder within moegguf/, else its top-level
    folder."""
    folders = path.split("/")[:-1]
    return "/".join(folders[: 2 if folders[0] == "moegguf" else 1])


def _listed_files() -> Iterator[str]:
    """Yields the paths of the existing files in PLACES that git tracks, except the
    files in VENDORED."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PLACES],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for path in listed.stdout.split("\0"):
        if path and not path.startswith(VENDORED) and (ROOT / path).exists():
            yield path


def count() -> dict[str, Size]:
    """Returns the size of each package."""
    sizes: dict[str, Size] = defaultdict(Size)
    for path in _listed_files():
        if path.endswith(".py"):
            sizes[package_of(path)].add(
                python_size((ROOT / path).read_text(encoding="utf-8"))
            )
        elif path.endswith(NATIVE_SUFFIXES):
            sizes[package_of(path)].add(
                native_size((ROOT / path).read_text(encoding="utf-8"))
            )
    return dict(sizes)


def faults(
    sizes: Mapping[str, Size], tokens: Mapping[str, int], native: Mapping[str, int]
) -> list[str]:
    """Returns one sentence for each limit that a package exceeds: `tokens` of Python,
    or `native` lines.

    A package without a limit has the limit 0.
    """
    measured = [
        (name, size.tokens, tokens.get(name, 0), "code tokens of Python")
        for name, size in sizes.items()
    ]
    measured += [
        (name, size.native_lines, native.get(name, 0), "native code lines")
        for name, size in sizes.items()
    ]
    return [
        f"{name} has {n:,} {unit}, and its limit is {limit:,}; make it smaller, or raise the number in tools/size.py"
        " and say why in the commit."
        for name, n, limit, unit in measured
        if n > limit
    ]


def main() -> int:
    """Prints the table of sizes. Returns 1 if a package exceeds a limit, else 0."""
    sizes = count()
    print(
        f"{'':<20} {'tokens':>8} {'limit':>8} {'a line':>7} {'native':>7} {'limit':>7}"
    )
    for name, size in sorted(sizes.items()):
        density = f"{size.tokens / size.lines:.1f}" if size.lines else ""
        dense = size.lines and size.tokens / size.lines > TOKENS_PER_LINE
        native = (
            f"{size.native_lines:>7,} {NATIVE_LIMITS.get(name, 0):>7,}"
            if size.native_lines
            else f"{'':>15}"
        )
        note = f"  above {TOKENS_PER_LINE}" if dense else ""
        print(
            f"{name:<20} {size.tokens:>8,} {TOKEN_LIMITS.get(name, 0):>8,} {density:>7} {native}{note}"
        )
    total = Size()
    for name, size in sizes.items():
        if name.startswith("moegguf"):
            total.add(size)
    in_all = f"{total.tokens / total.lines:.1f}"
    print(
        f"{'moegguf, in all':<20} {total.tokens:>8,} {'':>8} {in_all:>7} {total.native_lines:>7,}"
    )
    found = faults(sizes, TOKEN_LIMITS, NATIVE_LIMITS)
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
