"""Counts for the popularity predictor, which has no options."""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from moegguf.trace.fit import fit_popularity
from moegguf.trace.trace import Trace


@dataclass(frozen=True)
class Options:
    """None."""


def train(trace: Trace, options: Options | None = None) -> dict[str, npt.NDArray]:
    """The counts over all of the trace."""
    return dict(fit_popularity(trace).weights().arrays)
