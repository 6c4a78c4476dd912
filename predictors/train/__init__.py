"""Training of predictors on recorded routing, run by predictors/train/predictor.py.

The module of each of TRAINERS has `Options`, a frozen dataclass whose fields go into the saved facts. Its `train(trace,
options)` returns the arrays that the predictor's `from_weights` takes, and facts of the training. The predictors of
`fit.COUNTED` have no options.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

TRAINERS = ("mlp", "expert-mlp", "routing-path")


def trainer(predictor: str) -> ModuleType:
    """The module that trains this predictor of TRAINERS; it needs torch."""
    return import_module(f"{__name__}.{predictor.replace('-', '_')}")
