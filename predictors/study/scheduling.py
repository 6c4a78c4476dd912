"""Computes the savings of ExpertFlow's token scheduler on a trace, as if its requests
had been decoded together.

2 * batch_size requests decode at the same time, with one token each per round (section
4.2's dual batch). Each round consists of two passes, each with half of the requests. An
order decides which requests are in which half, and which half goes first. The passes
are then replayed in the store, one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moegguf.controller.policies import LRU, AnyPolicy
from moegguf.controller.predictors.base import NoPrediction
from moegguf.errors import OptionError
from moegguf.native.events import Phase, RoutingEvent
from moegguf.trace.simulate import SimResult, Simulation
from moegguf.trace.trace import Trace
from predictors.study.arrange import grouped, separated, used_experts
from predictors.study.token_scheduler import (
    Indices,
    Paths,
    RoutingPaths,
    TokenScheduler,
    clustered,
    similarities,
)

# Number of random starts of the oracle's clustering. Four starts save a third more
# experts than one start, and further starts add little.
STARTS = 4

Round = list[Indices]  # the passes of a round, in order
Split = Callable[[Indices], Round]  # divides the tokens of a round into passes


@dataclass(frozen=True)
class OrderEffect:
    """The effect of one order of requests: the number of experts in a pass, and the
    results of replays."""

    order: str
    # Number of distinct (layer, expert) pairs in a pass, averaged over passes.
    experts: float
    # {share of the experts in memory: result of the replay}.
    replays: dict[float, SimResult]
    # Scheduler's time per pass in microseconds; None: the order needs no scheduler.
    us_per_step: float | None = None


def compare(
    trace: Trace,
    batch_size: int,
    paths: Callable[[], RoutingPaths],
    slots: dict[float, int],
    policy: Callable[[], AnyPolicy] = lambda: LRU,
    seed: int = 0,
) -> list[OrderEffect]:
    """Returns the effects of the orders oracle, predicted, random and fifo, in this
    order.

    "predicted" groups tokens by the predicted `paths`. "oracle" groups tokens by their
    recorded routing, which no scheduler can know in advance. slots: {share of experts:
    number of slots}. For each share the passes are replayed with a new `policy`. Raises
    OptionError if batch_size is not positive or the trace has too few requests.
    """
    trace = separated(trace)
    pools = list(_pools(trace, 2 * batch_size)) if batch_size > 0 else []
    if not pools:
        raise OptionError(
            f"batch_size must leave two batches of requests decoding at the same time, but is {batch_size} with "
            f"{len(trace.sequences())} requests; record more requests or take smaller batches."
        )
    rng = np.random.default_rng(seed)
    predicted = _Predicted(trace, paths, batch_size)
    splits: dict[str, Split] = {
        "oracle": lambda tokens: [
            tokens[group]
            for group in balanced_groups(used_experts(trace, tokens), 2, seed)
        ],
        "predicted": predicted,
        "random": lambda tokens: np.split(rng.permutation(tokens), 2),
        "fifo": lambda tokens: np.split(tokens, 2),
    }
    effects = []
    for order, split in splits.items():
        passes = [batch for pool in pools for tokens in pool for batch in split(tokens)]
        experts = float(
            np.mean(
                [
                    experts_per_batch(used_experts(trace, tokens), [slice(None)])
                    for tokens in passes
                ]
            )
        )
        replays = _replays(grouped(trace, passes), slots, policy)
        effects.append(
            OrderEffect(
                order,
                experts,
                replays,
                predicted.us_per_step if order == "predicted" else None,
            )
        )
    return effects


def experts_per_batch(paths: Paths, batches: Sequence[Indices | slice]) -> float:
    """Returns the number of distinct (layer, expert) pairs that a batch uses, averaged
    over batches (the paper's formula 5).

    The paper's formula 4 joins the paths of a batch with AND. Here they are joined with
    OR, as in section 5.2, because a batch loads every expert that any of its tokens
    uses.
    """
    return float(
        np.mean([np.count_nonzero(paths[batch].any(axis=0)) for batch in batches])
    )


def balanced_groups(paths: Paths, n_groups: int, seed: int) -> list[Indices]:
    """Divides tokens by balanced K-means on their paths. Returns the ascending indices
    of each group's tokens. Group sizes differ by at most one.

    The function computes STARTS clusterings from random centroids (the paper computes
    one), and returns the clustering whose groups use the fewest experts (formula 5).
    The result depends only on the arguments. Raises OptionError when n_groups is not
    between 1 and the number of tokens.
    """
    if not 1 <= n_groups <= len(paths):
        raise OptionError(
            f"n_groups must be between 1 and the {len(paths)} tokens, but is {n_groups}."
        )
    similarity = similarities(paths)
    rng = np.random.default_rng(seed)
    found = [
        clustered(similarity, rng.permutation(len(paths))[:n_groups])
        for _ in range(STARTS)
    ]
    return min(found, key=lambda groups: experts_per_batch(paths, groups))


def _replays(
    trace: Trace, slots: dict[float, int], policy: Callable[[], AnyPolicy]
) -> dict[float, SimResult]:
    nothing = NoPrediction(trace.shape)
    return {
        share: Simulation(trace, policy(), nothing, n_slots).run()
        for share, n_slots in slots.items()
    }


def _pools(trace: Trace, size: int) -> Iterator[list[Indices]]:
    """Yields the rounds of each group of `size` successive requests. A round consists
    of the indices of one decoded token per request. The rounds end when the shortest
    request ends. An incomplete group at the end is left out."""
    decoding = (trace.pass_phase == Phase.DECODE) & (np.diff(trace.pass_start) == 1)
    tokens = [
        trace.pass_start[:-1][decoding & (trace.pass_sequence == sequence)]
        for sequence in trace.sequences()
    ]
    tokens = [of for of in tokens if len(of)]
    for first in range(0, len(tokens) - size + 1, size):
        pool = tokens[first : first + size]
        yield list(np.stack([of[: min(map(len, pool))] for of in pool], axis=1))


class _Predicted:
    """Splits a round as the scheduler would with a running model: based on the routing
    so far and the round's tokens."""

    def __init__(
        self, trace: Trace, paths: Callable[[], RoutingPaths], batch_size: int
    ) -> None:
        self._trace = trace
        self._make = lambda: TokenScheduler(trace.shape, paths(), batch_size)
        self._scheduler = self._make()
        self._requests: list[int] = []
        self._spent_s = 0.0
        self._n_steps = 0

    @property
    def us_per_step(self) -> float:
        """Returns the scheduler's mean CPU time per pass in microseconds, including
        predictions."""
        return self._spent_s / max(1, self._n_steps) * 1e6

    def __call__(self, tokens: Indices) -> Round:
        trace = self._trace
        requests = self._trace.sequence_of[tokens].tolist()
        if requests != self._requests:
            self._begin(requests, tokens)
        start_s = time.process_time()
        for request, token in zip(requests, trace.tokens[tokens], strict=True):
            self._scheduler.paths.expect(request, np.array([token], np.int32))
        place = dict(zip(requests, tokens.tolist(), strict=True))
        groups = [
            [place[request] for request in self._scheduler.next_group(requests)]
            for _ in range(2)
        ]
        self._spent_s += time.process_time() - start_s
        self._n_steps += 2
        passes = [np.array(group, np.int64) for group in groups]
        for group in passes:
            self._observe(group)
        return passes

    def _begin(self, requests: list[int], tokens: Indices) -> None:
        """Creates a new scheduler for a new set of requests. The scheduler first
        observes the routing of the token before each request's first decoded token.
        """
        self._requests = requests
        self._scheduler = self._make()
        before = tokens - 1
        for request, token in zip(requests, before.tolist(), strict=True):
            if token >= 0 and self._trace.sequence_of[token] == request:
                self._observe(np.array([token]))

    def _observe(self, tokens: Indices) -> None:
        trace = self._trace
        sequences = trace.sequence_of[tokens]
        phases = np.full(len(tokens), Phase.DECODE, np.int32)
        for row, il in enumerate(trace.shape.layers):
            ids = trace.expert_ids[row, tokens].astype(np.int32)
            first = int(sequences[0])
            event = RoutingEvent(
                0,
                0,
                first,
                Phase.DECODE,
                0,
                il,
                ids,
                sequences=sequences,
                phases=phases,
            )
            self._scheduler.paths.observe(event)
