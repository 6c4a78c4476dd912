"""Tests tools/gpu_trial.py: the packed files, calls that continue an earlier call, and
the table of results."""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_trial
from tools.gpu import build, pack, start
from tools.gpu.rig import (
    ALL_ON_CPU,
    NO_LIMIT,
    OURS,
    RESIDENT,
    RESIDENT_STORE,
    SOME_ON_CPU,
    small,
)
from tools.gpu.steps import State, Step, StepError, run_steps
from tools.gpu.table import table

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = """
import sys
from importlib.metadata import packages_distributions
sys.path[:0] = [".", "tests", "tests/live"]
import tools.gpu_trial, tools.gpu.measure, tools.make_model, test_gpu, conftest, platformdirs
names = {module.split(".")[0] for module in sys.modules}
print("\\n".join(name for top, names_ in packages_distributions().items() if top in names for name in names_))
"""


def test_pack_includes_a_wheel_of_every_package_that_steps_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    imported = {name.lower().replace("_", "-") for name in done.stdout.split()} - {
        "moegguf",
        "setuptools",
    }
    assert {"numpy", "gguf", "pytest"} <= imported
    assert imported <= {*pack.PRODUCT, *pack.BESIDE}
    assert len(pack.requirements()) == len({*pack.PRODUCT, *pack.BESIDE})


def test_pack_includes_the_sources_of_the_build_and_the_steps() -> None:
    files = dict(pack.sources())
    assert {
        "tools/gpu_trial.py",
        "tools/vendor.py",
        "patches/series",
        "moegguf/native/CMakeLists.txt",
        "moegguf/bindings/llama_cpp/__init__.py",
        "tests/live/test_gpu.py",
        "tests/live/running.py",
        "build/vendor/llama.cpp.stamp",
        "build/vendor/llama.cpp/ggml/src/ggml-cuda/mmq.cu",
    } <= files.keys()
    assert not [
        name for name in files if name.endswith(".gguf") or "src/ggml-opencl" in name
    ]
    assert sum(path.stat().st_size for path in files.values()) < pack.MOST_BYTES


def test_unpack_runs_once_and_pack_overwrites_no_foreign_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, work = tmp_path / "packed", tmp_path / "work"
    (packed / "wheels").mkdir(parents=True)
    work.mkdir()
    with tarfile.open(packed / "sources.tar.xz", "w:xz") as tar:
        tar.add(ROOT / "LICENSE", "LICENSE")
    with zipfile.ZipFile(packed / "wheels" / "one-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "")
    monkeypatch.setattr(start, "HERE", packed)
    start.unpack(work)
    assert (work / "sources" / "LICENSE").read_bytes() == (
        ROOT / "LICENSE"
    ).read_bytes()
    assert (work / "site" / "one" / "__init__.py").exists()
    (work / "sources" / "LICENSE").unlink()
    start.unpack(work)
    assert not (work / "sources" / "LICENSE").exists()
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="name another"):
        pack.pack(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


class Clock:
    """A simulated clock. Each step created by `step` advances it by the step's
    seconds."""

    def __init__(self) -> None:
        self.now, self.ran, self.said = 0.0, list[str](), list[str]()

    def __call__(self) -> float:
        return self.now

    def step(
        self,
        name: str,
        seconds: float,
        outcome: Callable[[float], dict[str, Any]] = lambda _: {},
    ) -> Step:
        def run(left_s: float) -> dict[str, Any]:
            self.ran.append(name)
            self.now += seconds
            return outcome(left_s)

        return Step(name, run, seconds)


def test_run_steps_runs_steps_that_fit_and_the_next_call_continues(
    tmp_path: Path,
) -> None:
    clock = Clock()
    steps = [
        clock.step("a", 40),
        clock.step("b", 50, lambda left_s: {"refused": f"{left_s:.0f}"}),
        clock.step("c", 30),
    ]
    assert not run_steps(
        steps, State(tmp_path / "state.json"), 100, clock.said.append, clock
    )
    assert clock.ran == ["a", "b"]
    assert clock.said[-1] == "c: needs up to 30 s, 10 s are left; call again"
    state = State(tmp_path / "state.json")
    assert state.outcomes["b"] == {"refused": "60", "seconds": 50}
    assert run_steps(steps, state, 100, clock.said.append, clock)
    assert clock.ran == ["a", "b", "c"]


def test_run_steps_stops_at_a_failed_step_and_repeats_that_step(tmp_path: Path) -> None:
    clock, state, broken = Clock(), State(tmp_path / "state.json"), [True]

    def build(_left_s: float) -> dict[str, Any]:
        if broken.pop():
            broken.append(False)
            raise StepError("cmake found no cublas")
        return {}

    steps = [clock.step("build", 10, build), clock.step("then", 1)]
    with pytest.raises(StepError, match=r"^build: cmake found no cublas$"):
        run_steps(steps, state, 100, clock.said.append, clock)
    assert (clock.ran, state.outcomes) == (["build"], {})
    assert run_steps(
        steps, State(tmp_path / "state.json"), 100, clock.said.append, clock
    )
    assert clock.ran == ["build", "build", "then"]


def test_trial_records_out_of_memory_and_raises_other_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = gpu_trial.Trial(
        tmp_path, small(), "GPU0", build.Backend("cuda", ()), tmp_path
    )
    case = next(iter(small().cases(small().models[0], tmp_path, "GPU0", 1)))[1]

    def ended(stderr: str) -> None:
        done = subprocess.CompletedProcess(
            [], 1, '{"error": "llama_decode failed"}', stderr
        )
        monkeypatch.setattr(gpu_trial.Trial, "_python", lambda *_: done)

    ended("ggml: cudaMalloc failed: out of memory\n")
    assert trial._measure("measure/m", case, 10) == {
        "refused": "does not fit (ggml: cudaMalloc failed: out of memory)"
    }
    ended("illegal memory access")
    with pytest.raises(StepError, match="llama_decode failed"):
        trial._measure("measure/m", case, 10)


def test_cuda_backend_uses_cublas_of_a_wheel_if_the_toolkit_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, wheel = tmp_path / "cuda/bin/nvcc", tmp_path / "site/nvidia/cu13"
    of_another_version = tmp_path / "site/nvidia/a/lib/libcublas.so.12"
    for file in (
        compiler,
        wheel / "lib/libcublas.so.13",
        wheel / "include/cublas_v2.h",
        of_another_version,
    ):
        file.parent.mkdir(parents=True)
        file.touch()
    compiler.write_text(
        "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(compiler))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    backend = build.cuda("90")
    assert f"-DCUDA_cublas_LIBRARY={wheel}/lib/libcublas.so.13" in backend.flags
    assert f"-DCUDA_cublasLt_LIBRARY={wheel}/lib/libcublasLt.so.13" in backend.flags
    assert backend.environment["LD_LIBRARY_PATH"].startswith(f"{wheel}/lib")
    (tmp_path / "cuda/lib64").mkdir()
    (tmp_path / "cuda/lib64/libcublas.so").touch()
    assert build.cuda("90") == build.Backend(
        "cuda", ("-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90")
    )


def measured(tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {
        "prompt_tokens_per_s": 900.0,
        "first_tokens_per_s": 20.0,
        "steady_tokens_per_s": tokens_per_s,
        **more,
    }


def test_trial_table_lists_llama_cpps_best_own_speeds_and_predictions() -> None:
    moved = {
        "VRAM": {"hit_rate": 0.84, "bytes_per_token": 12.5e6},
        "RAM": {"hit_rate": 1.0, "bytes_per_token": 0.0},
    }
    predicted = {
        "resident": 130.0,
        "layers": 52.0,
        "cpu": 41.0,
        "slots": 83.0,
        "chosen": 83.0,
    }
    text = table(
        {
            "facts": {"name": "a card", "seconds": 1},
            "identity/passes": {"summary": "16 passed in 4s"},
            f"measure/m/{NO_LIMIT}/{RESIDENT}/-": measured(137.0, n_cpu_moe=0),
            f"measure/m/{NO_LIMIT}/{RESIDENT_STORE}/-": measured(125.0),
            f"measure/m/8 GB/{ALL_ON_CPU}/-": measured(43.0, n_cpu_moe=48),
            f"measure/m/8 GB/{SOME_ON_CPU}/more_on_cpu=-1": {
                "refused": "does not fit (out of memory)"
            },
            f"measure/m/8 GB/{SOME_ON_CPU}/more_on_cpu=0": measured(50.0, n_cpu_moe=36),
            f"measure/m/8 GB/{SOME_ON_CPU}/more_on_cpu=1": measured(48.0, n_cpu_moe=37),
            f"measure/m/8 GB/{OURS}/-": measured(
                80.0, steady=moved, predicted=predicted
            ),
            f"measure/m/12 GB/{OURS}/-": {"refused": "does not fit (cudaMalloc)"},
        }
    )
    assert text.splitlines()[2:] == [
        "| m | - | llama.cpp, all on the device | 900.0 | 20.0 | 137.0 | – | 1.10x | 130.0 | – | – |",
        "| m | - | moegguf, a slot for each expert | 900.0 | 20.0 | 125.0 | – | – | – | – | – |",
        "| m | 8 GB | llama.cpp -cmoe | 900.0 | 20.0 | 43.0 | 0.86x | 0.34x | 41.0 | – | – |",
        "| m | 8 GB | llama.cpp -ncmoe 36 | 900.0 | 20.0 | 50.0 | – | 0.40x | 52.0 | – | – |",
        "| m | 8 GB | moegguf | 900.0 | 20.0 | 80.0 | 1.60x | 0.64x | 83.0 | 84.0% | 12.5 |",
        "",
        "name: a card",
        "",
        "identity/passes: 16 passed in 4s",
        "",
        "Not measured:",
        "- m, 12 GB, moegguf: does not fit (cudaMalloc)",
    ]
