"""Routing seen so far, updated at each routing event: the input of policies and predictors.

EAM, iEAM and rEAM are MoE-Infinity's (section 4.3): counts of tokens per (layer, expert). The iEAM counts the pass in
progress, the rEAM a request so far, prefill and decode apart. A pass may have tokens of several requests: its iEAM
counts all of them together, and each request keeps its own rEAM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Phase, RoutingEvent

Counts = npt.NDArray[np.float32]

ABSENT_PASSES = 64  # a request that is absent from this number of passes has ended: schedules wait for fewer
MOST_REQUESTS = 256  # requests whose rEAMs are kept at once: the most sequences of a context


@dataclass
class Request:
    """The rEAMs of one request, counts[phase] (n_layer, n_expert), and the pass of this history that it was last part
    of."""

    counts: Counts
    last_pass: int = 0


class History:
    """Tables (n_layer, n_expert) over the routing seen so far.

    No event says that a request has ended. A request has ended when it takes no part in ABSENT_PASSES passes. If
    requests come one after another, it has ended when it was alone in a pass, and a new request is alone in the next
    pass.
    """

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self.clock = 0  # routing events so far
        self.last_use: npt.NDArray[np.int64] = np.full(shape.table, -1, np.int64)  # clock of the last use; -1: none
        self.uses: Counts = np.zeros(shape.table, np.float32)  # routing events that used the expert
        self.iteration: Counts = np.zeros(shape.table, np.float32)  # the iEAM
        self._reams: Counts = np.zeros((len(Phase), *shape.table), np.float32)
        self.prefill, self.decode = self._reams  # sums of the rEAMs of the requests in this pass
        self.il = -1  # layer of the last event
        self.pass_ = -1
        self.sequence = -1  # the request of the last event; the first one of several
        self.phase = Phase.PREFILL
        self.new_pass = False  # the last event began a pass
        self.new_request = False  # the last event began a request
        self.requests: dict[int, Request] = {}  # requests that have not ended, by sequence
        self.finished: list[Counts] = []  # rEAMs (decode) of the requests that ended with the last event
        self._n_pass = 0
        self._present: frozenset[int] = frozenset()  # sequences of the pass

    def update(self, event: RoutingEvent) -> None:
        """Adds one routing event."""
        self.finished = []
        parts = event.parts()
        self.new_request = any(part.sequence not in self.requests for part in parts)
        self.new_pass = self.new_request or event.pass_ != self.pass_
        if self.new_pass:
            self._n_pass += 1
            self.iteration[:] = 0
            self._set_present(frozenset(part.sequence for part in parts))
        n_expert = self.shape.n_expert
        for part in parts:
            counts = np.bincount(event.expert_ids[part.rows].ravel(), minlength=n_expert)
            self.requests[part.sequence].counts[part.phase, event.il] += counts
            self._reams[part.phase, event.il] += counts
            self.iteration[event.il] += counts
        used = np.zeros(n_expert, np.bool_)
        used[event.expert_ids.ravel()] = True
        self.clock += 1
        self.last_use[event.il, used] = self.clock
        self.uses[event.il] += used
        self.il = event.il
        self.pass_ = event.pass_
        self.phase = event.phase
        self.sequence = event.sequence

    def end_all(self) -> list[Counts]:
        """Ends all requests: their rEAMs (decode), the oldest first."""
        ended = [request.counts[Phase.DECODE] for request in self.requests.values()]
        self.requests.clear()
        self._present = frozenset()
        self._add_up()
        return ended

    def _set_present(self, present: frozenset[int]) -> None:
        one_by_one = len(present) == len(self._present) == 1 and not present & self.requests.keys()
        for sequence in self._present - present if one_by_one else ():
            self._end(sequence)
        for sequence in present:
            request = self.requests.pop(sequence, None)  # and back, as the last: in order of last use
            self.requests[sequence] = request or Request(np.zeros_like(self._reams))
            self.requests[sequence].last_pass = self._n_pass
        for sequence in [s for s, r in self.requests.items() if self._n_pass - r.last_pass > ABSENT_PASSES]:
            self._end(sequence)
        while len(self.requests) > max(MOST_REQUESTS, len(present)):
            self._end(next(iter(self.requests)))
        if present != self._present:
            self._present = present
            self._add_up()

    def _add_up(self) -> None:
        """The rEAMs of the pass's requests."""
        self._reams[:] = 0
        for sequence in sorted(self._present):
            self._reams += self.requests[sequence].counts

    def _end(self, sequence: int) -> None:
        self.finished.append(self.requests.pop(sequence).counts[Phase.DECODE])
