"""Writes a running model's routing to a trace file. This module is imported only for
recording, because it imports pydantic, which takes a while."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.shape import MoeShape
from moegguf.engine.session import Session
from moegguf.gguf.reader import StrPath
from moegguf.native.store import EVERY_PASS, ListenOptions
from moegguf.package import __version__
from moegguf.processor import read_processor
from moegguf.trace.recorder import Recorder
from moegguf.trace.trace import Setting, TraceHeader

# Counters of the live run, kept in the file so that a simulation can be compared with
# them.
COUNTED = (
    "lookups",
    "hits_ready",
    "hits_late",
    "misses",
    "evictions",
    "stall_ns",
    "events_dropped",
)


@dataclass(frozen=True)
class TraceOptions:
    """The path of the trace file to record. inputs: True if the routers' inputs are
    also recorded (float16, n_embd per token and layer)."""

    path: str | os.PathLike[str]
    inputs: bool = False


class Recording(Recorder):
    """Records every pass of a session until `close` or `discard` is called. Raises
    TraceError if the file cannot be created.

    No event is dropped: the model waits if the recorder falls behind.
    """

    def __init__(
        self, session: Session, artifacts: Artifacts, options: TraceOptions | StrPath
    ) -> None:
        if not isinstance(options, TraceOptions):
            options = TraceOptions(options)
        self._session = session
        self.listen_options = ListenOptions(
            weights=True,
            inputs=options.inputs,
            everything=True,
            lazy=True,
            max_input_tokens=EVERY_PASS,
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
                "cpu": read_processor().model,
            },
        )
        super().__init__(
            options.path, MoeShape.of(session.layout), header, inputs=options.inputs
        )
        session.listeners.add(self)
        # Completes the file when Python exits, if the model is never closed.
        atexit.register(self.close)

    def discard(self) -> None:
        """Stops the recording and deletes the unfinished file; an earlier file at the
        path remains. Does nothing after close()."""
        self._end()
        super().discard()

    def close(self, **settings: Setting) -> None:
        """Completes the file with the store's counters and `settings`. Raises
        TraceError if something could not be written. A second call does nothing."""
        self._end()
        if not self._closed:
            counters = self._session.store.counters()
            super().close(**{name: counters[name] for name in COUNTED}, **settings)

    def _end(self) -> None:
        """Stops listening to routing events. `close` is no longer called when Python
        exits."""
        atexit.unregister(self.close)
        self._session.listeners.remove(self)
