"""ExpertFlow's balanced K-means over routing paths (section 3.3.3): tokens that use similar experts share a batch.

A routing path is which experts of each layer a token uses, as recorded or as predicted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.native.events import Float32s

MAX_ROUNDS = 10

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


def clustered(similarity: Float32s, centroids: Indices, most_rounds: int = MAX_ROUNDS) -> list[Indices]:
    """Ascending indices of the tokens of each group; groups are equal in size, or differ by one. They begin with these
    centroids, which become the token of each group that is most similar to its others, until they stay.

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
