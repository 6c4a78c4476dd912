"""Records announcements and routing events into a trace file, block by block, while the model decodes.

Per event it only copies and appends; arrays are built once per block. announce() and observe() are called from one
thread; label() may be called from any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.errors import TraceError
from moegguf.native.events import Announcement, Float32s, Int32s, Phase, RoutingEvent
from moegguf.trace.format import TraceWriter
from moegguf.trace.header import FileHeader
from moegguf.trace.trace import MAX_TEXT, Setting, Trace, TraceHeader

BLOCK_PASSES = 256
BLOCK_BYTES = 64 << 20  # of one block in memory, unless a single pass has more

T = TypeVar("T")


class _LayerRouting(NamedTuple):
    row: int
    expert_ids: Int32s
    weights: Float32s | None
    inputs: Float32s | None


@dataclass(slots=True)
class _Pass:
    """A pass while it is recorded."""

    sequence: int
    phase: Phase
    first_token: int
    time_ns: int
    announced: Announcement | None
    layers: list[_LayerRouting] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """The maximum over layers: the last layer may be computed for some tokens only."""
        return max((len(layer.expert_ids) for layer in self.layers), default=0)

    @property
    def has_inputs(self) -> bool:
        return any(layer.inputs is not None for layer in self.layers)

    def tokens(self) -> Int32s:
        """(n_tokens,), -1 where they were not announced."""
        return self._announced(None if self.announced is None else self.announced.tokens, -1)

    @property
    def of_several(self) -> bool:
        """Whether it has tokens of several requests or phases."""
        return self.first_token >= 0 and self.announced is not None and self.announced.sequences is not None

    def sequences(self) -> Int32s:
        """(n_tokens,): the request of each token."""
        return self._announced(self.announced.sequences if self.announced else None, self.sequence)

    def phases(self) -> Int32s:
        """(n_tokens,): the phase of each token."""
        return self._announced(self.announced.phases if self.announced else None, self.phase)

    def computed(self, n: int) -> npt.NDArray[np.int64]:
        """(n,): which tokens a layer with so many was computed for: those whose logits are wanted, or the last ones."""
        if n < self.n_tokens and self.of_several and self.announced is not None:
            wanted = np.flatnonzero(self._announced(self.announced.outputs, 0))
            if len(wanted) == n:
                return wanted
        return np.arange(self.n_tokens - n, self.n_tokens)

    def _announced(self, values: Int32s | None, unknown: int) -> Int32s:
        found = np.full(self.n_tokens, unknown, np.int32)
        if self.first_token >= 0 and values is not None:
            known = values[self.first_token : self.first_token + len(found)]
            found[: len(known)] = known
        return found


class Recorder:
    """Writes routing to `path`; the file has a temporary name until close().

    weights, inputs: whether these are recorded, if events carry them. Raises TraceError when `path` cannot be written
    or `header` cannot be stored. A write error later ends the recording, not the model: close() raises it.
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
        FileHeader(shape, header, weights, inputs, ()).encode()  # raises now rather than at close()
        self.shape, self.header = shape, header
        self._labels = dict(header.labels)
        self._weights, self._inputs = weights, inputs
        self._rows = shape.row_of
        self._announced: dict[int, Announcement] = {}  # by lane
        self._open: dict[int, tuple[int, _Pass]] = {}  # lane -> number and pass in progress
        self._finished: list[_Pass] = []
        self._pending_bytes = 0
        self._error: TraceError | None = None
        self._closed = False
        self._writer = TraceWriter(path, shape, weights=weights, inputs=inputs)

    def announce(self, announcement: Announcement) -> None:
        """Tokens are evaluated next."""
        copied: dict[str, Any] = announcement._asdict()
        for name in ("tokens", "sequences", "phases", "outputs"):
            copied[name] = None if copied[name] is None else copied[name].copy()
        self._announced[announcement.lane] = Announcement(**copied)

    def observe(self, event: RoutingEvent) -> None:
        """A layer was routed. Layers and sizes outside the shape are left out."""
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
            self._pending_bytes += inputs.nbytes
        current.layers.append(_LayerRouting(row, event.expert_ids.copy(), weights, inputs))

    def label(self, sequence: int, text: str) -> None:
        """Sets the kind of text of a request."""
        self._labels[sequence] = text[:MAX_TEXT]

    def close(self, **settings: Setting) -> None:
        """Writes the remaining passes and completes the file, with `settings` added to those of the header.

        No event may follow. Raises TraceError when something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        self._finished += [current for _, current in self._open.values()]
        self._open.clear()
        self._flush()
        if self._error is None:
            header = replace(self.header, labels=self._labels, settings={**self.header.settings, **settings})
            self._try_write(self._writer.close, header)
        if self._error is not None:
            raise self._error

    def discard(self) -> None:
        """Cancels the recording and removes its file. Does nothing after close()."""
        if not self._closed:
            self._closed = True
            self._writer.discard()

    def _begin(self, event: RoutingEvent) -> _Pass:
        """The pass that begins with this event; finishes the lane's previous pass."""
        _, last = self._open.get(event.lane, (-1, None))
        if last is not None:
            self._finished.append(last)
        if len(self._finished) >= BLOCK_PASSES or self._pending_bytes >= BLOCK_BYTES:
            self._flush()
        announced = self._announced.get(event.lane)
        begun = _Pass(event.sequence, event.phase, event.first_token, event.time_ns, announced)
        self._open[event.lane] = event.pass_, begun
        self._pending_bytes += event.expert_ids.nbytes * 2 * len(self._rows)
        return begun

    def _flush(self) -> None:
        """Writes all finished passes, those with inputs apart from those without."""
        # In order of start: with several lanes, the pass that began first may finish later.
        passes = sorted((one for one in self._finished if one.n_tokens), key=lambda one: one.time_ns)
        self._finished, self._pending_bytes = [], 0
        for inputs, group in groupby(passes, key=lambda one: one.has_inputs):
            if self._error is not None:
                return
            block = _block(self.shape, self.header, list(group), weights=self._weights, inputs=inputs)
            self._try_write(self._writer.add, block)

    def _try_write(self, write: Callable[[T], None], part: T) -> None:
        try:
            write(part)
        except TraceError as error:
            self._error = error
            self._writer.discard()


def _block(shape: MoeShape, header: TraceHeader, passes: list[_Pass], *, weights: bool, inputs: bool) -> Trace:
    """These passes as arrays."""
    lengths = [one.n_tokens for one in passes]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    layers = [layer for one in passes for layer in one.layers]
    rows = np.array([layer.row for layer in layers])
    at = [start + one.computed(len(layer.expert_ids)) for one, start in zip(passes, starts.tolist(), strict=False)
          for layer in one.layers]  # fmt: skip
    several = any(one.of_several for one in passes)
    size = (len(shape.layers), int(starts[-1]))
    expert_ids = np.full((*size, shape.n_expert_used), -1, np.int16)
    _scatter(expert_ids, rows, at, [layer.expert_ids for layer in layers])
    block = Trace(
        shape=shape,
        header=header,
        pass_sequence=np.array([one.sequence for one in passes], np.int32),
        pass_phase=np.array([one.phase for one in passes], np.uint8),
        pass_first_token=np.array([one.first_token for one in passes], np.int32),
        pass_ns=np.array([one.time_ns for one in passes], np.int64),
        pass_start=starts,
        tokens=np.concatenate([one.tokens() for one in passes]),
        expert_ids=expert_ids,
        weights=np.zeros((*size, shape.n_expert_used), np.float16) if weights else None,
        inputs=np.zeros((*size, shape.n_embd), np.float16) if inputs else None,
        token_sequence=np.concatenate([one.sequences() for one in passes]) if several else None,
        token_phase=np.concatenate([one.phases() for one in passes]).astype(np.uint8) if several else None,
    )
    if block.weights is not None:
        _scatter(block.weights, rows, at, [layer.weights for layer in layers])
    if block.inputs is not None:
        _scatter(block.inputs, rows, at, [layer.inputs for layer in layers])
    return block


def _scatter(
    target: npt.NDArray[Any],
    rows: npt.NDArray[np.int64],
    at: Sequence[npt.NDArray[np.int64]],
    parts: Sequence[npt.NDArray[Any] | None],
) -> None:
    """Copies parts[i] (n_tokens, width) to target[rows[i], at[i], :width]."""
    widths = np.array([-1 if part is None else part.shape[1] for part in parts])
    for width in set(widths.tolist()) - {-1}:
        here = np.flatnonzero(widths == width)
        chosen = [part for i in here.tolist() if (part := parts[i]) is not None]
        counts = np.fromiter(map(len, chosen), np.int64)
        tokens = np.concatenate([at[i] for i in here.tolist()])
        target[np.repeat(rows[here], counts), tokens, :width] = _cast(target.dtype, np.concatenate(chosen))


def _cast(dtype: np.dtype[Any], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values in a smaller type; overflow is clamped to the largest number, NaN becomes 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        small = values.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(small).all():
        np.nan_to_num(small, copy=False)
    return small
