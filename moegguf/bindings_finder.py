"""Finds the `llama_cpp` bindings that lie in this package once moegguf is imported, also where llama-cpp-python is
installed. Imports nothing of moegguf before that: `moegguf --help` passes here."""

from __future__ import annotations

import importlib
from importlib.machinery import ModuleSpec


class BindingsFinder:
    """A finder for `sys.meta_path` that loads our libllama before the bindings over it are imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The bindings' spec; None for other modules. Raises LibraryError where the native library does not load."""
        if name != "llama_cpp":
            return None
        found: ModuleSpec | None = importlib.import_module("moegguf.native.library").find_bindings()
        return found
