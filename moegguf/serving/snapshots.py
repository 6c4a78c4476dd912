"""Looks at a model's experts a few times a second, while someone watches: on a thread of its own, in the worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moegguf.engine.llama import Llama
from moegguf.serving.events import Snapshot

MAX_PER_S = 20.0
_MOST = 255

Uint32s = npt.NDArray[np.uint32]


class SnapshotSender:
    """Gives a `View` to `tell`, `watch`ed times a second. `n_written`: tokens of the answer that is being written so
    far, None when idle."""

    def __init__(
        self, name: str, llm: Llama, n_written: Callable[[], int | None], tell: Callable[[Snapshot], None]
    ) -> None:
        self._name = name
        self._llm = llm
        self._n_written = n_written
        self._tell = tell
        self._start_s = time.monotonic()
        self._layers = [layer.il for layer in llm.layout.layers]
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._before: tuple[Uint32s, Uint32s] | None = None
        self._written = (0, time.monotonic())

    def watch(self, per_s: float) -> None:
        """From now on so many times a second; 0: no more."""
        self.close()
        if per_s <= 0:
            return
        session = self._llm.session
        if session is not None:
            session.store.watch(True)
            self._before = session.store.activity()
        self._stop = threading.Event()
        interval_s = 1 / min(per_s, MAX_PER_S)
        self._thread = threading.Thread(
            target=self._look_on, args=(self._stop, interval_s), name="moegguf-look", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Looks no more; returns when the last view has been told. Twice is harmless."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        if self._llm.session is not None:
            self._llm.session.store.watch(False)

    def _look_on(self, stop: threading.Event, interval_s: float) -> None:
        while not stop.wait(interval_s):
            try:
                self._tell(self._snapshot())
            except OSError:
                return  # the server has gone

    def _snapshot(self) -> Snapshot:
        now, session = time.monotonic(), self._llm.session
        state, uses, loads = b"", b"", b""
        if session is not None:
            state = session.store.residency()[self._layers].tobytes()
            activity = session.store.activity()
            before, self._before = self._before or activity, activity
            uses, loads = (self._difference(*pair) for pair in zip(activity, before, strict=True))
        written = self._n_written()
        return Snapshot(
            model=self._name,
            layers=tuple(self._layers) if session is not None else (),
            n_expert=self._llm.layout.n_expert if session is not None else 0,
            state=state,
            uses=uses,
            loads=loads,
            stats=self._llm.stats(),
            busy=written is not None,
            tokens_per_s=self._speed(written, now),
            seconds=now - self._start_s,
        )

    def _difference(self, now: Uint32s, before: Uint32s) -> bytes:
        return np.minimum(now[self._layers] - before[self._layers], _MOST).astype(np.uint8).tobytes()

    def _speed(self, written: int | None, now: float) -> float:
        """Tokens per second since the view before, or since this answer began after it."""
        earlier, since = self._written
        self._written = (written or 0, now)
        if not written:
            return 0.0
        return max(0, written - earlier if written >= earlier else written) / max(now - since, 1e-3)
