"""Training of predictors on recorded routing: one module per predictor, run by tools/train_predictor.py.

Each has `Options`, a frozen dataclass whose fields go into the saved facts, and `train(trace, options)`, which returns
the arrays that the predictor's `from_weights` takes.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

TRAINERS = {
    "token-id": "token_table",
    "popularity": "popularity",
    "affinity": "affinity",
    "mlp": "mlp",
    "expert-mlp": "expert_mlp",
    "routing-path": "routing_path",
}


def trainer(predictor: str) -> ModuleType:
    """The module that trains this predictor."""
    return import_module(f"{__name__}.{TRAINERS[predictor]}")
