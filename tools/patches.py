"""Checks the patches, and rewrites them after an edit.

Usage: python tools/patches.py check     every patch is listed, has a reason and an end, and applies to pristine source
       python tools/patches.py refresh   rewrites each patch from the patched tree in build/vendor, keeping its header
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import vendor

HEADER_FIELDS = ("Subject", "Why", "Until", "Touches")
# Limit for all patches together, so that updating llama.cpp takes little work.
MAX_ADDED_LINES = 294


def header_of(patch: Path) -> str:
    """Returns the text of a patch before its first diff."""
    return patch.read_text().split("\n--- ", 1)[0]


def touched_by(patch: Path) -> list[str]:
    """Returns the paths of the files that the patch changes, relative to llama.cpp."""
    return re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)


def added_lines(patch: Path) -> int:
    """Returns the number of lines that the patch adds."""
    return sum(
        line.startswith("+") and not line.startswith("+++")
        for line in patch.read_text().splitlines()
    )


def problems_of_headers() -> Iterator[str]:
    """Yields an error text for each fault in patches/series, in a patch's header or in
    patches/README.md.

    Yields one more error text if the patches add too many lines.
    """
    listed = vendor.series()
    present = sorted(vendor.PATCHES.glob("*.patch"))
    readme = (vendor.PATCHES / "README.md").read_text()
    for patch in sorted(set(present) - set(listed)):
        yield f"{patch.name} is not listed in patches/series"
    for patch in listed:
        if patch not in present:
            yield f"patches/series lists {patch.name}, which does not exist"
            continue
        if listed.count(patch) > 1:
            yield f"patches/series lists {patch.name} twice"
        for field in HEADER_FIELDS:
            if not re.search(rf"^{field}: \S", header_of(patch), re.MULTILINE):
                yield f"{patch.name} has no '{field}:' in its header"
        if f"`{patch.name}`" not in readme:
            yield f"patches/README.md does not name {patch.name}"
        for file in touched_by(patch):
            if file not in header_of(patch):
                yield f"{patch.name} changes {file}, which its header does not name"
    total = sum(added_lines(patch) for patch in listed if patch in present)
    if total > MAX_ADDED_LINES:
        yield f"the patches add {total} lines, more than {MAX_ADDED_LINES}: move code to moegguf/native"


def problems_of_application() -> Iterator[str]:
    """Yields an error text if the patches do not apply in order, without fuzz, to the
    pristine source."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "llama.cpp"
        vendor.unpack(vendor.fetch(vendor.read_pin()), tree)
        try:
            for patch in vendor.series():
                vendor.apply(patch, tree)
        except vendor.VendorError as error:
            yield str(error)


def refresh() -> None:
    """Rewrites each patch from the edited tree. An edit is assigned to the last patch
    that touches its file."""
    last = {file: patch for patch in vendor.series() for file in touched_by(patch)}
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "a"
        vendor.unpack(vendor.fetch(vendor.read_pin()), before)
        (Path(folder) / "b").symlink_to(vendor.VENDOR / "llama.cpp")
        for patch in vendor.series():
            diffs = [
                diff(Path(folder), file)
                if last[file] == patch
                else diff_in(patch, file)
                for file in touched_by(patch)
            ]
            patch.write_text(header_of(patch).rstrip() + "\n\n" + "".join(diffs))
            vendor.apply(patch, before)


def diff_in(patch: Path, file: str) -> str:
    """Returns the part of a patch that changes one file."""
    parts = re.split(r"^(?=--- a/)", patch.read_text(), flags=re.MULTILINE)
    return next(part for part in parts if part.startswith(f"--- a/{file}\n"))


def diff(folder: Path, file: str) -> str:
    """Returns the unified diff of `file` from `folder`/a to `folder`/b."""
    command = [
        "diff",
        "--unified",
        f"--label=a/{file}",
        f"--label=b/{file}",
        f"a/{file}",
        f"b/{file}",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def main() -> int:
    """Runs the command `check` or `refresh`. Returns the exit status."""
    if sys.argv[1:] == ["refresh"]:
        refresh()
        return 0
    if sys.argv[1:] != ["check"]:
        print(__doc__, file=sys.stderr)
        return 2
    problems = [*problems_of_headers(), *problems_of_application()]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
