"""Prints, checks or sets the version, which is written in several files. Also sets the
project's addresses.

python -m tools.version               # prints the version; fails if two files differ
python -m tools.version --is v0.2.0   # fails unless the files have the tag's version and CHANGELOG.md describes it
python -m tools.version --set v0.2.0  # writes the tag's version into the files: the first step of a release
python -m tools.version --notes v0.2.0   # prints the text about the tag's version in CHANGELOG.md
python -m tools.version --urls https://host/owner/name   # writes the repository's address into pyproject.toml
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAG = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
PLACES = (  # (file, regular expression of the text before the version)
    ("pyproject.toml", r'^version = "'),
    ("pyproject.toml", r'"moegguf-(?:cuda13|cuda12|vulkan)=='),
    ("moegguf/package.py", r'^__version__ = "'),
    ("CITATION.cff", r'^version: "'),
)
# The pages of the project, as paths below the repository's address.
PAGES = {
    "Homepage": "",
    "Documentation": "/tree/HEAD/docs",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}
URLS = re.compile(r"^\[project\.urls\]\n(?:.+\n)*\n", re.MULTILINE)


def version_of(tag: str) -> str:
    """Returns the version in a tag. Raises ValueError unless the tag has a form like
    v1.2.3, v1.2.3a1 or v1.2.3rc1."""
    found = TAG.fullmatch(tag.removeprefix("refs/tags/"))
    if found is None:
        raise ValueError(
            f"the tag of a release is v1.2.3, or v1.2.3rc1, but is {tag!r}; use another tag"
        )
    return found[1]


def read_version(root: Path = ROOT) -> str:
    """Returns the version in PLACES. Raises ValueError if two places have different
    versions, or if no place has one."""
    found = {
        (name, version)
        for name, before in PLACES
        for version in re.findall(
            rf'{before}([^"]+)"', (root / name).read_text(), re.MULTILINE
        )
    }
    versions = {version for _, version in found}
    if len(versions) != 1:
        places = ", ".join(f"{version} in {name}" for name, version in sorted(found))
        raise ValueError(
            f"the version must be the same everywhere, but is {places}; run tools.version --set"
        )
    return versions.pop()


def write_version(version: str, root: Path = ROOT) -> None:
    """Writes the version into all PLACES."""
    for name, before in PLACES:
        path = root / name
        path.write_text(
            re.sub(
                rf'({before})[^"]+"',
                rf'\g<1>{version}"',
                path.read_text(),
                flags=re.MULTILINE,
            )
        )


def write_urls(address: str, root: Path = ROOT) -> None:
    """Writes the section [project.urls] of pyproject.toml, for the repository at
    `address`. Replaces an existing section. Raises ValueError if `address` does not
    have a form like https://host/owner/name."""
    if not re.fullmatch(r"https://[\w.:-]+/[\w.-]+/[\w.-]+", address):
        raise ValueError(
            f"a repository's address is https://host/owner/name, but is {address!r}; use another address"
        )
    lines = [f'{name} = "{address}{path}"\n' for name, path in PAGES.items()]
    section = "".join(["[project.urls]\n", *lines, "\n"])
    path = root / "pyproject.toml"
    path.write_text(
        URLS.sub("", path.read_text()).replace(
            "[project.scripts]\n", f"{section}[project.scripts]\n"
        )
    )


def check_tag(tag: str, root: Path = ROOT) -> str:
    """Returns the version of a tag. Raises ValueError unless the files and CHANGELOG.md
    contain it."""
    version = version_of(tag)
    if (written := read_version(root)) != version:
        raise ValueError(
            f"the tag is {tag}, but the files have version {written}; run tools.version --set {tag}"
        )
    if not is_released(version, root):
        raise ValueError(
            f"CHANGELOG.md needs a section '## {version} (YYYY-MM-DD)' for the tag {tag}; write one"
        )
    return version


def notes_of(tag: str, root: Path = ROOT) -> str:
    """Returns the text below the heading of the tag's version in CHANGELOG.md. Raises
    ValueError like check_tag()."""
    heading = f"## {check_tag(tag, root)} ("
    _, _, after = (root / "CHANGELOG.md").read_text().partition(heading)
    return after.partition("\n")[2].partition("\n## ")[0].strip()


def is_released(version: str, root: Path) -> bool:
    """Returns True if CHANGELOG.md has a section with the version and a date."""
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    return (
        re.search(heading, (root / "CHANGELOG.md").read_text(), re.MULTILINE)
        is not None
    )


def main() -> int:
    """Prints, checks or sets the version. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--is", dest="tag", metavar="TAG")
    what.add_argument("--set", dest="new_tag", metavar="TAG")
    what.add_argument("--notes", metavar="TAG")
    what.add_argument("--urls", dest="address", metavar="ADDRESS")
    args = parser.parse_args()
    try:
        if args.address:
            write_urls(args.address)
        if args.new_tag:
            write_version(version_of(args.new_tag))
        if args.notes:
            print(notes_of(args.notes))
        else:
            print(check_tag(args.tag) if args.tag else read_version())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
