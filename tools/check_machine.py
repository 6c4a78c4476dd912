"""Checks for programs and modules that a build needs, before anything is downloaded.

Usage: python tools/check_machine.py            prints a sentence for each missing thing; exit status 1 if any
       python tools/check_machine.py --requirements X  prints the requirements of the build ("build") or of an extra
       python tools/check_machine.py --chromium        installs Chromium from Debian's packages if root runs this
Without options, this runs on any Python 3, so that even an old Python prints a helpful error.
"""

import os
import shutil
import subprocess
import sys

CHROMIUM = (
    "chromium-headless-shell",
    "chromium",
)  # Debian packages, named like their commands; the smaller first


def missing():
    """Yields a sentence for each program or module that a build needs and this machine lacks."""
    if sys.version_info < (3, 11):
        yield (
            "Python 3.11 or newer is needed, this is %d.%d; try: make PYTHON=python3.12"
            % sys.version_info[:2]
        )
    try:
        import ensurepip  # noqa: F401 (only checks that it exists)
        import venv  # noqa: F401 (only checks that it exists)
    except ImportError:
        yield "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"
    if not shutil.which("git"):
        yield "git is missing; it applies the patches: apt install git"
    compiler = os.environ.get("CXX")
    if not any(
        shutil.which(name)
        for name in ([compiler] if compiler else ["c++", "g++", "clang++"])
    ):
        yield "a C++17 compiler is missing; on Debian and Ubuntu: apt install g++"


def print_requirements(name):
    """Prints the requirements of the build or of an extra in pyproject.toml, one per line."""
    import tomllib

    with open("pyproject.toml", "rb") as file:
        table = tomllib.load(file)
    extras = table["project"]["optional-dependencies"]
    print(
        "\n".join(
            table["build-system"]["requires"] if name == "build" else extras[name]
        )
    )


def install_chromium():
    """Installs Chromium with apt-get if there is no Chromium or Chrome and this process runs as root. Prints a note if
    there is still no Chromium afterwards."""
    if any(map(shutil.which, [*CHROMIUM, "chromium-browser", "google-chrome"])):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        steps = [
            ["update"],
            *(
                ["install", "--yes", "--no-install-recommends", name]
                for name in CHROMIUM
            ),
        ]
        for step in steps:
            print("apt-get " + " ".join(step))
            done = subprocess.run(
                ["apt-get", "-qq", *step], env=environment, stdout=subprocess.DEVNULL
            )
            if done.returncode == 0 and shutil.which(step[-1]):
                return
    print(
        "note: there is no Chromium, so the tests of the page are passed over; on Debian: apt install chromium"
    )


def main():
    """Runs the program with the command line's options. Returns the exit status."""
    if sys.argv[1:2] == ["--requirements"]:
        print_requirements(sys.argv[2])
        return 0
    if sys.argv[1:2] == ["--chromium"]:
        install_chromium()
        return 0
    problems = list(missing())
    for problem in problems:
        print("error: " + problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
