"""Saves a model's EAM collection while it runs (MoE-Infinity, appendix B.2), so that a killed process loses little."""

from __future__ import annotations

from threading import Thread

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.collection import EamcPair
from moegguf.controller.shape import MoeShape

EVERY_REQUESTS = 8


class CollectionCheckpoint:
    """Saves the collection after every EVERY_REQUESTS requests, on a thread of its own.

    The event thread, on which requests end, copies the counts only. While one checkpoint is being written, the next is
    left out.
    """

    def __init__(self, artifacts: Artifacts, shape: MoeShape) -> None:
        self._artifacts = artifacts
        self._shape = shape
        self._n_ended = 0
        self._writer: Thread | None = None

    def request_ended(self, eamcs: EamcPair) -> None:
        """A request has been added to these collections."""
        self._n_ended += 1
        if self._n_ended % EVERY_REQUESTS or (self._writer is not None and self._writer.is_alive()):
            return
        states = eamcs.states()
        self._writer = Thread(
            target=lambda: self._artifacts.save_collection(self._shape, EamcPair.packed(states)),
            name="moegguf-checkpoint",
            daemon=True,
        )
        self._writer.start()

    def close(self) -> None:
        """Returns after the last checkpoint has been written."""
        if self._writer is not None:
            self._writer.join()
