"""Loads ggml backends that are installed as separate packages, such as moegguf-cuda13.

Each package adds one folder to the namespace package `moegguf_backends`. The folder has
the package's name without the prefix `moegguf-`. The folder contains one library and
the file UPSTREAM, which lists the sources from which the library was built.
`tools/gpu/plugin.py` builds such packages.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from moegguf.package import __version__

NAMESPACE = "moegguf_backends"
# Fields of UPSTREAM that must match moegguf's own build.
BUILT_FROM = ("llama_cpp_commit", "ggml_headers")
GPU = 1  # value of enum ggml_backend_dev_type


def read_pin(folder: Path) -> dict[str, str]:
    """Reads the `key = value` lines of the file UPSTREAM in a folder. Returns {} if
    there is no such file."""
    file = folder / "UPSTREAM"
    lines = file.read_text().splitlines() if file.exists() else []
    pairs = (
        line.partition("=")
        for line in lines
        if "=" in line and not line.startswith("#")
    )
    return {key.strip(): value.strip() for key, _, value in pairs}


def plugin_folders() -> list[Path]:
    """Returns the folders of installed backends in loading order, for example cuda13,
    cuda12, vulkan."""
    found = importlib.util.find_spec(NAMESPACE)
    places = found.submodule_search_locations if found else None
    inside = [path for place in places or () for path in Path(place).iterdir()]
    folders = [path for path in inside if any(path.glob("libggml-*"))]
    newest_first = sorted(folders, key=lambda folder: folder.name, reverse=True)
    return sorted(newest_first, key=_backend_of)


def load_plugins(ggml: c.CDLL, own_pin: Mapping[str, str]) -> list[str]:
    """Loads installed backends into `ggml`, one after another, until ggml has a GPU.

    A second backend would list the same GPU again. Returns a sentence for each backend
    that was skipped because it was built from different sources. If a library does not
    load, for example because the driver is missing, ggml logs the reason.
    """
    by_type, load = ggml.ggml_backend_dev_by_type, ggml.ggml_backend_load
    by_type.restype = load.restype = c.c_void_p
    load.argtypes = [c.c_char_p]
    refused = []
    for folder in plugin_folders():
        if by_type(GPU):
            break
        pin = read_pin(folder)
        if all(pin.get(field) == own_pin.get(field) for field in BUILT_FROM):
            load(os.fsencode(folder / f"libggml-{_backend_of(folder)}.so"))
        else:
            refused.append(_refusal(folder.name, pin, own_pin))
    return refused


def _backend_of(folder: Path) -> str:
    """Returns the name of the backend in a folder: "cuda" for the folder cuda13."""
    return re.sub(r"\d+$", "", folder.name)


def _refusal(name: str, pin: Mapping[str, str], own_pin: Mapping[str, str]) -> str:
    package = f"moegguf-{name}"
    return (
        f"{package} {pin.get('version', '(unknown version)')} is not used: it was built for"
        f" {_ggml_of(pin)}, but moegguf {__version__} has {_ggml_of(own_pin)};"
        f' pip install "{package}=={__version__}".'
    )


def _ggml_of(pin: Mapping[str, str]) -> str:
    return " ".join(["ggml", *(pin.get(field, "(unknown)") for field in BUILT_FROM)])
