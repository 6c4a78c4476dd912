"""Checks the files of a release before they are published.

python -m tools.release_check dist/*                 # wheels, plug-in wheels and source distributions
python -m tools.release_check --from-source dist/*   # builds the source distribution, too, which takes minutes
python -m tools.release_check --sums dist/*          # only writes their SHA256SUMS next to them

moegguf's own wheel for this machine is also installed into an empty environment, as a
user would install it. It must then print its first token within FIRST_TOKEN_S.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.version import read_version

FIRST_TOKEN_S = 60.0
INSTALL_S = 1800.0
# PyPI refuses files of more than 100 MiB, unless PyPI has granted the project a larger
# limit. A refused plug-in would leave a release incomplete.
MOST_BYTES = {"wheel": 40 << 20, "plugin": 100 << 20, "sdist": 24 << 20}
QUESTION = "What does moegguf do?"
# The licences of moegguf, of libgomp (which auditwheel adds), llama.cpp, its bindings,
# and the web page's libraries.
LICENCES = (
    r"moegguf-[^/]+\.dist-info/licenses/LICENSE",
    r"moegguf-[^/]+\.dist-info/licenses/licenses/GCC-runtime-exception\.txt",
    r"moegguf-[^/]+\.dist-info/licenses/licenses/GPL-3\.0\.txt",
    r"moegguf/lib/LICENSE",
    r"moegguf/bindings/LICENSE\.md",
    r"moegguf/server/static/vendor/LICENSE\.txt",
)
NEEDED = (
    r"moegguf/lib/libmoegguf\.so",
    r"moegguf/lib/libllama\.so",
    r"moegguf/lib/UPSTREAM",
    r"moegguf/demo/[^/]+\.gguf",
    r"moegguf/server/static/index\.html",
    *LICENCES,
)
UNWANTED = re.compile(
    r"(^|/)(testing|tests|__pycache__)/|libmoegguf-testing|\.(cpp|cmake|pyc)$|(^|/)CMakeLists\.txt$"
)
PLUGIN_NEEDED = (
    r"moegguf_backends/[^/]+/libggml-[a-z]+\.so",
    r"moegguf_backends/[^/]+/UPSTREAM",
    r".+/licenses/LICENSE",
)
SOURCE_NEEDED = (
    "pyproject.toml",
    "PKG-INFO",
    "README.md",
    "LICENSE",
    "licenses/GCC-runtime-exception.txt",
    "licenses/GPL-3.0.txt",
    "patches/UPSTREAM",
    "patches/series",
)
PORTABLE = re.compile(r"-py3-none-manylinux[\w.]*_(x86_64|aarch64)\.whl$")


class ReleaseError(Exception):
    """A file is not fit for release. The error's message is the reason."""


def check_names(
    names: Iterable[str], needed: Sequence[str], unwanted: re.Pattern[str]
) -> None:
    """Raises ReleaseError if a pattern in `needed` matches no name, or if a name
    matches `unwanted`."""
    found = list(names)
    missing = [
        pattern
        for pattern in needed
        if not any(re.fullmatch(pattern, name) for name in found)
    ]
    if missing:
        raise ReleaseError(f"it must have {', '.join(missing)}")
    if wrong := [name for name in found if unwanted.search(name)]:
        raise ReleaseError(f"it must not have {', '.join(sorted(wrong)[:5])}")


def check_size(path: Path, kind: str) -> None:
    """Raises ReleaseError if the file is larger than the limit for its kind in
    MOST_BYTES."""
    if path.stat().st_size > MOST_BYTES[kind]:
        raise ReleaseError(
            f"it may have {MOST_BYTES[kind] >> 20} MiB, but has {path.stat().st_size >> 20}"
        )


def check_version(path: Path, version: str) -> None:
    """Raises ReleaseError unless the file name follows the pattern of release files and
    contains this version."""
    if (
        re.match(
            rf"moegguf(?:_[a-z0-9]+)?-{re.escape(version)}(?:-py3-|\.tar\.gz$)",
            path.name,
        )
        is None
    ):
        raise ReleaseError(f"its version must be {version}")


def check_wheel(path: Path) -> None:
    """Checks the name, size and contents of a wheel of moegguf or of a plug-in. Raises
    ReleaseError."""
    is_plugin = path.name.startswith("moegguf_")
    if PORTABLE.search(path.name) is None:
        raise ReleaseError(
            "it must be for any Python 3 and for manylinux on x86_64 or aarch64; `make wheel` makes it so"
        )
    check_size(path, "plugin" if is_plugin else "wheel")
    with zipfile.ZipFile(path) as archive:
        check_names(
            archive.namelist(), PLUGIN_NEEDED if is_plugin else NEEDED, UNWANTED
        )
        if (damaged := archive.testzip()) is not None:
            raise ReleaseError(f"its file {damaged} is damaged")


def check_source(path: Path) -> None:
    """Checks the size and the file names of a source distribution. Raises
    ReleaseError."""
    check_size(path, "sdist")
    with tarfile.open(path) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers()]
    check_names(
        names,
        [re.escape(name) for name in SOURCE_NEEDED],
        re.compile(r"__pycache__|\.(so|pyc)$|^(tests|\.git)/"),
    )


def is_for_this_machine(path: Path) -> bool:
    """Returns True if a file is moegguf's own wheel, not a plug-in's, for this
    machine's CPU architecture."""
    return path.name.startswith("moegguf-") and path.name.endswith(
        f"_{platform.machine()}.whl"
    )


def environment_in(folder: Path) -> Path:
    """Creates a new virtual environment in a folder. Returns the path of the
    environment's pip."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    return folder / "venv/bin/pip"


def run_installed(path: Path) -> float:
    """Installs a wheel into a new environment, and runs the demo and `moegguf doctor`
    there.

    Returns the seconds from the end of the installation to the demo's first output.
    Raises ReleaseError if the demo fails or its output is late, and
    subprocess.CalledProcessError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pip = environment_in(folder)
        # An older wheel of a dependency is installed if the newest release has none for
        # this glibc (llguidance).
        command = [
            str(pip),
            "install",
            "--quiet",
            "--prefer-binary",
            str(path.resolve()),
        ]
        subprocess.run(command, check=True, timeout=INSTALL_S)
        installed_s = time.monotonic()
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MOEGGUF", "XDG_", "PYTHON"))
        }
        command = [str(folder / "venv/bin/moegguf"), "run", "demo", QUESTION, "-n", "8"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=folder, env=kept | {"HOME": scratch}
        )
        assert process.stdout is not None
        with process.stdout:
            first = process.stdout.read(1)
            seconds = time.monotonic() - installed_s
            answer = first + process.stdout.read()
        if process.wait(FIRST_TOKEN_S) or not answer.strip():
            raise ReleaseError(
                f"its demo ended with status {process.returncode} after {answer!r:.200}"
            )
        subprocess.run(
            [folder / "venv/bin/moegguf", "doctor"],
            check=True,
            cwd=folder,
            env=kept,
            stdout=subprocess.DEVNULL,
        )
    if seconds > FIRST_TOKEN_S:
        raise ReleaseError(
            f"its first token must come within {FIRST_TOKEN_S:g} s, but came after {seconds:.1f} s"
        )
    return seconds


def build_source(path: Path) -> None:
    """Builds a wheel from a source distribution in a temporary environment, and checks
    the wheel's file names.

    Raises ReleaseError, subprocess.CalledProcessError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pip = str(environment_in(folder))
        command = [
            pip,
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            scratch,
            str(path.resolve()),
        ]
        subprocess.run(command, check=True, cwd=folder)
        (made,) = folder.glob("moegguf-*.whl")
        with zipfile.ZipFile(made) as archive:
            check_names(archive.namelist(), NEEDED, UNWANTED)


def sums_of(paths: Iterable[Path]) -> str:
    """Returns lines with the SHA-256 and the name of each file, in the format that
    `sha256sum --check` reads."""
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(paths)
    )


def check(path: Path, version: str, from_source: bool) -> str:
    """Checks one file of a release. Returns text for the report, such as "built" or the
    time to the first token.

    Raises ReleaseError, subprocess.CalledProcessError.
    """
    check_version(path, version)
    if path.name.endswith(".tar.gz"):
        check_source(path)
        if not from_source:
            return "not built"
        build_source(path)
        return "built"
    check_wheel(path)
    if not is_for_this_machine(path):
        return "not run here"
    return f"first token {run_installed(path):.1f} s after its installation"


def main() -> int:
    """Checks the files, or writes their checksums. Returns 1 if a file fails a check,
    else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--from-source", action="store_true", help="build the source distribution"
    )
    parser.add_argument("--sums", action="store_true", help="write SHA256SUMS instead")
    args = parser.parse_args()
    files = [path for path in args.files if path.name != "SHA256SUMS"]
    if args.sums:
        (files[0].parent / "SHA256SUMS").write_text(sums_of(files))
        return 0
    failed = False
    for path in files:
        try:
            done = check(path, read_version(), args.from_source)
            print(
                f"{path.name}: {path.stat().st_size / (1 << 20):.1f} MiB, {done}",
                flush=True,
            )
        except (ReleaseError, ValueError, subprocess.SubprocessError) as error:
            failed = True
            print(f"error: {path.name}: {error}", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
