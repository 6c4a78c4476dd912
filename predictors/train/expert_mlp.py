"""Trains DuoServe-MoE's ExpertMLP (section 4.2): one network for all layers, BCE, BatchNorm, ReLU, dropout 0.1.

Popularity and affinity are counted on the same trace first; afterwards BatchNorm is folded into the matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from moegguf.controller.predictors.networks import HIDDEN_SIZES, state_size
from moegguf.controller.weights import Weights
from moegguf.trace.trace import Trace
from predictors.train.fit import choices, count_affinity, count_popularity
from predictors.train.fitting import Samples, Schedule, fit
from predictors.train.splitting import validation_tokens
from predictors.train.states import states

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Options(Schedule):
    """hidden: the paper's sizes, or smaller ones for a small model.

    The paper trained 15 to 20 epochs for Mixtral 8x7B and 40 to 45 for 8x22B (section 6.4). Here it is 45 at most, of
    which the one with the best validation accuracy is kept, and none are left out: the rate is annealed until the last.
    """

    epochs: int = 45
    patience: int = 0
    hidden: tuple[int, ...] = HIDDEN_SIZES
    dropout: float = 0.1


def train(trace: Trace, options: Options | None = None) -> Weights:
    """Arrays `popularity`, `affinity` and `layers.<i>.{weight,bias}`; and `validation`, the accuracy by epoch."""
    options = options or Options()
    torch.manual_seed(options.seed)
    popularity = count_popularity(trace)
    affinity = count_affinity(trace, popularity)
    samples = _samples(trace, popularity, affinity, validation_tokens(trace, options.seed))
    network = build(state_size(trace.shape), trace.shape.n_expert, options)
    fitted = fit(network, samples, _loss, options)
    print(f"expert-mlp: {fitted}", flush=True)
    arrays = {"popularity": popularity, "affinity": affinity, **folded(network)}
    return Weights(arrays, {"validation": list(fitted.curve)})


def _samples(trace: Trace, popularity: Floats, affinity: Floats, validation: npt.NDArray[np.bool_]) -> Samples:
    """A sample per token and layer but the first, where every layer up to it was computed."""
    inputs = []
    chosen = []
    used = []
    ids = trace.expert_ids
    computed = np.cumprod(ids.min(axis=2) >= 0, axis=0).astype(np.bool_)
    for row in range(1, len(trace.shape.layers)):
        known = np.flatnonzero(computed[row])
        out = np.empty((len(known), state_size(trace.shape)), np.float32)
        inputs.append(states(popularity, affinity, ids[:, known].astype(np.int64), row, out))
        chosen.append(choices(trace, row)[known])
        used.append(validation[known])
    parts = (np.concatenate(part) for part in (inputs, chosen, used))
    return Samples(*(torch.from_numpy(part) for part in parts))


def build(n_in: int, n_expert: int, options: Options) -> nn.Sequential:
    """The untrained network: n_in numbers to n_expert logits."""
    modules: list[nn.Module] = []
    for size, after in pairwise((n_in, *options.hidden)):
        modules += [nn.Linear(size, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(options.dropout)]
    return nn.Sequential(*modules, nn.Linear(options.hidden[-1], n_expert))


@torch.no_grad()
def folded(network: nn.Sequential) -> dict[str, Floats]:
    """Each matrix with the BatchNorm that follows it, as one."""
    linear = [module for module in network if isinstance(module, nn.Linear)]
    norms: list[nn.BatchNorm1d | None] = [module for module in network if isinstance(module, nn.BatchNorm1d)]
    arrays: dict[str, Floats] = {}
    for i, (layer, norm) in enumerate(zip(linear, [*norms, None], strict=True)):
        weight = layer.weight
        bias = layer.bias
        if norm is not None:
            gain = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            weight = weight * gain[:, None]
            bias = (bias - norm.running_mean) * gain + norm.bias
        arrays[f"layers.{i}.weight"] = weight.numpy().astype(np.float16)
        arrays[f"layers.{i}.bias"] = bias.numpy().astype(np.float16)
    return arrays


def _loss(logits: Tensor, chosen: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, chosen)
