"""Trains ProMoE's two-layer MLPs (section 4.3), one per pair of layers that the windows need.

Inputs are standardised for training, and that is folded into the first matrix afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from moegguf.controller.predictors.networks import window_pairs
from moegguf.controller.weights import Weights
from moegguf.trace.trace import Trace
from predictors.train.fit import choices
from predictors.train.fitting import Fitted, Samples, Schedule, fit
from predictors.train.splitting import validation_tokens


@dataclass(frozen=True)
class Options(Schedule):
    """windows: distances k. n_hidden: 970 makes 2 million weights of 2048 inputs and 60 experts, as in the paper."""

    lr: float = 3e-3
    windows: tuple[int, ...] = (1, 2, 4, 8)
    n_hidden: int = 512


def train(trace: Trace, options: Options | None = None) -> Weights:
    """Arrays `<source>.<target>.{hidden,out}.{weight,bias}`; and `validation`, the accuracy by epoch, the mean over
    networks. ValueError when the trace has no inputs."""
    options = options or Options()
    if trace.inputs is None:
        raise ValueError("the trace must hold the routers' inputs, but does not; record it with inputs.")
    torch.manual_seed(options.seed)
    validation = validation_tokens(trace, options.seed)
    row_of = trace.shape.row_of
    arrays: dict[str, npt.NDArray[np.float16]] = {}
    curves = list[tuple[float, ...]]()
    for source, target in window_pairs(trace.shape, options.windows):
        known = np.flatnonzero(
            (trace.expert_ids[row_of[source], :, 0] >= 0) & (trace.expert_ids[row_of[target], :, 0] >= 0)
        )
        samples = Samples(
            torch.from_numpy(trace.inputs[row_of[source], known].astype(np.float32)),
            torch.from_numpy(choices(trace, row_of[target])[known]),
            torch.from_numpy(validation[known]),
        )
        pair, fitted = train_pair(samples, options)
        print(f"mlp {source} -> {target}: {fitted}", flush=True)
        curves.append(fitted.curve)
        arrays |= {f"{source}.{target}.{name}": array for name, array in pair.items()}
    return Weights(arrays, {"validation": _mean_curve(curves)})


def _mean_curve(curves: Sequence[tuple[float, ...]]) -> list[float]:
    """The mean over networks after each epoch; of one that stopped earlier its last value."""
    longest = max(map(len, curves), default=0)
    return np.mean([[*curve, *[curve[-1]] * (longest - len(curve))] for curve in curves], axis=0).tolist()


def train_pair(samples: Samples, options: Options) -> tuple[dict[str, npt.NDArray[np.float16]], Fitted]:
    """One MLP's arrays, and how its training went."""
    mean = samples.inputs.mean(dim=0)
    spread = samples.inputs.std(dim=0) + 1e-6
    scaled = Samples((samples.inputs - mean) / spread, samples.chosen, samples.validation)
    hidden = nn.Linear(samples.inputs.shape[1], options.n_hidden)
    out = nn.Linear(options.n_hidden, samples.chosen.shape[1])
    fitted = fit(nn.Sequential(hidden, nn.ReLU(), out), scaled, _loss, options)
    with torch.no_grad():
        weight = hidden.weight / spread
        arrays = {
            "hidden.weight": weight,
            "hidden.bias": hidden.bias - weight @ mean,
            "out.weight": out.weight,
            "out.bias": out.bias,
        }
    return {name: array.detach().numpy().astype(np.float16) for name, array in arrays.items()}, fitted


def _loss(logits: Tensor, chosen: Tensor) -> Tensor:
    """Cross-entropy with the choices as equal shares.

    On two pairs of layers of a small model it was 1 to 2 points of accuracy above KL on the router's probabilities,
    and 2 to 4 above BCE (one seed).
    """
    return functional.cross_entropy(logits, chosen / chosen.sum(dim=1, keepdim=True))
