"""A matrix of signed bytes times a vector: what predictors of a few million weights compute with.

float32 weights are read from memory at every call, four bytes each; signed bytes take a quarter. The kernel is in
`predictors/matvec.cpp`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError
from moegguf.native.events import Float32s
from moegguf.native.library import load

STEPS = 127  # of a signed byte, on each side of zero


class QuantizedMatrix:
    """y = W x + bias, then ReLU if asked: W (n_rows, n_cols) as signed bytes with one scale per row.

    Rounding moves a weight by at most 1/254 of the largest in its row. Never changes once made.
    """

    def __init__(self, weights: Float32s, bias: Float32s | None = None, *, relu: bool = False) -> None:
        self.shape = weights.shape
        peaks = np.abs(weights).max(axis=1, initial=0.0)
        self.scale = np.maximum(peaks / STEPS, np.finfo(np.float32).tiny).astype(np.float32)
        self.bytes: npt.NDArray[np.int8] = np.rint(weights / self.scale[:, None]).astype(np.int8)
        self.bias = np.zeros(self.shape[0], np.float32) if bias is None else bias.astype(np.float32)
        self.relu = relu
        self._kernel = load().moegguf_matvec_q8  # its calls let other threads run
        self._addresses = tuple(a.ctypes.data for a in (self.bytes, self.scale, self.bias))

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """What a native predictor takes it by."""
        return {f"{name}.weights": self.bytes, f"{name}.scale": self.scale, f"{name}.bias": self.bias}

    def __deepcopy__(self, memo: object) -> QuantizedMatrix:
        return self

    def apply(self, x: Float32s, out: Float32s) -> Float32s:
        """Writes y for `x` (n_cols,) to `out` (n_rows,) and returns it; OptionError unless contiguous float32."""
        for vector, n in ((out, self.shape[0]), (x, self.shape[1])):
            if vector.shape != (n,) or vector.dtype != np.float32 or not vector.flags.c_contiguous:
                raise OptionError(
                    f"a vector must be {n} float32 in a row, but is {vector.dtype} of shape {vector.shape}."
                )
        n_rows, n_cols = self.shape
        self._kernel(*self._addresses, n_rows, n_cols, x.ctypes.data, self.relu, out.ctypes.data)
        return out
