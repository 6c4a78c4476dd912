"""Counts the routing seen so far, at each routing event. Policies in Python and the EAM
collection read these counts.

EAM, iEAM and rEAM are terms from MoE-Infinity (section 4.3). An EAM has counts of
tokens per (layer, expert). The iEAM counts the current pass. An rEAM counts one request
so far, with separate tables for prefill and decode. If a pass has tokens of several
requests, its iEAM counts all of them, and each request keeps its own rEAM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, Int64s, Phase, RoutingEvent

Counts = Float32s

# A request that is absent from more than this number of passes in a row is assumed to
# have ended. The number should exceed the number of passes for which a scheduler may
# pause a request.
ABSENT_PASSES = 64
# Maximum number of requests whose rEAMs are kept at the same time, unless a single pass
# has more requests
MOST_REQUESTS = 256


@dataclass
class Request:
    """The token counts of one unfinished request."""

    counts: Counts  # the rEAMs, (phase, n_layer, n_expert)
    last_pass: int = 0  # number of the last pass that had tokens of this request


class History:
    """Tables (n_layer, n_expert) of counts over the routing seen so far.

    No event marks the end of a request. A request is assumed to have ended after more
    than ABSENT_PASSES passes in a row without any of its tokens. A request that was
    alone in a pass is also assumed to have ended if a new request is alone in the next
    pass. If there are more than MOST_REQUESTS requests, those that have been absent
    longest are assumed to have ended.
    """

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self.clock = 0  # number of routing events so far
        # Value of `clock` at the expert's last use; -1: never used
        self.last_use: Int64s = np.full(shape.table, -1, np.int64)
        # Number of routing events that used the expert.
        self.uses: Counts = np.zeros(shape.table, np.float32)
        # The iEAM: counts of the current pass so far.
        self.iteration: Counts = np.zeros(shape.table, np.float32)
        self._reams: Counts = np.zeros((len(Phase), *shape.table), np.float32)
        # Sum of the rEAMs of the requests in the current pass, for each phase; includes
        # counts from earlier passes
        self.prefill, self.decode = self._reams
        self.il = -1  # layer number of the last event
        self.pass_ = -1
        # Number of the last event's request, or of the first one if there are several.
        self.sequence = -1
        self.phase = Phase.PREFILL
        self.new_pass = False  # True: the last event began a pass
        self.new_request = False  # True: the last event had tokens of a new request
        # {sequence: request} of unfinished requests.
        self.requests: dict[int, Request] = {}
        # rEAMs (decode) of the requests that ended with the last event.
        self.finished: list[Counts] = []
        self._n_pass = 0
        self._present: frozenset[int] = frozenset()  # sequences of the current pass

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
            counts = np.bincount(
                event.expert_ids[part.rows].ravel(), minlength=n_expert
            )
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
        """Ends all requests. Returns the rEAMs of their decoded tokens, beginning with
        the request that has been absent longest."""
        ended = [request.counts[Phase.DECODE] for request in self.requests.values()]
        self.requests.clear()
        self._present = frozenset()
        self._add_up()
        return ended

    def _set_present(self, present: frozenset[int]) -> None:
        one_by_one = (
            len(present) == len(self._present) == 1
            and not present & self.requests.keys()
        )
        for sequence in self._present - present if one_by_one else ():
            self._end(sequence)
        for sequence in present:
            # Removed and reinserted, to keep requests in order of their last use
            request = self.requests.pop(sequence, None)
            self.requests[sequence] = request or Request(np.zeros_like(self._reams))
            self.requests[sequence].last_pass = self._n_pass
        for sequence in [
            s
            for s, r in self.requests.items()
            if self._n_pass - r.last_pass > ABSENT_PASSES
        ]:
            self._end(sequence)
        while len(self.requests) > max(MOST_REQUESTS, len(present)):
            self._end(next(iter(self.requests)))
        if present != self._present:
            self._present = present
            self._add_up()

    def _add_up(self) -> None:
        """Recomputes the sum of the current requests' rEAMs, for each phase."""
        self._reams[:] = 0
        for sequence in sorted(self._present):
            self._reams += self.requests[sequence].counts

    def _end(self, sequence: int) -> None:
        self.finished.append(self.requests.pop(sequence).counts[Phase.DECODE])
