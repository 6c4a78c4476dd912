"""A predictor that the store itself runs: its name, its trained arrays, and the limits
of its actions.

The weights of networks are signed bytes. A prediction reads them from memory, and
float32 weights would have four times as many bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError
from moegguf.native import abi
from moegguf.native.events import Float32s, Int32s

Array = npt.NDArray[Any]
TYPE_OF = {np.dtype(name): value for name, value in abi.enum("array_type").items()}
STEPS = 127  # weights are rounded to the integers -127 to 127


@dataclass(frozen=True)
class NativePredictor:
    """A predictor's name and its trained arrays.

    The keys of `arrays` are the names by which the predictor's C++ class in
    `moegguf/native/predictors` finds its arrays. The store reads the arrays in place
    and makes no copy.
    """

    name: str
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class NativeForecast:
    """Options that control how the store uses a predictor."""

    window: int = 2  # number of MoE layers to predict ahead
    # Predicts each layer only once per pass, when it enters the window.
    once: bool = False
    # Largest number of prefetches per pass; 0: forecasts only protect resident experts.
    most_prefetches: int = 0
    # Cost of a useless prefetch, relative to the stall that a useful prefetch saves.
    waste_weight: float = 0.1
    # Routing events wait for all earlier predictions; runs are then reproducible, but
    # slow.
    lockstep: bool = False
    # Orders prefetches by probability times the layer's proximity; False: nearest layer
    # first.
    by_proximity: bool = False


def predictor_struct(predictor: NativePredictor, forecast: NativeForecast) -> Any:
    """Returns the struct moegguf_predictor. It points into the predictor's arrays,
    which must outlive the struct.

    Raises OptionError for an array that is not contiguous, or whose type the store does
    not read.
    """
    for name, values in predictor.arrays.items():
        if values.dtype not in TYPE_OF or not values.flags.c_contiguous:
            raise OptionError(
                f"the array {name!r} of a predictor must be contiguous and of one of the types"
                f" {', '.join(map(str, TYPE_OF))}, but is {'' if values.flags.c_contiguous else 'not contiguous and '}"
                f"{values.dtype}; convert it with numpy.ascontiguousarray."
            )
    rows = (abi.Array * len(predictor.arrays))(
        *(
            abi.Array(
                name.encode(), TYPE_OF[values.dtype], values.size, values.ctypes.data
            )
            for name, values in predictor.arrays.items()
        )
    )
    flags = abi.PREDICT_ONCE * forecast.once | abi.PREDICT_LOCKSTEP * forecast.lockstep
    flags |= abi.PREDICT_BY_PROXIMITY * forecast.by_proximity
    return abi.Predictor(
        predictor.name.encode(), len(rows), flags, rows, forecast.window, forecast.most_prefetches,
        forecast.waste_weight,
    )  # fmt: skip


def integers(*values: int) -> Int32s:
    """Returns the values as an int32 array, the form in which native predictors read
    their sizes and options."""
    return np.array(values, np.int32)


class QuantizedMatrix:
    """The matrix W (n_rows, n_cols) and the bias of y = W x + bias. W is stored as
    signed bytes with one scale per row.

    Rounding changes a weight by at most 1/254 of the largest absolute weight in its
    row.
    """

    def __init__(self, weights: Float32s, bias: Float32s | None = None) -> None:
        self.shape = weights.shape
        peaks = np.abs(weights).max(axis=1, initial=0.0)
        self.scale = np.maximum(peaks / STEPS, np.finfo(np.float32).tiny).astype(
            np.float32
        )
        self.bytes: npt.NDArray[np.int8] = np.rint(
            weights / self.scale[:, None]
        ).astype(np.int8)
        self.bias = (
            np.zeros(self.shape[0], np.float32)
            if bias is None
            else bias.astype(np.float32)
        )

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Returns the arrays from which a native predictor reads the matrix, as {name:
        array}."""
        return {
            f"{name}.weights": self.bytes,
            f"{name}.scale": self.scale,
            f"{name}.bias": self.bias,
        }
