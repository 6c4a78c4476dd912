"""Recorded routing in memory: the tokens of each pass, and the experts that the router chose for them.

A trace has the events of a running model (`events`), can be cut by request, and shuffled for control experiments. The
file is in format.py, recording in recorder.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.base import multi_hot
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, Int32s, Phase, RoutingEvent

TRACE_VERSION = 1

Setting = str | int | float


@dataclass(frozen=True)
class TraceHeader:
    """The origin of a trace.

    model: its name. fingerprint: hex digits of its routers (`moegguf.gguf.fingerprint`), "" when unknown. labels: kind
    of text of each sequence. settings: how it was recorded (budget, policy, threads, ...).
    """

    model: str = ""
    fingerprint: str = ""
    labels: dict[int, str] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    version: int = TRACE_VERSION


@dataclass(frozen=True, eq=False)
class Trace:
    """Routing of n_pass passes over n_tokens tokens, in the order they were evaluated.

    pass_sequence, pass_phase, pass_first_token and pass_ns are (n_pass,), with the meaning of RoutingEvent's fields.
    pass_start is (n_pass + 1,): tokens of pass p are tokens[pass_start[p]:pass_start[p + 1]]. tokens (n_tokens,), -1
    unknown. expert_ids (len(shape.layers), n_tokens, n_expert_used), -1 where a layer was not computed for a token, and
    after the experts of a layer that uses fewer. weights the same shape or None; inputs (len(shape.layers), n_tokens,
    n_embd) or None. Both are zero where nothing was computed; inputs also where they were not recorded.
    """

    shape: MoeShape
    header: TraceHeader
    pass_sequence: Int32s
    pass_phase: npt.NDArray[np.uint8]
    pass_first_token: Int32s
    pass_ns: npt.NDArray[np.int64]
    pass_start: npt.NDArray[np.int64]
    tokens: Int32s
    expert_ids: npt.NDArray[np.int16]
    weights: npt.NDArray[np.float16] | None = None
    inputs: npt.NDArray[np.float16] | None = None

    @property
    def n_pass(self) -> int:
        """Number of passes."""
        return len(self.pass_sequence)

    @property
    def n_tokens(self) -> int:
        """Number of tokens, of all passes."""
        return len(self.tokens)

    def sequences(self) -> list[int]:
        """The requests in it, in order of first appearance."""
        return list(dict.fromkeys(self.pass_sequence.tolist()))

    def select(self, sequences: Iterable[int]) -> Trace:
        """The passes of these requests only."""
        wanted = set(sequences)
        labels = {sequence: label for sequence, label in self.header.labels.items() if sequence in wanted}
        part = self.take(np.flatnonzero(np.isin(self.pass_sequence, list(wanted))))
        return replace(part, header=replace(self.header, labels=labels))

    def arranged(self, sequences: Iterable[int]) -> Trace:
        """The passes of these requests, one request after another in this order."""
        place = {sequence: number for number, sequence in enumerate(dict.fromkeys(sequences))}
        part = self.select(place)
        places = np.array([place[sequence] for sequence in part.pass_sequence.tolist()], np.int64)
        return part.take(np.argsort(places, kind="stable"))

    def decode(self) -> Trace:
        """The decode passes only."""
        return self.take(np.flatnonzero(self.pass_phase == Phase.DECODE))

    def take(self, passes: npt.NDArray[np.int64]) -> Trace:
        """These passes, in this order."""
        lengths = np.diff(self.pass_start)[passes]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        tokens = np.repeat(self.pass_start[passes] - starts[:-1], lengths) + np.arange(starts[-1])
        return replace(
            self,
            pass_sequence=self.pass_sequence[passes],
            pass_phase=self.pass_phase[passes],
            pass_first_token=self.pass_first_token[passes],
            pass_ns=self.pass_ns[passes],
            pass_start=starts,
            tokens=self.tokens[tokens],
            expert_ids=self.expert_ids[:, tokens],
            weights=None if self.weights is None else self.weights[:, tokens],
            inputs=None if self.inputs is None else self.inputs[:, tokens],
        )

    def paths(self, tokens: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """(n tokens, len(shape.layers), n_expert): the experts that each of these tokens used."""
        return multi_hot(self.expert_ids[:, tokens].transpose(1, 0, 2), self.shape.n_expert)

    def events(self) -> Iterator[Announcement | RoutingEvent]:
        """The events of the live run, in order, pass by pass; all in lane 0, `pass_` counted from 0.

        Announcements are rebuilt from the passes they became; a pass whose announcement is not wholly in
        the trace is unannounced (first_token -1). The arrays of an event may be views: copy what you keep.
        """
        used = self.used()
        computed = self.computed()
        announcements = self._announcements()
        announced: dict[int, int] = {}  # sequence -> last pass of its last announcement
        for p in range(self.n_pass):
            sequence, phase = int(self.pass_sequence[p]), Phase(int(self.pass_phase[p]))
            if p in announcements:
                last, tokens = announcements[p]
                announced[sequence] = last
                yield Announcement(0, sequence, phase, tokens)
            first = int(self.pass_first_token[p]) if p <= announced.get(sequence, -1) else -1
            yield from self._routing_events(p, sequence, phase, first, used, computed[p])

    def _routing_events(
        self, p: int, sequence: int, phase: Phase, first: int, used: list[int], computed: list[int]
    ) -> Iterator[RoutingEvent]:
        start, end = int(self.pass_start[p]), int(self.pass_start[p + 1])
        expert_ids = self.expert_ids[:, start:end].astype(np.int32)
        weights = None if self.weights is None else self.weights[:, start:end].astype(np.float32)
        time_ns = int(self.pass_ns[p])
        for row, il in enumerate(self.shape.layers):
            if computed[row] == 0:
                continue
            skipped, k = end - start - computed[row], used[row]
            yield RoutingEvent(
                p, time_ns, 0, sequence, phase, first, il, expert_ids[row, skipped:, :k],
                None if weights is None else weights[row, skipped:, :k], self._inputs(row, start + skipped, end),
            )  # fmt: skip

    def _inputs(self, row: int, start: int, end: int) -> Float32s | None:
        if self.inputs is None or not self.inputs[row, start].any():
            return None
        return self.inputs[row, start:end].astype(np.float32)

    def used(self) -> list[int]:
        """Experts used by a token, for each layer with experts."""
        if self.n_tokens == 0:
            return [0] * len(self.shape.layers)
        return (self.expert_ids >= 0).any(axis=1).sum(axis=1).tolist()

    def computed(self) -> list[list[int]]:
        """[pass][row]: number of tokens that the layer was computed for."""
        sums = np.zeros((len(self.shape.layers), self.n_tokens + 1), np.int64)
        np.cumsum(self.expert_ids[:, :, 0] >= 0, axis=1, out=sums[:, 1:])
        return np.diff(sums[:, self.pass_start], axis=1).T.tolist()

    def _announcements(self) -> dict[int, tuple[int, Int32s]]:
        """{pass an announcement comes before: (last pass of it, its tokens)}."""
        parts: dict[int, list[int]] = {}
        open_: dict[int, tuple[int, int, int]] = {}  # sequence -> first pass, phase, next first_token
        lengths = np.diff(self.pass_start).tolist()
        facts = zip(self.pass_sequence.tolist(), self.pass_phase.tolist(), self.pass_first_token.tolist(), strict=True)
        for p, (sequence, phase, first) in enumerate(facts):
            begun, begun_phase, expected = open_.get(sequence, (-1, -1, -1))
            if first == 0:
                begun = p
                parts[p] = [p]
            elif first > 0 and first == expected and phase == begun_phase:
                parts[begun].append(p)
            else:
                open_.pop(sequence, None)
                continue
            open_[sequence] = begun, phase, first + lengths[p]
        return {begun: (passes[-1], self._tokens_of(passes)) for begun, passes in parts.items()}

    def _tokens_of(self, passes: list[int]) -> Int32s:
        return np.concatenate([self.tokens[self.pass_start[p] : self.pass_start[p + 1]] for p in passes])


def shuffled(trace: Trace, seed: int) -> Trace:
    """A control without order: in each layer separately, each request's choices in decode passes are permuted.

    Which experts a request uses and how often, tokens and inputs are unchanged; their correlation with the choices, and
    that between layers and between tokens, is removed. So what is left of a predictor's accuracy is what the request
    as a whole tells. Weights are permuted with their experts.
    """
    rng = np.random.default_rng(seed)
    lengths = np.diff(trace.pass_start)
    decode, sequence = np.repeat(trace.pass_phase == Phase.DECODE, lengths), np.repeat(trace.pass_sequence, lengths)
    expert_ids = trace.expert_ids.copy()
    weights = None if trace.weights is None else trace.weights.copy()
    for row in range(len(trace.shape.layers)):
        here = np.flatnonzero(decode & (trace.expert_ids[row, :, 0] >= 0))
        dealt = here[np.lexsort((rng.random(len(here)), sequence[here]))]
        here = here[np.argsort(sequence[here], kind="stable")]
        expert_ids[row, here] = trace.expert_ids[row, dealt]
        if weights is not None and trace.weights is not None:
            weights[row, here] = trace.weights[row, dealt]
    return replace(trace, expert_ids=expert_ids, weights=weights)
