"""Routing seen so far, updated at each routing event: the input of policies and predictors.

EAM, iEAM and rEAM are MoE-Infinity's (section 4.3): counts of tokens per (layer, expert), of the pass in progress and
of the request so far, prefill and decode apart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Phase, RoutingEvent

Counts = npt.NDArray[np.float32]


class History:
    """Tables (n_layer, n_expert) over the routing seen so far.

    clock: routing events so far. last_use: clock of an expert's last use, -1 before the first. uses: routing events
    that used it. iteration: the iEAM. prefill, decode: the rEAM of this request. il: layer of the last event. sequence:
    the request. new_pass, new_request: whether the last event began one. finished: rEAM (prefill, decode) of the
    request before, when the last event began a new one, else None.
    """

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self.clock = 0
        self.last_use: npt.NDArray[np.int64] = np.full(shape.table, -1, np.int64)
        self.uses: Counts = np.zeros(shape.table, np.float32)
        self.iteration: Counts = np.zeros(shape.table, np.float32)
        self.prefill: Counts = np.zeros(shape.table, np.float32)
        self.decode: Counts = np.zeros(shape.table, np.float32)
        self.il = -1
        self.pass_ = -1
        self.sequence = -1
        self.phase = Phase.PREFILL
        self.new_pass = False
        self.new_request = False
        self.finished: tuple[Counts, Counts] | None = None

    def update(self, event: RoutingEvent) -> None:
        """Adds one routing event."""
        self.finished = None
        self.new_request = event.sequence != self.sequence
        self.new_pass = self.new_request or event.pass_ != self.pass_
        if self.new_request:
            self._begin_request(event)
        if self.new_pass:
            self.iteration[:] = 0
        counts = np.bincount(event.expert_ids.ravel(), minlength=self.shape.n_expert)
        self.clock += 1
        self.last_use[event.il, counts > 0] = self.clock
        self.uses[event.il] += counts > 0
        self.iteration[event.il] += counts
        (self.prefill if event.phase == Phase.PREFILL else self.decode)[event.il] += counts
        self.il, self.pass_, self.phase = event.il, event.pass_, event.phase

    def _begin_request(self, event: RoutingEvent) -> None:
        if self.sequence >= 0:
            self.finished = self.prefill.copy(), self.decode.copy()
        self.prefill[:] = 0
        self.decode[:] = 0
        self.sequence = event.sequence
