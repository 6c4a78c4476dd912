"""A running model's routing, written to a trace file."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.shape import MoeShape
from moegguf.engine.machine import read_machine
from moegguf.engine.session import Session
from moegguf.native.events import Announcement, RoutingEvent
from moegguf.native.store import EVERY_PASS, ListenOptions
from moegguf.package import __version__
from moegguf.trace.trace import TraceHeader

if TYPE_CHECKING:
    from moegguf.trace.recorder import Recorder

# Counters of the live run, kept in the file so that a simulation can be compared with them.
COUNTED = ("lookups", "hits_ready", "hits_late", "misses", "evictions", "stall_ns", "events_dropped")


@dataclass(frozen=True)
class TraceOptions:
    """Where to record and what. inputs: the router's input vectors too (float16, n_embd per token and layer)."""

    path: str | os.PathLike[str]
    inputs: bool = False


class Recording:
    """Records every pass of a session until closed. Raises TraceError when the file cannot be made.

    No event is dropped: the model waits when the recorder falls behind.
    """

    def __init__(self, session: Session, artifacts: Artifacts, options: TraceOptions | str | os.PathLike[str]) -> None:
        from moegguf.trace.recorder import Recorder

        if not isinstance(options, TraceOptions):
            options = TraceOptions(options)
        self._session = session
        self.listen_options = ListenOptions(
            weights=True, inputs=options.inputs, everything=True, lazy=True, max_input_tokens=EVERY_PASS
        )
        header = TraceHeader(
            model=session.layout.name,
            fingerprint=artifacts.fingerprint,
            labels={},
            settings={
                "n_slots": session.plan.n_slots,
                "n_experts": session.layout.n_expert_total,
                "n_ubatch": session.plan.n_ubatch,
                "moegguf": __version__,
                "cpu": read_machine().cpu_model,
            },
        )
        self._recorder: Recorder | None = Recorder(
            options.path, MoeShape.of(session.layout), header, inputs=options.inputs
        )
        session.listeners.add(self)
        atexit.register(self.close)  # completes the file when the model is never closed

    def announce(self, announcement: Announcement) -> None:
        """Records tokens that are about to be evaluated."""
        if self._recorder is not None:
            self._recorder.announce(announcement)

    def observe(self, event: RoutingEvent) -> None:
        """Records the routing of one layer."""
        if self._recorder is not None:
            self._recorder.observe(event)

    def label(self, sequence: int, text: str) -> None:
        """Labels request number `sequence` with its kind of text."""
        if self._recorder is not None:
            self._recorder.label(sequence, text)

    def discard(self) -> None:
        """Ends the recording without a file; an earlier file at the path stays. No effect after close()."""
        recorder = self._end()
        if recorder is not None:
            recorder.discard()

    def close(self) -> None:
        """Completes the file. Raises TraceError when something could not be written. Twice is harmless."""
        recorder = self._end()
        if recorder is not None:
            counters = self._session.store.counters()
            recorder.close(**{name: counters[name] for name in COUNTED})

    def _end(self) -> Recorder | None:
        """Removes the listener; returns the recorder at the first call, then None."""
        atexit.unregister(self.close)
        self._session.listeners.remove(self)
        recorder, self._recorder = self._recorder, None
        return recorder
