"""Trains ProMoE's two-layer MLPs (section 4.3), one for each pair of layers that the
windows need.

For training, each input is shifted to mean 0 and scaled to a standard deviation of at
most 1 (`LEAST_SPREAD`). Afterwards, the shift and scaling are folded into the first
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from numpy.random import default_rng

from moegguf.controller.predictors.networks import window_pairs
from moegguf.controller.weights import Weights
from moegguf.errors import OptionError
from moegguf.learning.counts import choices
from moegguf.learning.feed_forward import (
    Examples,
    FeedForward,
    FeedForwardTrainee,
    Indices,
    Samples,
)
from moegguf.learning.fitting import (
    Fitted,
    Report,
    Schedule,
    cross_entropy,
    fit,
    no_report,
)
from moegguf.learning.gradients import Floats
from moegguf.learning.splitting import validation_tokens
from moegguf.native.events import Bools
from moegguf.trace.trace import Trace

# Smallest divisor for scaling an input, relative to the mean of the inputs' standard
# deviations. Smaller divisors would lead to weights too large for signed bytes.
LEAST_SPREAD = 0.3


@dataclass(frozen=True)
class Options(Schedule):
    """Options for training the MLPs."""

    lr: float = 3e-3
    # Distances between the two layers of a pair.
    windows: tuple[int, ...] = (1, 2, 4, 8)
    # Size of the hidden layer; 970 gives the paper's 2 million weights (2048 inputs, 60
    # experts).
    n_hidden: int = 512


def train(trace: Trace, options: Options, report: Report = no_report) -> Weights:
    """Trains the networks. Returns the arrays
    `<source>.<target>.{hidden,out}.{weight,bias}`. Raises OptionError if the trace has
    no inputs."""
    if trace.inputs is None:
        raise OptionError(
            "the trace must hold the routers' inputs, but does not; record it with `moegguf trace record --inputs`."
        )
    validation = validation_tokens(trace, options.seed)
    shape = trace.shape
    row_of = shape.row_of
    pairs = window_pairs(shape, options.windows)
    arrays: dict[str, Floats] = {}
    courses: list[Fitted] = []
    n_pairs = len(pairs)
    for number, pair in enumerate(pairs):
        source, target = pair
        name = f"{source}.{target}"
        pair_name = f"layer {source} to {target}"
        report_pair = partial(_report_pair, report, pair_name, number, n_pairs)
        row = row_of[source]
        of_target = row_of[target]
        computed = trace.expert_ids[[row, of_target], :, 0] >= 0
        known = np.flatnonzero(computed.all(axis=0))
        inputs = trace.inputs[row, known]
        inputs = inputs.astype(np.float32)
        chosen = choices(trace, of_target)[known]
        learned, fitted = train_pair(
            inputs, chosen, validation[known], options, report_pair
        )
        courses.append(fitted)
        for part, array in learned.items():
            arrays[f"{name}.{part}"] = array
    best = [course.best for course in courses]
    mean = 0.0
    if courses:
        mean = float(np.mean(best))
    curve = _mean_curve(courses)
    facts = {"validation": round(mean, 4), "curve": curve}
    return Weights(arrays, asdict(options) | facts)


def _report_pair(
    report: Report, pair_name: str, number: int, n_pairs: int, step: str, share: float
) -> None:
    """Reports a step of the training of pair `number` of `n_pairs` pairs. `share` of
    this pair's training is done."""
    report(f"{pair_name}, {step}", (number + share) / n_pairs)


def _mean_curve(courses: Sequence[Fitted]) -> list[float]:
    """Returns the validation accuracy after each epoch, averaged over the networks. A
    network that stopped early contributes its last accuracy."""
    epochs = [course.epochs for course in courses]
    longest = max(epochs, default=0)
    rows = []
    for course in courses:
        n_left = longest - course.epochs
        last = course.accuracies[-1:]
        rows.append([*course.accuracies, *last * n_left])
    if not longest:
        return []
    means = np.mean(rows, axis=0)
    return [round(mean, 4) for mean in means.tolist()]


def train_pair(
    inputs: Floats,
    chosen: Floats,
    validation: Bools,
    options: Options,
    report: Report = no_report,
) -> tuple[dict[str, Floats], Fitted]:
    """Trains one MLP. Returns the MLP's arrays, and the losses and accuracies of its
    epochs."""
    mean = inputs.mean(axis=0)
    spread = inputs.std(axis=0)
    tiny = np.finfo(np.float32).tiny
    least = LEAST_SPREAD * spread.mean() + tiny
    spread = np.maximum(spread, least)
    centred = inputs - mean
    scaled = centred / spread
    rng = default_rng(options.seed)
    sizes = inputs.shape[1], options.n_hidden, chosen.shape[1]
    network = FeedForward(sizes, rng)

    def read(numbers: Indices) -> Examples:
        return scaled[numbers], chosen[numbers]

    samples = Samples(validation, read)
    trainee = FeedForwardTrainee(network, samples, cross_entropy, options.batch)
    fitted = fit(trainee, options, report)
    first, second = network.matrices()
    hidden, hidden_bias = first
    out, out_bias = second
    hidden = hidden / spread
    arrays = {
        "hidden.weight": hidden,
        "hidden.bias": hidden_bias - hidden @ mean,
        "out.weight": out,
        "out.bias": out_bias,
    }
    rounded = {}
    for name, array in arrays.items():
        rounded[name] = array.astype(np.float16)
    return rounded, fitted
