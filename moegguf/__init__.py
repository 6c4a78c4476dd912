"""moegguf runs Mixture-of-Experts GGUF models whose experts do not fit in fast memory.

The menu: `Llama` is llama-cpp-python's `Llama` with a budget for experts; `read_layout` and `make_plan` say beforehand
what would go where; everything raised on purpose is a `MoeggufError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moegguf.errors import MoeggufError

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.engine.plan import make_plan
    from moegguf.engine.stats import Stats
    from moegguf.gguf.experts import read_layout
    from moegguf.native.store import StoreOptions

__version__ = "0.1.0"
__all__ = ["Llama", "MoeggufError", "Stats", "StoreOptions", "__version__", "make_plan", "read_layout"]

_HOMES = {
    "Llama": "moegguf.engine.llama",
    "Stats": "moegguf.engine.stats",
    "StoreOptions": "moegguf.native.store",
    "make_plan": "moegguf.engine.plan",
    "read_layout": "moegguf.gguf.experts",
}


def __getattr__(name: str) -> Any:
    # Importing moegguf must not load numpy and libllama: `moegguf --help` answers at once.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moegguf' has no attribute {name!r}")
