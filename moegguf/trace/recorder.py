"""Records what a listener hears into a trace file, block by block, while the model decodes.

Per gate it only copies and appends; arrays are put together once per block. It knows no store: whoever listens calls
announce() and observe() from one thread; label() may be called from any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.errors import TraceError
from moegguf.native.events import Announcement, Float32s, Int32s, Phase, RoutingEvent
from moegguf.trace.format import BLOCK_BYTES, MAX_TEXT, FileHeader, TraceWriter
from moegguf.trace.trace import Setting, Trace, TraceHeader

BLOCK_PASSES = 256

T = TypeVar("T")

_NOTHING = np.empty(0, np.int32)

Kept = tuple[int, Int32s, Float32s | None, Float32s | None]  # row of the layer, expert_ids, weights, inputs


@dataclass(slots=True)
class _Pass:
    """A pass while it is recorded."""

    sequence: int
    phase: Phase
    first_token: int
    time_ns: int
    announced: Int32s
    events: list[Kept] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Of the layer that had most: the last layer is computed for some tokens only."""
        return max((len(event[1]) for event in self.events), default=0)

    @property
    def has_inputs(self) -> bool:
        return any(event[3] is not None for event in self.events)

    def tokens(self, n_tokens: int) -> Int32s:
        """(n_tokens,), -1 where they were not announced."""
        found = np.full(n_tokens, -1, np.int32)
        if self.first_token >= 0:
            known = self.announced[self.first_token : self.first_token + len(found)]
            found[: len(known)] = known
        return found


class Recorder:
    """Writes the routing it hears to `path`; the file gets its name at close().

    weights, inputs: whether these are recorded, if gates carry them. Raises TraceError when `path` cannot be written
    or `header` cannot be stored. A disk that fills up later ends the recording, not the model: close() raises.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: MoeShape,
        header: TraceHeader,
        *,
        weights: bool = True,
        inputs: bool = False,
    ) -> None:
        FileHeader(shape, header, weights, inputs, ()).encode()  # better refused now than at the end
        self.shape, self.header = shape, header
        self.n_passes = self.n_tokens = 0  # written so far
        self._labels = dict(header.labels)
        self._weights, self._inputs = weights, inputs
        self._rows = shape.row_of
        self._announced: dict[int, Int32s] = {}  # lane -> tokens
        self._open: dict[int, tuple[int, _Pass]] = {}  # lane -> number and pass in progress
        self._finished: list[_Pass] = []
        self._bytes = 0  # of what is kept, for the large passes
        self._error: TraceError | None = None
        self._closed = False
        self._writer = TraceWriter(path, shape, weights=weights, inputs=inputs)

    def announce(self, announcement: Announcement) -> None:
        """Tokens are about to be evaluated."""
        self._announced[announcement.lane] = announcement.tokens.copy()

    def observe(self, event: RoutingEvent) -> None:
        """A layer's routing has become known. Layers and sizes that the model does not have are left out."""
        if self._closed or self._error is not None:
            return
        number, current = self._open.get(event.lane, (-1, None))
        if current is None or number != event.pass_:
            current = self._begin(event)
        row = self._rows.get(event.il)
        if row is None or event.expert_ids.shape[1] > self.shape.n_expert_used:
            return
        weights = event.weights.copy() if self._weights and event.weights is not None else None
        inputs = event.inputs.copy() if self._inputs and event.inputs is not None else None
        if inputs is not None:
            self._bytes += inputs.nbytes
        current.events.append((row, event.expert_ids.copy(), weights, inputs))

    def label(self, sequence: int, text: str) -> None:
        """Says what kind of text a request is."""
        self._labels[sequence] = text[:MAX_TEXT]

    def close(self, **settings: Setting) -> None:
        """Writes the rest and completes the file, with facts known only now added to the header's settings.

        Listening must have ended. Raises TraceError when something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        self._finished += [current for _, current in self._open.values()]
        self._open.clear()
        self._flush()
        if self._error is None:
            header = replace(self.header, labels=self._labels, settings={**self.header.settings, **settings})
            self._guarded(self._writer.close, header)
        if self._error is not None:
            raise self._error

    def discard(self) -> None:
        """Gives the recording up: no file is left. Does nothing after close()."""
        if not self._closed:
            self._closed = True
            self._writer.discard()

    def _begin(self, event: RoutingEvent) -> _Pass:
        """The pass that begins with this gate; the lane's pass before it is finished."""
        _, last = self._open.get(event.lane, (-1, None))
        if last is not None:
            self._finished.append(last)
        if len(self._finished) >= BLOCK_PASSES or self._bytes >= BLOCK_BYTES:
            self._flush()
        announced = self._announced.get(event.lane, _NOTHING)
        begun = _Pass(event.sequence, event.phase, event.first_token, event.time_ns, announced)
        self._open[event.lane] = event.pass_, begun
        self._bytes += event.expert_ids.nbytes * 2 * len(self._rows)
        return begun

    def _flush(self) -> None:
        """Writes all finished passes, those with inputs apart from those without."""
        # In the order they began: of several lanes, the pass that began first need not be finished first.
        passes = sorted((one for one in self._finished if one.n_tokens), key=lambda one: one.time_ns)
        self._finished, self._bytes = [], 0
        for inputs, group in groupby(passes, key=lambda one: one.has_inputs):
            if self._error is not None:
                return
            block = _block(self.shape, self.header, list(group), weights=self._weights, inputs=inputs)
            self._guarded(self._writer.add, block)
            if self._error is None:
                self.n_passes, self.n_tokens = self.n_passes + block.n_pass, self.n_tokens + block.n_tokens

    def _guarded(self, write: Callable[[T], None], what: T) -> None:
        try:
            write(what)
        except TraceError as error:
            self._error = error
            self._writer.discard()


def _block(shape: MoeShape, header: TraceHeader, passes: list[_Pass], *, weights: bool, inputs: bool) -> Trace:
    """These passes as arrays."""
    lengths = [one.n_tokens for one in passes]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    events = [event for one in passes for event in one.events]
    rows = np.array([event[0] for event in events])
    ends = np.repeat(starts[1:], [len(one.events) for one in passes])
    size = (len(shape.layers), int(starts[-1]))
    expert_ids = np.full((*size, shape.n_expert_used), -1, np.int16)
    _scatter(expert_ids, rows, ends, [event[1] for event in events])
    block = Trace(
        shape=shape,
        header=header,
        pass_sequence=np.array([one.sequence for one in passes], np.int32),
        pass_phase=np.array([one.phase for one in passes], np.uint8),
        pass_first_token=np.array([one.first_token for one in passes], np.int32),
        pass_ns=np.array([one.time_ns for one in passes], np.int64),
        pass_start=starts,
        tokens=np.concatenate([one.tokens(n_tokens) for one, n_tokens in zip(passes, lengths, strict=True)]),
        expert_ids=expert_ids,
        weights=np.zeros((*size, shape.n_expert_used), np.float16) if weights else None,
        inputs=np.zeros((*size, shape.n_embd), np.float16) if inputs else None,
    )
    if block.weights is not None:
        _scatter(block.weights, rows, ends, [event[2] for event in events])
    if block.inputs is not None:
        _scatter(block.inputs, rows, ends, [event[3] for event in events])
    return block


def _scatter(
    target: npt.NDArray[Any],
    rows: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    parts: Sequence[npt.NDArray[Any] | None],
) -> None:
    """Puts parts[i] (n_tokens, width) into target[rows[i], ends[i] - n_tokens : ends[i], :width]."""
    widths = np.array([-1 if part is None else part.shape[1] for part in parts])
    for width in set(widths.tolist()) - {-1}:
        here = np.flatnonzero(widths == width)
        chosen = [part for i in here.tolist() if (part := parts[i]) is not None]
        counts = np.fromiter(map(len, chosen), np.int64)
        behind = ends[here] - np.cumsum(counts)  # token of a part's line = its line among all + this
        values = _as(target.dtype, np.concatenate(chosen))
        at = np.arange(len(values)) + np.repeat(behind, counts)
        target[np.repeat(rows[here], counts), at, :width] = values


def _as(dtype: np.dtype[Any], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values in a smaller type; what float16 cannot hold becomes its largest number, NaN becomes 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        small = values.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(small).all():
        np.nan_to_num(small, copy=False)
    return small
