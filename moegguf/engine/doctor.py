"""Collects facts for a bug report: versions, build, devices, processor, memory, disk,
folders.

Each section, and some facts within a section, are collected separately. If one fails,
the reason is reported in its place, and the others are still reported. Facts are plain
values, ready for JSON; the frontends format them.
"""

from __future__ import annotations

import ctypes as c
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from moegguf.controller.artifacts import learnt_folder
from moegguf.engine.cards import card_note, find_cards
from moegguf.engine.devices import BackendDevice, all_devices
from moegguf.engine.machine import count_cpus, disk_read_speed, read_memory
from moegguf.errors import LibraryError, ModelNotFoundError, MoeggufError
from moegguf.folder_size import folder_size
from moegguf.models.catalog import Catalog, find_model
from moegguf.models.sources import demo_path, folder_files, hub_cache
from moegguf.native import library, plugins
from moegguf.package import __version__, package_folders
from moegguf.processor import read_processor
from moegguf.settings import cache_folder, data_folder, models_folder, read_environment
from moegguf.text import without_password

DISK_SECONDS = 0.5
CHECK_BUDGET = "30%"
CHECK_TOKENS = 16
CPU_FLAGS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8",
    "asimddp", "i8mm", "sve",
)  # fmt: skip
PACKAGES = ("numpy", "typer", "rich", "psutil")

Facts = dict[str, Any]
"""{name: value}; a fact that could not be collected is {"error": reason}."""


def diagnose(model: str | None = None) -> dict[str, Facts]:
    """Returns {section: facts} for this process and machine. The disk section measures
    the disk that holds `model`; without `model`, the disk of the file that `_disk`
    chooses.

    Does not raise exceptions.
    """
    # Collected first, because loading the library sets an environment variable.
    environment = _fact(_environment)
    sections: dict[str, Callable[[], Facts]] = {
        "moegguf": _versions,
        "build": _build,
        "devices": _devices,
        "cards": _cards,
        "machine": _machine,
        "disk": partial(_disk, model),
        "folders": _folders,
    }
    return {name: _fact(collect) for name, collect in sections.items()} | {
        "environment": environment
    }


def check_store() -> str:
    """Generates an answer with the demo model and few slots, and checks the expert
    store's bookkeeping afterwards.

    Returns the result as a sentence of two lines. Raises MoeggufError, naming the broken rule, if
    the check fails. Also raises it if the demo model is missing or does not load.
    """
    # imported here, because `diagnose` must work even if the library does not load
    from moegguf.engine.llama import Llama

    path = demo_path()
    if path is None:
        raise ModelNotFoundError(
            "this installation has no demo model to check the store with; install moegguf again."
        )
    with Llama(path, expert_cache=CHECK_BUDGET, n_ctx=128, verbose=False) as llm:
        assert llm.session is not None
        prompt = llm.tokenize(b"The expert store keeps")
        answer = list(islice(llm.generate(prompt, temp=0.0), CHECK_TOKENS))
        llm.session.store.drain()
        stats = llm.stats()
    return (
        f"The expert store's bookkeeping is correct after {len(answer)} tokens of the demo\n"
        f"model with {CHECK_BUDGET} of its experts: {stats.lookups:,} look-ups, {stats.evictions:,} evictions."
    )


def _fact(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        return {"error": _reason(error)}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _versions() -> Facts:
    return {
        "version": __version__,
        "folder": str(package_folders()[0].resolve()),
        "python": f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        "system": _fact(platform.platform),
        "packages": {
            name: _fact(partial(importlib.metadata.version, name)) for name in PACKAGES
        },
    }


def _build() -> Facts:
    return {
        "library": _fact(lambda: str(library.find_library())),
        "abi": _fact(lambda: library.load().moegguf_abi_version()),
        "llama.cpp": _fact(_llama_cpp_version),
        "llama.cpp pin": _fact(lambda: read_pin()["llama_cpp_commit"]),
        "ggml": _fact(lambda: _text_of(library.ggml().ggml_version)),
        "features": _fact(_features),
    }


def _text_of(function: Any) -> str:
    """Calls a C function without arguments, and returns its result as text."""
    function.restype = c.c_char_p
    function.argtypes = []
    return str(function().decode(errors="replace"))


def _llama_cpp_version() -> str:
    bindings = library.llama_cpp()
    return f"{_text_of(bindings.llama_cpp._lib.llama_version)}, bindings {bindings.__version__}"


def read_pin() -> dict[str, str]:
    """Returns the pinned sources of the library, such as the commit of llama.cpp.
    Raises LibraryError."""
    folder = library.find_library()
    if not (pin := plugins.read_pin(folder)):
        raise LibraryError(
            f"{folder} has no file UPSTREAM, so an older moegguf probably built the library; install moegguf again, or"
            " run `make`."
        )
    return pin


def _features() -> list[str]:
    """Returns the features of the build, as llama.cpp prints them: "AVX2", "OPENMP",
    "SVE_CNT=16", ..."""
    text = library.llama_cpp().llama_print_system_info().decode(errors="replace")
    pairs = [
        part.rpartition(":")[2].partition("=")
        for part in text.split("|")
        if "=" in part
    ]
    return [
        name.strip() + (f"={value.strip()}" if value.strip() != "1" else "")
        for name, _, value in pairs
    ]


def _devices() -> Facts:
    """Returns {device name: description, kind and memory} for the devices of all ggml
    backends in this build."""
    return {device.name: _fact(partial(_device, device)) for device in all_devices()}


def _device(device: BackendDevice) -> Facts:
    free_bytes, total_bytes = device.memory()
    about = {"description": device.description, "kind": device.kind}
    return about | {"free_bytes": free_bytes, "total_bytes": total_bytes}


def _cards() -> Facts:
    """Returns the graphics cards that the system lists, the installed backend plug-ins,
    and backend problems. `note` is the text of `card_note`, or None."""
    problems = library.backend_problems()
    return {
        "found": [
            " ".join(filter(None, (card.vendor, card.driver))) for card in find_cards()
        ],
        "plugins": [f"moegguf-{folder.name}" for folder in plugins.plugin_folders()],
        "problems": [*problems.refused, *problems.errors],
        "note": card_note() or None,
    }


def _machine() -> Facts:
    processor = read_processor()
    n_cpu = count_cpus()
    return {
        "cpu": processor.model,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in processor.flags],
        "cpus_allowed": n_cpu,
        "cores": min(psutil.cpu_count(logical=False) or n_cpu, n_cpu),
        "cpus_of_the_machine": os.cpu_count(),
        "memory": {
            name: value
            for name, value in asdict(read_memory()).items()
            if name != "margin_bytes"
        },
        "load": _fact(lambda: [round(value, 2) for value in os.getloadavg()]),
    }


def _disk(model: str | None) -> Facts:
    """Measures the disk that holds the model's file. Without `model`, reads the largest
    file in the models folder, or the demo model if that folder has no model."""
    files = sorted(folder_files(), key=lambda path: path.stat().st_size)
    path = find_model(model) if model else files[-1] if files else demo_path()
    if path is None:
        return {
            "error": "not measured: no model found; name one: `moegguf doctor MODEL`"
        }
    speed = disk_read_speed(path, DISK_SECONDS)
    return {
        "file": str(path),
        "size_bytes": path.stat().st_size,
        "bytes_per_s": round(speed.bytes_per_s),
        "past_page_cache": speed.direct,
    }


def _folders() -> Facts:
    """Returns the path and size of the folders that moegguf uses.

    The models folder is inside the data folder, unless MOEGGUF_MODELS names another
    one. Other programs also use the downloads folder. "learnt" lists the
    folders with learnt facts beside the files of models (`_learnt_folders`).
    """
    folders: dict[str, Callable[[], Path]] = {
        "package": lambda: package_folders()[0].resolve(),
        "data": data_folder,
        "models": models_folder,
        "cache": cache_folder,
        "downloads": hub_cache,
    }
    return {name: _fact(partial(_folder, find)) for name, find in folders.items()} | {
        "learnt": _fact(_learnt_folders)
    }


def _learnt_folders() -> Facts:
    """Returns {name of a model: path and size of the folder with learnt facts beside
    the model's file} for the models of the catalog that have such a folder."""
    names = {learnt_folder(entry.path): entry.name for entry in Catalog().entries()}
    return {
        name: _folder(partial(Path, folder))
        for folder, name in names.items()
        if folder.is_dir()
    }


def _folder(find: Callable[[], Path]) -> Facts:
    folder = find()
    return {"path": str(folder), "size_bytes": folder_size(folder)}


def _environment() -> Facts:
    """Returns the environment variables of moegguf and its libraries, without secrets.
    If a variable of moegguf has an invalid value, adds the reason as "error"."""
    prefixes = ("MOEGGUF_", "LLAMA_", "GGML_", "OMP_", "CUDA_VISIBLE", "HIP_VISIBLE")
    secrets = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    facts: Facts = {
        name: "(set)"
        if any(word in name for word in secrets)
        else without_password(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes)
    }
    try:
        read_environment()
    except MoeggufError as error:
        facts["error"] = _reason(error)
    return facts
