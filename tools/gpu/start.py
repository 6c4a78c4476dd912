#!/usr/bin/env python3
"""Measure moegguf on this machine's GPU, without a network: unpack the archives beside
this file and run the trial.

python3 gpu_trial.py --work FOLDER          repeat until it prints that everything is done
python3 gpu_trial.py --work FOLDER --help
"""

# This file runs before the sources are unpacked, so it imports only Python's standard
# library.
import os
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def unpack(work: Path) -> None:
    """Unpacks the sources and wheels into `work`, unless a source archive of the same
    size and time has already been unpacked there."""
    archive = HERE / "sources.tar.xz"
    stamp = work / "unpacked"
    made = f"{archive.stat().st_size} {archive.stat().st_mtime_ns}"
    if stamp.exists() and stamp.read_text() == made:
        return
    with tarfile.open(archive) as tar:
        tar.extractall(work / "sources", filter="data")
    for wheel in sorted((HERE / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(work / "site")
    stamp.write_text(made)


def main() -> int:
    """Unpacks the archives and replaces this process with the trial.

    Returns 2 if --work FOLDER is missing or this is not Python 3.12.
    """
    arguments = sys.argv[1:]
    if "--work" not in arguments[:-1]:
        print(__doc__, file=sys.stderr)
        return 2
    if sys.version_info[:2] != (3, 12):
        print(
            f"error: the wheels are for Python 3.12, this is {sys.version.split()[0]}",
            file=sys.stderr,
        )
        return 2
    work = Path(arguments[arguments.index("--work") + 1]).resolve()
    work.mkdir(parents=True, exist_ok=True)
    unpack(work)
    os.environ["PYTHONPATH"] = str(work / "site")
    script = str(work / "sources" / "tools" / "gpu_trial.py")
    os.execv(sys.executable, [sys.executable, script, *arguments])


if __name__ == "__main__":
    sys.exit(main())
