"""Which of several devices computes which layer, as llama.cpp splits a model, and how one budget of slots is divided.

llama.cpp puts layers on devices in order: the last `n_gpu_layers` of the model, its output counted as one, in the
proportions of `tensor_split`. Plans of models and simulated devices go by the rules here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moegguf.errors import OptionError

ON_CPU = -1


def device_of_layers(n_layer: int, tensor_split: Sequence[float], n_gpu_layers: int = -1) -> list[int]:
    """The index of the device that computes each layer, ON_CPU for none (llama-model.cpp, load_tensors).

    n_layer: those that llama.cpp counts. n_gpu_layers: -1 is every layer and the output. Raises OptionError for a split
    that is not one.
    """
    split = np.asarray(tensor_split, np.float32)
    if split.size == 0 or not np.isfinite(split).all() or (split < 0).any() or split.sum() == 0:
        raise OptionError(
            f"tensor_split is {list(tensor_split)}, but has a proportion for each device, none below 0 and some above."
        )
    bounds = np.cumsum(split, dtype=np.float32)
    bounds /= bounds[-1]
    n_on_devices = n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layer + 1)
    first = n_layer + 1 - n_on_devices
    places = np.arange(n_layer - first, dtype=np.float32) / np.float32(max(1, n_on_devices))
    return [ON_CPU] * min(first, n_layer) + np.searchsorted(bounds, places, side="right").tolist()


def share_out(total: int, shares: Sequence[int], most: Sequence[int], least: int) -> list[int]:
    """`total` slots of several devices in proportion to `shares`, none with more than its `most`, for all of its
    experts, and none with fewer than `least`, where it needs as many and there are; what is over goes to the others."""
    least = min(least, total // max(1, sum(of > 0 for of in most)))
    given = [min(of, least) for of in most]
    while (left := total - sum(given)) > 0 and (free := [d for d in range(len(most)) if given[d] < most[d]]):
        weight = sum(shares[d] for d in free)
        more = {d: min(most[d] - given[d], left * shares[d] // weight if weight else 0) for d in free}
        if not any(more.values()):
            more = {free[0]: 1}
        for d, n in more.items():
            given[d] += n
    return given
