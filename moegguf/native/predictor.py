"""A predictor that the store computes by itself: its name, its trained arrays, and the limits of its actions.

Weights are signed bytes: float32 weights would be read from memory at every call, four bytes each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError
from moegguf.native import abi
from moegguf.native.events import Float32s

Array = npt.NDArray[Any]
TYPE_OF = {np.dtype(name): value for name, value in abi.enum("array_type").items()}
STEPS = 127  # steps of a signed byte on each side of zero


@dataclass(frozen=True)
class NativePredictor:
    """A predictor's name, and its arrays by the names that its file in `moegguf/native/predictors` lists.

    The store reads the arrays in place and makes no copy.
    """

    name: str
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class NativeForecast:
    """The way in which the store uses a predictor."""

    window: int = 2  # layers with experts ahead that are predicted
    once: bool = False  # a layer is predicted when it comes into the window, and not again
    most_prefetches: int = 0  # experts that are started in a pass; 0: predictions only protect resident experts
    waste_weight: float = 0.1  # cost of a prefetch in vain, as a share of the stall that a useful one saves
    lockstep: bool = False  # routing events wait for predictions, which then act at a fixed place: slow, reproducible
    by_proximity: bool = False  # fetches by probability times layer proximity; otherwise the nearest layer first


def predictor_struct(predictor: NativePredictor, forecast: NativeForecast) -> Any:
    """Returns the struct moegguf_predictor. It points into the arrays, which must outlive it.

    Raises OptionError for an array of another type or that is not contiguous.
    """
    for name, values in predictor.arrays.items():
        if values.dtype not in TYPE_OF or not values.flags.c_contiguous:
            raise OptionError(f"the array {name!r} of a predictor has a type or an order that the store does not read.")
    rows = (abi.Array * len(predictor.arrays))(
        *(
            abi.Array(name.encode(), TYPE_OF[values.dtype], values.size, values.ctypes.data)
            for name, values in predictor.arrays.items()
        )
    )
    flags = abi.PREDICT_ONCE * forecast.once | abi.PREDICT_LOCKSTEP * forecast.lockstep
    flags |= abi.PREDICT_BY_PROXIMITY * forecast.by_proximity
    return abi.Predictor(
        predictor.name.encode(), len(rows), flags, rows, forecast.window, forecast.most_prefetches,
        forecast.waste_weight,
    )  # fmt: skip


def integers(*values: int) -> npt.NDArray[np.int32]:
    """Returns an array of whole numbers: native predictors read sizes and choices from such arrays."""
    return np.array(values, np.int32)


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
        """Returns the arrays from which a native predictor reads the matrix."""
        return {f"{name}.weights": self.bytes, f"{name}.scale": self.scale, f"{name}.bias": self.bias}
