"""Trains DuoServe-MoE's ExpertMLP (section 4.2): one network for all layers, with
binary cross-entropy, BatchNorm, ReLU and dropout.

Popularity and affinity are counted on the same trace first. After training, BatchNorm
is folded into the matrices. A sample's input is computed when a batch needs it, because
the inputs of all samples may not fit in memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.random import default_rng

from moegguf.controller.predictors.networks import HIDDEN_SIZES, state_size
from moegguf.controller.weights import Weights
from moegguf.learning.counts import count_affinity, count_popularity, multi_hot
from moegguf.learning.feed_forward import (
    Examples,
    FeedForward,
    FeedForwardTrainee,
    Indices,
    Samples,
)
from moegguf.learning.fitting import (
    Report,
    Schedule,
    binary_cross_entropy,
    fit,
    no_report,
)
from moegguf.learning.gradients import Integers
from moegguf.learning.splitting import validation_tokens
from moegguf.native.events import Float32s
from moegguf.trace.trace import Trace


@dataclass(frozen=True)
class Options(Schedule):
    """Options for training an ExpertMLP.

    The paper trained 15 to 20 epochs for Mixtral 8x7B and 40 to 45 for 8x22B (section
    6.4). By default, all epochs run here, because the learning rate falls until the
    last epoch. The result is the state after the epoch with the best validation
    accuracy.
    """

    epochs: int = 45
    patience: int = 0
    # Sizes of the hidden layers; default: the paper's sizes.
    hidden: tuple[int, ...] = HIDDEN_SIZES
    dropout: float = 0.1
    most_samples: int = 0  # maximum number of samples in an epoch; 0: no limit


def train(trace: Trace, options: Options, report: Report = no_report) -> Weights:
    """Trains the network. Returns the arrays `popularity`, `affinity` and
    `layers.<i>.{weight,bias}`."""
    popularity = count_popularity(trace)
    affinity = count_affinity(trace, popularity)
    rng = default_rng(options.seed)
    shape = trace.shape
    sizes = state_size(shape), *options.hidden, shape.n_expert
    network = FeedForward(sizes, rng, options.dropout, norms=True)
    samples = _samples(trace, popularity, affinity, options.seed)
    trainee = FeedForwardTrainee(
        network, samples, binary_cross_entropy, options.batch, options.most_samples
    )
    fitted = fit(trainee, options, report)
    arrays = {"popularity": popularity, "affinity": affinity}
    for i, layer in enumerate(network.matrices()):
        weight, bias = layer
        arrays[f"layers.{i}.weight"] = weight.astype(np.float16)
        arrays[f"layers.{i}.bias"] = bias.astype(np.float16)
    return Weights(arrays, asdict(options) | fitted.facts)


def _samples(
    trace: Trace, popularity: Float32s, affinity: Float32s, seed: int
) -> Samples:
    """Returns one sample for each pair of a token and a layer, if this layer and all
    earlier ones processed the token. There are no samples for the first layer with
    experts."""
    ids = trace.expert_ids
    is_computed = ids.min(axis=2) >= 0
    computed = np.cumprod(is_computed, axis=0)
    rows, tokens = np.nonzero(computed[1:])
    rows += 1

    def read(numbers: Indices) -> Examples:
        row = rows[numbers]
        of_tokens = ids[:, tokens[numbers]]
        of_tokens = of_tokens.transpose(1, 0, 2)
        inputs = states(popularity, affinity, of_tokens, row)
        each = np.arange(len(numbers))
        chosen = of_tokens[each, row]
        hot = multi_hot(chosen, trace.shape.n_expert)
        return inputs, hot.astype(np.float32)

    validation = validation_tokens(trace, seed)
    return Samples(validation[tokens], read)


def states(
    popularity: Float32s, affinity: Float32s, expert_ids: Integers, rows: Integers
) -> Float32s:
    """Returns the network's inputs s_l = [h_l, p_l, a_{l-1,l}] (equation 5), (n,
    state_size), for n samples.

    `rows` (n,) is each sample's layer: its position among the layers with experts, at
    least 1. `expert_ids` (n, n_layer, n_expert_used) holds the choices in the router's
    order. Only choices in layers before the sample's layer are used.
    """
    n_layer, n_expert = popularity.shape
    n, _, k = expert_ids.shape
    n_before = n_layer - 1
    size = n, n_before, k
    before = np.zeros(size, np.float32)
    known = min(n_before, expert_ids.shape[1])
    before[:, :known] = expert_ids[:, :known] + 1
    row_of = rows[:, np.newaxis]
    is_later = np.arange(n_before) >= row_of
    before[is_later] = 0
    before /= np.float32(n_expert)
    each = np.arange(n)
    last = expert_ids[each, rows - 1]
    h = before.reshape(n, -1)
    p = popularity[rows]
    a = affinity[row_of - 1, last]
    a = a.reshape(n, -1)
    return np.concatenate([h, p, a], axis=1)
