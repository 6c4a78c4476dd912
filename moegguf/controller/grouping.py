"""ExpertFlow's balanced K-means over routing paths (section 3.3.3): tokens that use similar experts share a batch.

A routing path is which experts of each layer a token uses, as recorded or as predicted. The gain is distinct experts
per batch, the sum that formula 5 minimises. (The paper's formula 4 joins the paths of a batch with AND; the experts a
batch loads are their OR, as in section 5.2, which is counted here.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError
from moegguf.native.events import Float32s

MAX_ROUNDS = 10
STARTS = 4  # saves a third more than one start; more starts add little

_ONES = np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2), axis=1).sum(
    axis=1, dtype=np.uint8
)

Paths = npt.NDArray[np.bool_]  # (n_tokens, n_moe_layer, n_expert)
Indices = npt.NDArray[np.int64]


def similarities(paths: Paths) -> Float32s:
    """(n_tokens, n_tokens): 1 - Hamming distance / size of a path, the usual form of formula 6 (missing from our text).

    Bit by bit, on this thread: a matrix product's threads would compete with those that compute the model.
    """
    flat = np.packbits(paths.reshape(len(paths), -1), axis=1)
    words = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2))).view(np.uint16)
    distances = np.array([_ONES[words ^ row].sum(axis=1, dtype=np.int64) for row in words])
    return (1 - distances / max(1, paths[0].size)).astype(np.float32)


def experts_per_batch(paths: Paths, batches: Sequence[Indices | slice]) -> float:
    """Distinct (layer, expert) that a batch uses, the mean over batches."""
    return float(np.mean([np.count_nonzero(paths[batch].any(axis=0)) for batch in batches]))


def balanced_groups(paths: Paths, n_groups: int, seed: int) -> list[Indices]:
    """Balanced K-means: ascending indices of the tokens of each group. Groups are equal in size, or differ by one.

    Of STARTS clusterings from random centroids (the paper has one) the one with the fewest experts (formula 5) is
    taken. Deterministic by seed. OptionError when n_groups is not between 1 and the number of tokens.
    """
    if not 1 <= n_groups <= len(paths):
        raise OptionError(f"n_groups must be between 1 and the {len(paths)} tokens, but is {n_groups}.")
    similarity = similarities(paths)
    rng = np.random.default_rng(seed)
    found = [clustered(similarity, rng.permutation(len(paths))[:n_groups]) for _ in range(STARTS)]
    return min(found, key=lambda groups: experts_per_batch(paths, groups))


def clustered(similarity: Float32s, centroids: Indices, most_rounds: int = MAX_ROUNDS) -> list[Indices]:
    """As `balanced_groups`, from these centroids: of each group the token most similar to the others, until they stay.

    similarity (n_tokens, n_tokens).
    """
    for _ in range(most_rounds):
        groups = _balanced(similarity[:, centroids])
        medoids = np.array([group[np.argmax(similarity[np.ix_(group, group)].sum(axis=1))] for group in groups])
        if np.array_equal(medoids, centroids):
            break
        centroids = medoids
    return groups


def _balanced(similarity: Float32s) -> list[Indices]:
    """similarity (n_tokens, n_groups), to the centroids. Tokens that lose most by their second choice come first."""
    n_tokens, n_groups = similarity.shape
    preferences = np.argsort(-similarity, axis=1, kind="stable")
    ordered = np.take_along_axis(similarity, preferences, axis=1)
    regret = ordered[:, 0] - ordered[:, min(1, n_groups - 1)]
    least, larger = divmod(n_tokens, n_groups)  # `larger` groups have one token more
    groups: list[list[int]] = [[] for _ in range(n_groups)]
    for token in np.argsort(-regret, kind="stable").tolist():
        for group in preferences[token].tolist():
            full = len(groups[group]) - least
            if full < 0 or (full == 0 and larger > 0):
                larger -= full == 0
                groups[group].append(token)
                break
    return [np.sort(np.array(group, np.int64)) for group in groups]
