"""Training of predictors on recorded routing, run by predictors/train/predictor.py.

The module of each of TRAINERS has `Options`, a frozen dataclass whose fields go into the saved facts, and `train(trace,
options)`, which returns the arrays that the predictor's `from_weights` takes. Those of COUNTED have no options.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from moegguf.controller.weights import Weights
from moegguf.trace.trace import Trace
from predictors.train.fit import fit_affinity, fit_popularity, fit_token_table

COUNTED: dict[str, Callable[[Trace], Weights]] = {
    "token-id": lambda trace: fit_token_table(trace).weights(),
    "popularity": lambda trace: fit_popularity(trace).weights(),
    "affinity": lambda trace: fit_affinity(trace).weights(),
}
TRAINERS = ("mlp", "expert-mlp", "routing-path")


def trainer(predictor: str) -> ModuleType:
    """The module that trains this predictor of TRAINERS; it needs torch."""
    return import_module(f"{__name__}.{predictor.replace('-', '_')}")
