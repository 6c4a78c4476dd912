"""moegguf runs Mixture-of-Experts GGUF models whose experts do not fit in fast memory.

`Llama` is llama-cpp-python's `Llama` with a memory budget for experts. After `import
moegguf`, `import llama_cpp` loads the bindings in this package. `Engine` answers
several requests at once. `read_layout` finds the experts in a model's file, and
`make_plan` computes a placement; neither loads the model. `MoeggufError` is the base
class of all errors in `moegguf.errors`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from moegguf.errors import MoeggufError
from moegguf.package import __version__

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from moegguf.engine.llama import Llama as Llama
    from moegguf.engine.solver import make_plan as make_plan
    from moegguf.engine.stats import Stats as Stats
    from moegguf.generate.engine import Engine as Engine
    from moegguf.generate.engine import EngineAnswer as EngineAnswer
    from moegguf.generate.request import Sampling as Sampling
    from moegguf.gguf.experts import read_layout as read_layout
    from moegguf.native.store import StoreOptions as StoreOptions

_MODULES = {
    "Engine": "moegguf.generate.engine",
    "EngineAnswer": "moegguf.generate.engine",
    "Llama": "moegguf.engine.llama",
    "Sampling": "moegguf.generate.request",
    "Stats": "moegguf.engine.stats",
    "StoreOptions": "moegguf.native.store",
    "make_plan": "moegguf.engine.solver",
    "read_layout": "moegguf.gguf.experts",
}
__all__ = ["MoeggufError", "__version__", *_MODULES]


class BindingsFinder:
    """Finds the `llama_cpp` bindings in this package, even if llama-cpp-python is
    installed. Loads this package's libllama before the bindings are imported."""

    @staticmethod
    def find_spec(
        name: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Returns the import spec of this package's bindings. Returns None for other
        modules, or if the bindings are not installed. Raises LibraryError if the native
        library cannot be loaded."""
        if name != "llama_cpp":
            return None
        found: ModuleSpec | None = importlib.import_module(
            "moegguf.native.library"
        ).find_bindings()
        return found


sys.meta_path.insert(0, BindingsFinder)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Importing moegguf must not load numpy or libllama, so that `moegguf --help` is
    # fast.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'moegguf' has no attribute {name!r}")
