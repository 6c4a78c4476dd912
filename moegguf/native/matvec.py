"""Matrices in signed bytes, which predictors of a few million weights compute with (`predictors/matvec.cpp`).

float32 weights are read from memory at every call, four bytes each; signed bytes take a quarter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.native.events import Float32s

STEPS = 127  # of a signed byte, on each side of zero


class QuantizedMatrix:
    """The W and bias of y = W x + bias: W (n_rows, n_cols) as signed bytes with one scale per row.

    Rounding moves a weight by at most 1/254 of the largest in its row.
    """

    def __init__(self, weights: Float32s, bias: Float32s | None = None) -> None:
        self.shape = weights.shape
        peaks = np.abs(weights).max(axis=1, initial=0.0)
        self.scale = np.maximum(peaks / STEPS, np.finfo(np.float32).tiny).astype(np.float32)
        self.bytes: npt.NDArray[np.int8] = np.rint(weights / self.scale[:, None]).astype(np.int8)
        self.bias = np.zeros(self.shape[0], np.float32) if bias is None else bias.astype(np.float32)

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """What a native predictor takes it by."""
        return {f"{name}.weights": self.bytes, f"{name}.scale": self.scale, f"{name}.bias": self.bias}
