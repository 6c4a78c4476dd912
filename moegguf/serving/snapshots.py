"""Sends snapshots of a model's experts from the worker, on a thread of its own, while a client watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moegguf.engine.llama import Llama
from moegguf.generate.batching import BatchLoop
from moegguf.serving.events import MAX_SNAPSHOTS_PER_S, Snapshot

_MAX_COUNT = 255

Uint32s = npt.NDArray[np.uint32]


class SnapshotSender:
    """Calls `send` with a `Snapshot` of a model, and of the `loop` that uses it, at the rate set by `watch`."""

    def __init__(self, name: str, llm: Llama, loop: BatchLoop, send: Callable[[Snapshot], None]) -> None:
        self._name = name
        self._llm = llm
        self._loop = loop
        self._send = send
        self._start_s = time.monotonic()
        self._layers = [layer.il for layer in llm.layout.layers]
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._previous: tuple[Uint32s, Uint32s] | None = None
        self._mark: tuple[Uint32s, Uint32s] | None = None
        self._previous_tokens = (0, time.monotonic())

    def watch(self, per_s: float) -> None:
        """Sends `per_s` snapshots a second from now on, at most MAX_SNAPSHOTS_PER_S; 0 stops."""
        self.close()
        if per_s <= 0:
            return
        session = self._llm.session
        if session is not None:
            session.store.watch(True)
            self._previous = session.store.activity()
        self._stop = threading.Event()
        interval_s = 1 / min(per_s, MAX_SNAPSHOTS_PER_S)
        self._thread = threading.Thread(
            target=self._run, args=(self._stop, interval_s), name="moegguf-snapshots", daemon=True
        )
        self._thread.start()

    def mark(self) -> None:
        """What `since_mark` counts begins now."""
        if self._llm.session is not None:
            self._mark = self._llm.session.store.activity()

    def since_mark(self) -> Snapshot:
        """A snapshot whose `uses` and `loads` are since the mark. Uses of a model that is in memory as a whole are
        counted from the first call on, as they slow it down."""
        session = self._llm.session
        if session is None:
            return self._snapshot(None, None)
        session.store.watch(True)
        return self._snapshot(session.store.activity(), self._mark)

    def close(self) -> None:
        """Stops; returns after the last snapshot was sent. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        if self._llm.session is not None:
            self._llm.session.store.watch(False)

    def _run(self, stop: threading.Event, interval_s: float) -> None:
        while not stop.wait(interval_s):
            now = None if self._llm.session is None else self._llm.session.store.activity()
            try:
                self._send(self._snapshot(now, self._previous))
            except OSError:
                return  # the server closed the socket
            self._previous = now

    def _snapshot(self, now: tuple[Uint32s, Uint32s] | None, before: tuple[Uint32s, Uint32s] | None) -> Snapshot:
        """The state, with the activity from `before` (None: the load) to `now`; None: of a model without experts."""
        now_s, session = time.monotonic(), self._llm.session
        state, uses, loads = b"", b"", b""
        if session is not None and now is not None:
            state = session.places()[self._layers].tobytes()
            previous_uses, previous_loads = before or (0, 0)
            uses, loads = self._difference(now[0], previous_uses), self._difference(now[1], previous_loads)
        return Snapshot(
            model=self._name,
            layers=tuple(self._layers) if session is not None else (),
            n_expert=self._llm.layout.n_expert if session is not None else 0,
            state=state,
            uses=uses,
            loads=loads,
            stats=self._llm.stats(),
            busy=self._loop.n_running > 0,
            tokens_per_s=self._speed(self._loop.n_answer_tokens, now_s),
            seconds=now_s - self._start_s,
        )

    def _difference(self, now: Uint32s, before: Uint32s | int) -> bytes:
        return np.minimum((now - before)[self._layers], _MAX_COUNT).astype(np.uint8).tobytes()

    def _speed(self, n_tokens: int, now_s: float) -> float:
        """Tokens per second of all answers since the previous snapshot."""
        previous, since_s = self._previous_tokens
        self._previous_tokens = (n_tokens, now_s)
        return max(0, n_tokens - previous) / max(now_s - since_s, 1e-3)
