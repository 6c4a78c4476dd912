"""Tests the wheel: its files, and that the library and the bindings come from the
folder where it is unpacked.

Also tests the files of the source distribution.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from running import TinyModel

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import moegguf
from moegguf.native import library
print(library.find_library())
with moegguf.Llama(sys.argv[1], expert_cache="50%", n_ctx=64, n_threads=1, verbose=False) as llm:
    llm.eval([1, 2, 3])
    print(llm.stats().lookups)
import llama_cpp
print(llama_cpp.__file__)
from moegguf.engine.doctor import diagnose
print(diagnose()["build"]["llama.cpp pin"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel, using the build folder that `make` has already filled. Returns
    the wheel's path."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index",
               "--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)]  # fmt: skip
    scripts = sysconfig.get_path("scripts")
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, check=True, env=environment, cwd=folder, timeout=600)
    return next(folder.glob("moegguf-*.whl"))


def test_the_wheel_is_for_this_platform_and_any_python(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")


def test_the_wheel_holds_libraries_bindings_and_demo_but_no_sources(
    wheel: Path,
) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {Path(name).name for name in names if name.startswith("moegguf/lib/")}
    assert {
        "libmoegguf.so",
        "libllama.so",
        "libggml.so",
        "libggml-base.so",
        "libggml-cpu.so",
    } <= libraries
    assert not any("testing" in name for name in names), "a wheel has no test equipment"
    assert any(
        name.startswith("moegguf/demo/") and name.endswith(".gguf") for name in names
    )
    assert not any(
        name.endswith((".cpp", ".cmake", "CMakeLists.txt")) for name in names
    )
    assert {
        name.split("/")[2] for name in names if name.startswith("moegguf/predictors/")
    } == {"demo"}
    assert {
        "moegguf/lib/UPSTREAM",
        "moegguf/lib/CPU_FEATURES",
        "moegguf/lib/LICENSE",
    } <= set(names)
    page = (
        path
        for path in (ROOT / "moegguf" / "server" / "static").rglob("*")
        if path.is_file()
    )
    assert {path.relative_to(ROOT).as_posix() for path in page} <= set(names)
    assert {
        "moegguf/bindings/llama_cpp/llama.py",
        "moegguf/bindings/LICENSE.md",
    } <= set(names)
    folders = {name.split("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {
        "moegguf"
    }


def test_the_source_distribution_holds_only_files_of_the_build(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})",
    ]
    subprocess.run(
        command, check=True, cwd=ROOT, timeout=120, stdout=subprocess.DEVNULL
    )
    with tarfile.open(next(tmp_path.glob("moegguf-*.tar.gz"))) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    needed = {
        "pyproject.toml",
        "PKG-INFO",
        "README.md",
        "LICENSE",
        "tools/vendor.py",
        "patches/UPSTREAM",
    }
    assert (
        needed | {"moegguf/native/CMakeLists.txt", "moegguf/native/cpu_features.cmake"}
        <= names
    )
    assert {name.split("/")[0] for name in names - needed} == {
        "licenses",
        "moegguf",
        "patches",
        "predictors",
    }
    assert {name.split("/")[1] for name in names if name.startswith("predictors/")} == {
        "demo"
    }
    assert not any("__pycache__" in name for name in names)


def run_installed(
    wheel: Path, folder: Path, script: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Unpacks the wheel into `folder`/site and runs a script that imports moegguf from
    there."""
    target = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    # -S keeps the editable install's import hook out; dependencies come from this
    # environment.
    environment = {
        "PYTHONPATH": f"{target}{os.pathsep}{sysconfig.get_path('purelib')}",
        "PATH": os.environ["PATH"],
    }
    command = [sys.executable, "-S", "-c", script, *arguments]
    return subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_simulated_link_in_a_wheel_names_the_source_build(
    wheel: Path, tmp_path: Path
) -> None:
    done = run_installed(
        wheel, tmp_path, "from moegguf.bench import measure; measure.simulated_links()"
    )
    assert (
        "LibraryError: a simulated link needs moegguf's test equipment" in done.stderr
    )
    assert "run `make` in it" in done.stderr


def test_the_wheel_runs_a_model_without_the_source_tree(
    wheel: Path, tmp_path: Path, tiny: TinyModel
) -> None:
    done = run_installed(wheel, tmp_path, SCRIPT, str(tiny()))
    assert done.returncode == 0, done.stderr
    folder, lookups, bindings, pin = done.stdout.split()
    target = tmp_path / "site"
    assert Path(folder) == target / "moegguf" / "lib"
    assert int(lookups) > 0
    assert (
        Path(bindings) == target / "moegguf" / "bindings" / "llama_cpp" / "__init__.py"
    )
    assert f"llama_cpp_commit = {pin}" in (ROOT / "patches" / "UPSTREAM").read_text()
