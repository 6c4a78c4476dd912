"""Lists what this machine lacks for a build, before anything is downloaded.

Usage: python tools/check_machine.py            exit status 1 and one sentence per missing thing
       python tools/check_machine.py --extra X  prints the requirements of an extra in pyproject.toml
Runs on any Python 3, so that one that is too old gets an error message too.
"""

import os
import shutil
import sys


def missing():
    """Yields one sentence per missing thing."""
    if sys.version_info < (3, 11):
        yield "Python 3.11 or newer is needed, this is %d.%d; try: make PYTHON=python3.12" % sys.version_info[:2]
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        yield "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"
    if not shutil.which("git"):
        yield "git is missing; it applies the patches: apt install git"
    compiler = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([compiler] if compiler else ["c++", "g++", "clang++"])):
        yield "a C++17 compiler is missing; on Debian and Ubuntu: apt install g++"


def print_extra(name):
    """Prints the requirements of an extra, one per line."""
    import tomllib

    with open("pyproject.toml", "rb") as file:
        print("\n".join(tomllib.load(file)["project"]["optional-dependencies"][name]))


def main():
    """Runs the command line; returns the exit status."""
    if sys.argv[1:2] == ["--extra"]:
        print_extra(sys.argv[2])
        return 0
    problems = list(missing())
    for problem in problems:
        print("error: " + problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
