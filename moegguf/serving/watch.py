"""What a client that watches the experts of loaded models sees of them."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from moegguf.serving.events import Snapshot

if TYPE_CHECKING:
    from moegguf.models.entry import ModelEntry
    from moegguf.serving.model_manager import ModelManager

POLL_S = 0.5  # between two checks which models are loaded
EARLY_S = 0.001  # that a timer may be


class Watch:
    """Snapshots of the model that `entry` names, None: of each loaded one, `per_s` times a second. Loads no model."""

    def __init__(self, manager: ModelManager, entry: ModelEntry | None, per_s: float) -> None:
        self._manager = manager
        self._entry = entry
        self._interval_s = 1 / per_s
        self._due_s = -math.inf
        self._before: dict[str, Snapshot] = {}

    async def take(self) -> list[Snapshot]:
        """A snapshot of each model, with what was used and loaded since the one before; none before they are due."""
        if time.monotonic() < self._due_s - EARLY_S:
            return []
        self._due_s = time.monotonic() + self._interval_s
        before = self._before
        now = await self._manager.snapshots(self._entry, 2 * self._interval_s + POLL_S)
        self._before = {snapshot.model: snapshot for snapshot in now}
        return [snapshot.since(before.get(snapshot.model)) for snapshot in now]

    async def wait(self) -> None:
        """Returns when there is something to take, or to look at: after POLL_S at the latest."""
        await asyncio.sleep(max(0.0, min(POLL_S, self._due_s - time.monotonic())))
