"""What the loaded llama.cpp is: commit, processors, backends, in llama-bench's words."""

from __future__ import annotations

import ctypes as c
from types import ModuleType
from typing import Any

import moegguf
from moegguf.engine.machine import read_machine

_CPU, _GPU, _IGPU, _ACCEL = 0, 1, 2, 3  # enum ggml_backend_dev_type


def _functions(ggml: Any) -> Any:
    for name in ("ggml_backend_dev_count", "ggml_backend_reg_count", "ggml_backend_reg_dev_count"):
        getattr(ggml, name).restype = c.c_size_t
    for name in ("ggml_backend_dev_get", "ggml_backend_reg_get"):
        getattr(ggml, name).restype, getattr(ggml, name).argtypes = c.c_void_p, [c.c_size_t]
    for name in ("ggml_backend_dev_description", "ggml_backend_reg_name"):
        getattr(ggml, name).restype, getattr(ggml, name).argtypes = c.c_char_p, [c.c_void_p]
    ggml.ggml_backend_dev_type.argtypes = ggml.ggml_backend_reg_dev_count.argtypes = [c.c_void_p]
    return ggml


def describe_build(bindings: ModuleType) -> dict[str, Any]:
    """build_commit, build_number, cpu_info, gpu_info, backends of the library behind `bindings`."""
    try:
        ggml = _functions(bindings.llama_cpp._lib)  # libllama links to ggml, so its symbols are found through it
    except AttributeError:
        names, kinds, backends = [], [], []
    else:
        devices = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
        names = [ggml.ggml_backend_dev_description(device).decode() for device in devices]
        kinds = [ggml.ggml_backend_dev_type(device) for device in devices]
        found = [ggml.ggml_backend_reg_get(i) for i in range(ggml.ggml_backend_reg_count())]
        backends = [ggml.ggml_backend_reg_name(r).decode() for r in found if ggml.ggml_backend_reg_dev_count(r)]
    by_kind = lambda *wanted: ", ".join(n for n, kind in zip(names, kinds, strict=True) if kind in wanted)  # noqa: E731
    return {
        # ggml_commit() would name the commit of whatever repository it was built in.
        "build_commit": f"moegguf-{moegguf.__version__}+llama-cpp-python-{bindings.__version__}",
        "build_number": 0,
        "cpu_info": by_kind(_CPU, _ACCEL) or read_machine().cpu_model,
        "gpu_info": by_kind(_GPU, _IGPU),
        "backends": ",".join(name for name in backends if name != "CPU") or "CPU",
    }
