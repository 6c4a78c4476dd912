"""Tests that the library finds, checks and loads ggml backends of separately installed
packages (plug-ins).

A small compiled backend, whose devices compute nothing, stands in for the real ones.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moegguf.native import library, plugins
from moegguf.package import __version__

ROOT = Path(__file__).resolve().parents[2]
GGML = ROOT / "build/vendor/llama.cpp/ggml"
STAND_IN = r"""// N_DEVICES GPUs named NAME0, NAME1, ... that compute nothing.
// With FAILS it logs an error, as CUDA does where the driver is too old.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <string>
#include <vector>

#ifndef NAME
#define NAME "STANDIN"
#endif
#ifndef N_DEVICES
#define N_DEVICES 1
#endif

namespace {

std::vector<ggml_backend_device> devices(N_DEVICES);
std::vector<std::string> names;

const char * device_name(ggml_backend_dev_t d) { return names[d - devices.data()].c_str(); }
const char * description(ggml_backend_dev_t) { return "a stand-in"; }
enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
void memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = size_t(8) << 30; }

const char * name(ggml_backend_reg_t) { return NAME; }
size_t count(ggml_backend_reg_t) { return N_DEVICES; }
ggml_backend_dev_t get(ggml_backend_reg_t, size_t i) { return &devices[i]; }

} // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
    static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {name, count, get, nullptr}, nullptr};
#ifdef FAILS
    GGML_LOG_ERROR("%s: failed to initialize CUDA: the driver is too old\n", __func__);
#endif
    for (int i = 0; i < N_DEVICES; i++) {
        names.push_back(NAME + std::to_string(i));
        devices[i].iface.get_name = device_name;
        devices[i].iface.get_description = description;
        devices[i].iface.get_type = type;
        devices[i].iface.get_memory = memory;
        devices[i].reg = &reg;
    }
    return &reg;
}
"""
SCRIPT = """
import json
from moegguf.engine.devices import all_devices
from moegguf.native import library
problems = library.backend_problems()
names = [device.name for device in all_devices()]
print(json.dumps({"devices": names, "refused": problems.refused, "errors": problems.errors}))
"""

Install = Callable[..., Path]
Load = Callable[[], dict[str, Any]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function that compiles the stand-in backend and returns the path of the
    library.

    The function takes preprocessor definitions such as N_DEVICES=0. Skips the test if
    nothing can be compiled.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None or not GGML.exists():
        pytest.skip(
            "the stand-in needs a C++ compiler and the vendored sources (`make`)"
        )
    folder = library.find_library()

    def compile_one(*definitions: str, link: str = "-lggml-base") -> Path:
        source = tmp_path_factory.mktemp("stand-in") / "stand_in.cpp"
        built = source.with_suffix(".so")
        source.write_text(STAND_IN)
        command = [
            compiler, "-std=c++17", "-O0", "-fPIC", "-shared", "-w", f"-I{GGML}/include", f"-I{GGML}/src",
            *(f"-D{definition}" for definition in definitions), str(source), "-o", str(built), f"-L{folder}", link,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        return built

    return compile_one


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder on the module path of the processes that `load` starts."""
    return tmp_path / "site"


@pytest.fixture
def install(site: Path) -> Install:
    """Returns a function that installs a library as the plug-in `name`, with a file
    UPSTREAM.

    This file contains the pinned versions of the tested library, except for the values
    in `changes`.
    """

    def install_one(name: str, built: Path, **changes: str) -> Path:
        folder = site / plugins.NAMESPACE / name
        folder.mkdir(parents=True)
        shutil.copy(built, folder / f"libggml-{name.rstrip('0123456789')}.so")
        pin = (
            plugins.read_pin(library.find_library())
            | {"version": __version__}
            | changes
        )
        (folder / "UPSTREAM").write_text(
            "".join(f"{key} = {value}\n" for key, value in pin.items())
        )
        return folder

    return install_one


@pytest.fixture
def load(site: Path, tmp_path: Path) -> Load:
    """Returns a function that loads the library in another process.

    The function returns the process's devices, and the refused plug-ins and errors.
    """

    def load_all() -> dict[str, Any]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])
        }
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return dict(json.loads(done.stdout))

    return load_all


def test_installed_backend_adds_its_devices_beside_the_cpu(
    compiled: Callable[..., Path], install: Install, load: Load
) -> None:
    install("cuda13", compiled())
    assert load() == {"devices": ["CPU", "STANDIN0"], "refused": [], "errors": []}


def test_library_without_plugins_lists_only_the_cpu(load: Load) -> None:
    assert load() == {"devices": ["CPU"], "refused": [], "errors": []}


@pytest.mark.parametrize("field", plugins.BUILT_FROM)
def test_plugin_built_for_another_ggml_is_refused_with_the_command_to_install(
    compiled: Callable[..., Path], install: Install, load: Load, field: str
) -> None:
    install("cuda13", compiled(), version="0.0.9", **{field: "123abc"})
    found = load()
    assert found["devices"] == ["CPU"]
    (text,) = found["refused"]
    assert (
        "moegguf-cuda13 0.0.9" in text
        and "123abc" in text
        and f"moegguf {__version__}" in text
    )
    assert text.endswith(f'pip install "moegguf-cuda13=={__version__}".')


def test_plugin_without_a_pin_is_refused(
    compiled: Callable[..., Path], install: Install, load: Load
) -> None:
    (install("cuda13", compiled()) / "UPSTREAM").unlink()
    found = load()
    assert found["devices"] == ["CPU"]
    assert "(unknown" in found["refused"][0]


def test_cpu_works_if_the_driver_library_of_a_plugin_is_missing(
    compiled: Callable[..., Path], install: Install, load: Load, tmp_path: Path
) -> None:
    driver = tmp_path / "libdriver-of-no-card.so"
    subprocess.run(
        ["c++", "-shared", "-o", driver, "-x", "c++", os.devnull], check=True
    )
    install(
        "cuda13", compiled(link=f"-Wl,--no-as-needed,{driver},--allow-shlib-undefined")
    )
    driver.unlink()
    found = load()
    assert found["devices"] == ["CPU"]
    assert (
        "failed to load" in found["errors"][0]
        and "libdriver-of-no-card.so" in found["errors"][0]
    )


def test_cpu_works_if_the_file_of_a_plugin_is_not_a_library(
    install: Install, load: Load, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"no library")
    install("vulkan", broken)
    found = load()
    assert found["devices"] == ["CPU"]
    assert "failed to load" in found["errors"][0]


def test_plugin_without_devices_reports_its_error_and_the_next_plugin_loads(
    compiled: Callable[..., Path], install: Install, load: Load
) -> None:
    install("cuda13", compiled('NAME="CUDA"', "N_DEVICES=0", "FAILS"))
    install("cuda12", compiled('NAME="TWELVE"'))
    install("vulkan", compiled('NAME="Vulkan"'))
    found = load()
    assert found["devices"] == ["CPU", "TWELVE0"]
    assert "failed to initialize CUDA: the driver is too old" in found["errors"][0]


def test_plugin_folders_lists_the_newest_cuda_first_and_vulkan_last(
    install: Install, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for name in ("vulkan", "cuda12", "cuda13"):
        install(name, empty)
    monkeypatch.syspath_prepend(site)
    assert [folder.name for folder in plugins.plugin_folders()] == [
        "cuda13",
        "cuda12",
        "vulkan",
    ]


def test_build_identity_depends_on_installed_plugins(
    install: Install, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library.build_identity()
    empty = tmp_path / "empty"
    empty.touch()
    install("vulkan", empty)
    monkeypatch.syspath_prepend(site)
    assert library.build_identity() != before
