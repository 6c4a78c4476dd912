"""Records announcements and routing events into a trace file, block by block, while the
model runs.

An announcement contains the tokens that are evaluated next. For each event, the
recorder usually only copies the event's arrays; the arrays of a block are built once
per block. Only one thread may call announce() and observe(). Any thread may call
label().
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.errors import TraceError
from moegguf.native.events import Announcement, Int32s, RoutingEvent
from moegguf.trace.format import TraceWriter
from moegguf.trace.trace import MAX_TEXT, Setting, Trace, TraceHeader

BLOCK_PASSES = 256
# A block ends with the pass that makes the block's size in memory reach this number of
# bytes.
BLOCK_BYTES = 64 << 20

T = TypeVar("T")


@dataclass(slots=True)
class _Pass:
    """A pass that is being recorded. `announced`: the announcement of the pass's
    tokens, or None. `layers`: for each event, the layer's index among the MoE layers,
    and a copy of the event."""

    first: RoutingEvent
    announced: Announcement | None
    layers: list[tuple[int, RoutingEvent]] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """The number of tokens in the pass. This is the maximum over the layers,
        because the last layer may process only some of the tokens."""
        return max((len(event.expert_ids) for _, event in self.layers), default=0)

    @property
    def has_inputs(self) -> bool:
        return any(event.inputs is not None for _, event in self.layers)

    @property
    def is_mixed(self) -> bool:
        """True if the pass was announced together with tokens of several requests or
        phases."""
        return (
            self.first.first_token >= 0
            and self.announced is not None
            and self.announced.sequences is not None
        )

    def of_tokens(self, name: str, unknown: int) -> Int32s:
        """Returns an array (n_tokens,): the values for this pass from the array `name`
        of the announcement. Values that are not known are set to `unknown`."""
        found = np.full(self.n_tokens, unknown, np.int32)
        values = getattr(self.announced, name, None)
        if self.first.first_token >= 0 and values is not None:
            known = values[self.first.first_token : self.first.first_token + len(found)]
            found[: len(known)] = known
        return found

    def of_layers(
        self, shape: MoeShape, name: str, size: int, empty: npt.ArrayLike
    ) -> npt.NDArray[Any]:
        """Returns an array (n_moe_layer, n_tokens, size) with the field `name` of the
        events of all layers. Missing values are set to `empty`, which also determines
        the type of the array."""
        n_tokens = self.n_tokens
        found = np.full((shape.n_moe_layer, n_tokens, size), empty)
        for row, event in self.layers:
            values = getattr(event, name)
            if values is None:
                continue
            here: Any = slice(n_tokens - len(values), n_tokens)
            # A layer that was not computed for all tokens was computed for the tokens
            # whose logits were needed
            if len(values) < n_tokens and self.is_mixed:
                wanted = np.flatnonzero(self.of_tokens("outputs", 0))
                here = wanted if len(wanted) == len(values) else here
            found[row, here, : values.shape[1]] = values
        return found


class Recorder:
    """Writes routing to a trace file, which has a temporary name until close().

    If `inputs` is True, the routers' inputs are also recorded for events that contain
    them. The constructor raises TraceError if `path` cannot be written or `header` is
    invalid. If writing fails later, only the recording stops, and the model keeps
    running. close() then raises the error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: MoeShape,
        header: TraceHeader,
        *,
        inputs: bool = False,
    ) -> None:
        self.shape = shape
        self.header = header
        self._labels = dict(header.labels)
        self._inputs = inputs
        self._rows = shape.row_of
        self._announced: Announcement | None = None
        self._open: _Pass | None = None  # the current pass
        self._finished: list[_Pass] = []
        self._pending_bytes = 0
        self._error: TraceError | None = None
        self._closed = False
        self._writer = TraceWriter(path, shape, header, weights=True, inputs=inputs)

    def announce(self, announcement: Announcement) -> None:
        """Keeps a copy of the announcement, which contains the tokens that are
        evaluated next."""
        copied: dict[str, Any] = announcement._asdict()
        for name in ("tokens", "sequences", "phases", "outputs"):
            copied[name] = None if copied[name] is None else copied[name].copy()
        self._announced = Announcement(**copied)

    def observe(self, event: RoutingEvent) -> None:
        """Records the routing event of a layer. Ignores an event that does not fit the
        model's shape, and all events after close(), discard() or a failed write."""
        if self._closed or self._error is not None:
            return
        current = self._open
        if current is None or current.first.pass_ != event.pass_:
            current = self._begin(event)
        row = self._rows.get(event.il)
        if row is None or event.expert_ids.shape[1] > self.shape.n_expert_used:
            return
        weights = event.weights.copy() if event.weights is not None else None
        inputs = (
            event.inputs.copy() if self._inputs and event.inputs is not None else None
        )
        if inputs is not None:
            self._pending_bytes += inputs.nbytes
        current.layers.append(
            (
                row,
                event._replace(
                    expert_ids=event.expert_ids.copy(), weights=weights, inputs=inputs
                ),
            )
        )

    def label(self, sequence: int, text: str) -> None:
        """Sets the label of a request, which names the request's kind of text. Labels
        are truncated to MAX_TEXT characters."""
        self._labels[sequence] = text[:MAX_TEXT]

    def close(self, **settings: Setting) -> None:
        """Writes the remaining passes and completes the file. Adds `settings` to the
        settings in the header.

        Later events are ignored, and a second call does nothing. Raises TraceError if
        anything could not be written.
        """
        if self._closed:
            return
        self._closed = True
        self._finish()
        self._flush()
        if self._error is None:
            header = replace(
                self.header,
                labels=self._labels,
                settings={**self.header.settings, **settings},
            )
            self._try_write(self._writer.close, header)
        if self._error is not None:
            raise self._error

    def discard(self) -> None:
        """Cancels the recording and removes the unfinished file. Does nothing after
        close()."""
        if not self._closed:
            self._closed = True
            self._writer.discard()

    def _begin(self, event: RoutingEvent) -> _Pass:
        """Finishes the previous pass, writes the finished passes if there are enough of
        them for a block, and begins a new pass. `event` is the new pass's first event,
        which this method does not record."""
        self._finish()
        if len(self._finished) >= BLOCK_PASSES or self._pending_bytes >= BLOCK_BYTES:
            self._flush()
        self._open = _Pass(event, self._announced)
        self._pending_bytes += event.expert_ids.nbytes * 2 * len(self._rows)
        return self._open

    def _finish(self) -> None:
        """Finishes the current pass, if any. Discards a pass without tokens."""
        if self._open is not None and self._open.n_tokens:
            self._finished.append(self._open)
        self._open = None

    def _flush(self) -> None:
        """Writes all finished passes. Passes with inputs and passes without inputs go
        to different blocks."""
        passes = self._finished
        self._finished = []
        self._pending_bytes = 0
        for inputs, group in groupby(passes, key=lambda one: one.has_inputs):
            if self._error is not None:
                return
            block = _block(self.shape, self.header, list(group), inputs=inputs)
            self._try_write(self._writer.add, block)

    def _try_write(self, write: Callable[[T], None], part: T) -> None:
        try:
            write(part)
        except TraceError as error:
            self._error = error
            self._writer.discard()


def _block(
    shape: MoeShape, header: TraceHeader, passes: list[_Pass], *, inputs: bool
) -> Trace:
    """Returns the passes as a block, with one array for each kind of value."""

    def joined(name: str, size: int, empty: npt.ArrayLike) -> npt.NDArray[Any]:
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.concatenate(
                [one.of_layers(shape, name, size, empty) for one in passes], axis=1
            )
        # A value that is too large for float16 becomes the largest float16, and NaN
        # becomes 0.
        return np.nan_to_num(found, copy=False) if found.dtype == np.float16 else found

    def by_token(name: str, unknown: Callable[[_Pass], int]) -> Int32s:
        return np.concatenate([one.of_tokens(name, unknown(one)) for one in passes])

    mixed = any(one.is_mixed for one in passes)
    k = shape.n_expert_used
    none = np.float16(0)
    return Trace(
        shape=shape,
        header=header,
        pass_sequence=np.array([one.first.sequence for one in passes], np.int32),
        pass_phase=np.array([one.first.phase for one in passes], np.uint8),
        pass_first_token=np.array([one.first.first_token for one in passes], np.int32),
        pass_ns=np.array([one.first.time_ns for one in passes], np.int64),
        pass_start=np.concatenate(
            [[0], np.cumsum([one.n_tokens for one in passes])]
        ).astype(np.int64),
        tokens=by_token("tokens", lambda one: -1),
        expert_ids=joined("expert_ids", k, np.int16(-1)),
        weights=joined("weights", k, none),
        inputs=joined("inputs", shape.n_embd, none) if inputs else None,
        token_sequence=by_token("sequences", lambda one: one.first.sequence)
        if mixed
        else None,
        token_phase=by_token("phases", lambda one: one.first.phase).astype(np.uint8)
        if mixed
        else None,
    )
