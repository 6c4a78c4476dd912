"""Computes statistics about the reuse of experts in a trace: how often experts are
used, and how soon they are used again, within requests and across requests.

MoE-Infinity (section 4.2, figure 2) finds that use is skewed within a request and
uniform across requests. Policies that adapt to the current request can help only if
this is true. Any short sample looks skewed. The skew within requests is therefore
compared with the skew of equally long samples that are drawn from all requests. Only
decoded tokens count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moegguf.native.events import Bools, Int64s
from moegguf.trace.trace import Trace
from predictors.study.arrange import used_experts

WINDOWS = (1, 2, 4, 8, 16)  # tokens
# Upper bounds of the histogram's bins, in tokens.
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
COVERED = 0.8  # share of a layer's uses that the set of `Skew.covering` must cover

Floats = npt.NDArray[np.float64]
Counts = Int64s
Used = Bools


@dataclass(frozen=True)
class Skew:
    """The unevenness of expert use, averaged over MoE layers."""

    # Size of the smallest set of experts that together account for at least the share
    # COVERED of a layer's uses. The size is a share of the layer's experts.
    covering: float
    # entropy of the distribution of uses, divided by the entropy of uniform use; 1:
    # uniform.
    entropy: float


@dataclass(frozen=True, eq=False)
class Reuse:
    """The use of experts while decoding.

    windows_same and windows_other map n to the share of a token's experts that were
    used in the n tokens before its position. Tokens at positions below n are left out.
    """

    layers: tuple[int, ...]  # layer number (il) of each row
    sequences: tuple[int, ...]
    # (n_sequence, n_row, n_expert): number of tokens that used an expert.
    counts: Counts
    within: Skew  # skew within a request, averaged over requests
    # Skew within samples of tokens from all requests, averaged over samples. Each
    # sample is as long as one request.
    same_size: Skew
    merged: Skew  # skew of the summed uses in all requests
    # {n: share of a token's experts that the n tokens before it in its own request used}.
    windows_same: dict[int, float]
    # {n: share of a token's experts that the n tokens before its position in another
    # request used}.
    windows_other: dict[int, float]
    # {upper bound of the number of tokens since the request last used the expert: share
    # of uses}. 0: first use, -1: above all bounds
    reuse_distances: dict[int, float]
    # (n_row,): share of a token's experts that the next token uses too.
    next_token: Floats


def reuse(trace: Trace, seed: int = 0) -> Reuse:
    """Returns the figures of a trace. A figure is nan if there are no uses to count.
    `seed` selects the random tokens and requests for comparison."""
    decode = trace.decode()
    sequences = decode.sequences()
    paths = [used_experts(decode, decode.sequence_of == s) for s in sequences]
    rng = np.random.default_rng(seed)
    counts = np.array([path.sum(axis=0) for path in paths], np.int64)
    counts = counts.reshape(-1, trace.shape.n_moe_layer, trace.shape.n_expert)
    same, other = _windows(paths, rng)
    return Reuse(
        layers=trace.shape.layers,
        sequences=tuple(sequences),
        counts=counts,
        within=_mean_skew(counts),
        same_size=_mean_skew(_resampled(paths, rng)),
        merged=_mean_skew(counts.sum(axis=0)[np.newaxis]),
        windows_same=same,
        windows_other=other,
        reuse_distances=_reuse_distances(paths),
        next_token=_next_token(paths, trace.shape.n_moe_layer),
    )


def _resampled(paths: list[Used], rng: np.random.Generator) -> Counts:
    """Returns counts as in `Reuse.counts`, for made-up requests. Each is as long as a
    real request, but its tokens are drawn from all requests.
    """
    if not paths:
        return np.zeros((0, 1, 1), np.int64)
    tokens = np.concatenate(paths)
    return np.array(
        [
            tokens[rng.choice(len(tokens), len(path), replace=False)].sum(axis=0)
            for path in paths
        ]
    )


def _mean_skew(counts: Counts) -> Skew:
    """Returns the skew of counts (..., n_row, n_expert), averaged over the rows in
    which any expert was used. The skew's figures are nan if there is no such row."""
    rows = counts.reshape(-1, counts.shape[-1])
    rows = rows[rows.sum(axis=1) > 0]
    if not len(rows):
        return Skew(float("nan"), float("nan"))
    share = np.sort(rows / rows.sum(axis=1, keepdims=True), axis=1)[:, ::-1]
    needed = (np.cumsum(share, axis=1) < COVERED - 1e-9).sum(axis=1) + 1
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    uniform = np.log(max(rows.shape[1], 2))
    return Skew(
        float(needed.mean() / rows.shape[1]),
        float((-(share * logs).sum(axis=1) / uniform).mean()),
    )


def _windows(
    paths: list[Used], rng: np.random.Generator
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns `windows_same` and `windows_other`. For `windows_other`, each request is
    compared with another request, chosen at random."""
    # [same, other request] x [uses, recent uses] x [window].
    found = np.zeros((2, 2, len(WINDOWS)))
    for i, path in enumerate(paths):
        other = (
            paths[(i + int(rng.integers(1, len(paths)))) % len(paths)]
            if len(paths) > 1
            else path[:0]
        )
        before = [np.concatenate([np.zeros_like(p[:1], np.int32), np.cumsum(p, axis=0, dtype=np.int32)])
                  for p in (path, other)]  # fmt: skip
        for column, window in enumerate(WINDOWS):
            for which, sums in enumerate(before):
                n = min(len(path), len(sums))
                if n <= window:
                    continue
                seen = sums[window:n] > sums[: n - window]
                used = path[window:n]
                found[which, :, column] += used.sum(), (used & seen[: len(used)]).sum()
    shares = [
        dict(zip(WINDOWS, _shares(right, of).tolist(), strict=True))
        for of, right in found
    ]
    return shares[0], shares[1]


def _reuse_distances(paths: list[Used]) -> dict[int, float]:
    """Returns `Reuse.reuse_distances`: the histogram of distances, in tokens, from one
    use of an expert to its next use within a request."""
    bounds = np.array(DISTANCES)
    # First use, then one bin for each bound, then uses above all bounds.
    bins = np.zeros(len(DISTANCES) + 2)
    for path in paths:
        position = np.where(path, np.arange(len(path))[:, np.newaxis, np.newaxis], -1)
        last = np.maximum.accumulate(position, axis=0)
        earlier = np.concatenate([np.full_like(last[:1], -1), last[:-1]])[path]
        gap = np.where(earlier < 0, 0, position[path] - earlier)
        bins += np.bincount(
            np.where(gap == 0, 0, np.searchsorted(bounds, gap) + 1), minlength=len(bins)
        )
    return dict(
        zip(
            (0, *DISTANCES, -1),
            _shares(bins, np.full_like(bins, bins.sum())).tolist(),
            strict=True,
        )
    )


def _next_token(paths: list[Used], n_row: int) -> Floats:
    used = np.zeros(n_row)
    kept = np.zeros(n_row)
    for path in paths:
        used += path[:-1].sum(axis=(0, 2))
        kept += (path[:-1] & path[1:]).sum(axis=(0, 2))
    return _shares(kept, used)


def _shares(parts: Floats, wholes: Floats) -> Floats:
    """Returns parts / wholes, with nan where a whole is 0."""
    return np.divide(parts, wholes, out=np.full_like(wholes, np.nan), where=wholes > 0)
