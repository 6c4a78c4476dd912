"""ExpertFlow's token scheduler (section 3.3): tokens of several requests with similar routing paths share a batch.

It regroups indices of tokens, without KV caches. The gain is counted, not timed: distinct experts per batch, the sum
that formula 5 minimises. (The paper's formula 4 joins the paths of a batch with AND; the experts a batch loads are
their OR, as in section 5.2, which is counted here.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError
from moegguf.native.events import Float32s, Phase
from moegguf.trace.trace import Trace

MAX_ROUNDS = 10
STARTS = 4  # saves a third more than one start; more starts add little

Paths = npt.NDArray[np.bool_]  # (n_tokens, n_moe_layer, n_expert)
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SchedulerEffect:
    """Distinct (layer, expert) per batch, the mean over all pairs of batches.

    in_order: in order of arrival. shuffled: random batches. scheduled: by true paths, an upper bound.
    """

    in_order: float
    shuffled: float
    scheduled: float


def similarities(paths: Paths) -> Float32s:
    """(n_tokens, n_tokens): 1 - Hamming distance / size of a path, the usual form of formula 6 (missing from our text).

    |a xor b| = |a| + |b| - 2 |a and b|, so one matrix product is enough.
    """
    flat = paths.reshape(len(paths), -1).astype(np.float32)
    sizes = flat.sum(axis=1)
    distances = sizes[:, np.newaxis] + sizes - 2 * (flat @ flat.T)
    return (1 - distances / max(1, flat.shape[1])).astype(np.float32)


def schedule(paths: Paths, n_batches: int, seed: int) -> list[Indices]:
    """Balanced K-means over routing paths (section 3.3.3): ascending indices of the tokens of each batch.

    Batches are equal in size, or differ by one. Centroids are tokens: first random ones, then of each batch the one
    most similar to the others, until they stay or MAX_ROUNDS. Of STARTS such clusterings (the paper has one) the one
    with the fewest experts (formula 5) is taken. Deterministic by seed. OptionError when n_batches is not between 1 and
    the number of tokens.
    """
    if not 1 <= n_batches <= len(paths):
        raise OptionError(f"n_batches must be between 1 and the {len(paths)} tokens, but is {n_batches}.")
    similarity = similarities(paths)
    rng = np.random.default_rng(seed)
    found = [_clustered(similarity, rng.permutation(len(paths))[:n_batches]) for _ in range(STARTS)]
    return min(found, key=lambda batches: experts_per_batch(paths, batches))


def _clustered(similarity: Float32s, centroids: Indices) -> list[Indices]:
    """similarity (n_tokens, n_tokens); the first centroids."""
    for _ in range(MAX_ROUNDS):
        batches = _balanced(similarity[:, centroids])
        medoids = np.array([batch[np.argmax(similarity[np.ix_(batch, batch)].sum(axis=1))] for batch in batches])
        if np.array_equal(medoids, centroids):
            break
        centroids = medoids
    return batches


def _balanced(similarity: Float32s) -> list[Indices]:
    """similarity (n_tokens, n_batches), to the centroids. Tokens that lose most by their second choice come first."""
    n_tokens, n_batches = similarity.shape
    preferences = np.argsort(-similarity, axis=1, kind="stable")
    ordered = np.take_along_axis(similarity, preferences, axis=1)
    regret = ordered[:, 0] - ordered[:, min(1, n_batches - 1)]
    least, larger = divmod(n_tokens, n_batches)  # `larger` batches have one token more
    batches: list[list[int]] = [[] for _ in range(n_batches)]
    for token in np.argsort(-regret, kind="stable").tolist():
        for batch in preferences[token].tolist():
            full = len(batches[batch]) - least
            if full < 0 or (full == 0 and larger > 0):
                larger -= full == 0
                batches[batch].append(token)
                break
    return [np.sort(np.array(batch, np.int64)) for batch in batches]


def experts_per_batch(paths: Paths, batches: Sequence[Indices]) -> float:
    """Distinct (layer, expert) that a batch uses, the mean over batches."""
    return float(np.mean([np.count_nonzero(paths[batch].any(axis=0)) for batch in batches]))


def measure(trace: Trace, batch_size: int, seed: int = 0) -> SchedulerEffect:
    """The scheduler's savings if the trace's requests had been decoded together.

    A unit (section 4.2) is the decode tokens of 2 * batch_size requests at the same step, split into two batches;
    incomplete units are left out. Raises OptionError when the trace has no complete unit.
    """
    units = _units(trace, 2 * batch_size) if batch_size > 0 else []
    if not units:
        raise OptionError(
            f"batch_size must leave two batches of requests decoding at the same time, but is {batch_size} with "
            f"{len(trace.sequences())} requests; record more requests or take smaller batches."
        )
    rng = np.random.default_rng(seed)
    counts = np.zeros((len(units), 3))
    for count, tokens in zip(counts, units, strict=True):
        true = trace.paths(tokens)
        schedules = [
            np.split(np.arange(len(tokens)), 2),
            np.split(rng.permutation(len(tokens)), 2),
            schedule(true, 2, seed),
        ]
        count[:] = [experts_per_batch(true, batches) for batches in schedules]
    return SchedulerEffect(*counts.mean(axis=0).tolist())


def _units(trace: Trace, size: int) -> list[Indices]:
    """Tokens of `size` different requests at the same decode step, step after step."""
    decoding = (trace.pass_phase == Phase.DECODE) & (np.diff(trace.pass_start) == 1)
    steps: dict[int, list[int]] = {}
    for sequence in trace.sequences():
        for step, token in enumerate(trace.pass_start[:-1][decoding & (trace.pass_sequence == sequence)].tolist()):
            steps.setdefault(step, []).append(token)
    return [
        np.array(tokens[first : first + size])
        for tokens in steps.values()
        for first in range(0, len(tokens) - size + 1, size)
    ]
