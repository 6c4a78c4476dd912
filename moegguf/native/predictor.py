"""A predictor that the store computes by itself: its name there, its trained arrays, and how far it may act.

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
STEPS = 127  # of a signed byte, on each side of zero


@dataclass(frozen=True)
class NativePredictor:
    """arrays: {name: values}, as its file in `moegguf/native/predictors` says; used in place, not copied."""

    name: str
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class NativeForecast:
    """How the store uses a predictor.

    window: layers with experts ahead. once: a layer is predicted when it comes into the window, and not again.
    most_prefetches: experts started in a pass; 0: predictions only protect what is there. waste_weight: what a prefetch
    in vain costs, as a share of the stall that one in time saves; 0: costs do not count. lockstep: routing events wait
    for predictions, so that these act at a fixed place; slow, and reproducible. by_proximity: the largest probability
    times layer proximity is fetched first, of any layer, else the nearest layer.
    """

    window: int = 2
    once: bool = False
    most_prefetches: int = 0
    waste_weight: float = 0.1
    lockstep: bool = False
    by_proximity: bool = False


def predictor_struct(predictor: NativePredictor, forecast: NativeForecast) -> Any:
    """The struct moegguf_predictor. It points into the arrays, which must outlive it.

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
    """An array of whole numbers, as native predictors take sizes and choices."""
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
        """What a native predictor takes it by."""
        return {f"{name}.weights": self.bytes, f"{name}.scale": self.scale, f"{name}.bias": self.bias}
