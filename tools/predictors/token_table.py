"""Counts for the token-id predictor: nothing to tune."""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from moegguf.controller.predictors.token_table import TokenTable
from moegguf.controller.trace import Trace


@dataclass(frozen=True)
class Options:
    """None."""


def train(trace: Trace, options: Options | None = None) -> dict[str, npt.NDArray]:
    """The counts over all of the trace."""
    return dict(TokenTable.learn(trace).weights().arrays)
