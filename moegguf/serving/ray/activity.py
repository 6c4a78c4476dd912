"""The recent use of experts by a replica's model, from snapshots."""

from __future__ import annotations

import numpy as np

from moegguf.serving.events import Snapshot
from moegguf.serving.ray.preference import Counts, Eam

KEPT = 0.9  # of the recent use, at each snapshot with any: half of it is of the last 7


class ExpertActivity:
    """`add` each snapshot. It counts all requests together; `ExpertUses` are of one."""

    def __init__(self) -> None:
        self._recent: Counts | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Adds the uses since the previous snapshot."""
        uses = np.frombuffer(snapshot.uses, np.uint8).astype(np.float32).reshape(-1, max(1, snapshot.n_expert))
        if not uses.any():
            return
        fits = self._recent is not None and self._recent.shape == uses.shape
        self._recent = self._recent * KEPT + uses if fits and self._recent is not None else uses

    @property
    def recent(self) -> Eam | None:
        """Recent use; None while there was none."""
        return None if self._recent is None else Eam.of(self._recent)
