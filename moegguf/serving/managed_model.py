"""One model as the dispatcher manages it: waiting and current requests, expiry, memory, worker process.

State only: nothing here starts, awaits or ends anything; dispatcher.py decides.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from moegguf.engine.batch import DEFAULT_UBATCH_TOKENS
from moegguf.models.entry import ModelEntry
from moegguf.serving.events import LoadedModel, LoadOverrides
from moegguf.serving.memory_budget import ModelSize
from moegguf.serving.wire import Ready

if TYPE_CHECKING:
    from moegguf.serving.worker_process import WorkerProcess

_tickets = itertools.count(1)


class State(Enum):
    """Lifecycle of a model's process."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


class Purpose(Enum):
    """What a waiter needs: the model alone to generate, the model shared with others, or the model unloaded."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    UNLOAD = "unload"


@dataclass(eq=False)
class Waiter:
    """A request that waits for a model and, once granted, uses it. `ticket`: order of arrival over all models."""

    entry: ModelEntry
    overrides: LoadOverrides
    keep_alive_s: float
    purpose: Purpose = Purpose.EXCLUSIVE
    on_progress: Callable[[float], object] = lambda fraction: None
    ticket: int = field(default_factory=lambda: next(_tickets))
    since_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    load_s: float = 0.0  # duration of the load that it waited for
    granted: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def grant(self) -> None:
        """Ends the wait."""
        if not self.granted.done():
            self.granted.set_result(None)

    def fail(self, error: Exception) -> None:
        """Ends the wait with `error`."""
        if not self.granted.done():
            self.granted.set_exception(error)

    def same_load(self, other: Waiter) -> bool:
        """Whether both need the same files with the same overrides."""
        return self.overrides == other.overrides and self.entry.files == other.entry.files


def with_entry_parameters(entry: ModelEntry, overrides: LoadOverrides) -> LoadOverrides:
    """`overrides`, with the entry's own parameters where they are None."""
    own = vars(LoadOverrides.of(entry.parameters))
    return replace(overrides, **{name: value for name, value in own.items() if getattr(overrides, name) is None})


class ManagedModel:
    """A model that is loaded, or that a request waits for."""

    def __init__(self, entry: ModelEntry, keep_alive_s: float) -> None:
        self.entry = entry
        self.state = State.ABSENT
        self.waiters: list[Waiter] = []
        self.exclusive_user: Waiter | None = None
        self.shared_users: set[Waiter] = set()
        self.keep_alive_s = keep_alive_s
        self.expiry: asyncio.TimerHandle | None = None
        self.expires_s = math.inf  # of the event loop's clock, when `expiry` is set
        self.process: WorkerProcess | None = None
        self.overrides = LoadOverrides()  # of the waiter that it was loaded for
        self.ready = Ready(n_ctx=0)
        self.size: ModelSize | None = None  # measured for `measured_for`
        self.measured_for: Waiter | None = None
        self.measuring = False
        self.size_bytes = 0  # reserved from the decision to load until the process has ended
        self.last_used_s = 0.0
        self.n_requests = 0
        self.n_crashed_loads = 0  # in succession

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.entry.name

    @property
    def in_use(self) -> bool:
        """Whether a request uses it."""
        return self.exclusive_user is not None or bool(self.shared_users)

    @property
    def idle(self) -> bool:
        """Whether it is loaded and unused."""
        return self.state is State.READY and not self.in_use

    @property
    def oldest_waiter(self) -> Waiter:
        """The waiter that arrived first. Raises ValueError without waiters."""
        return min(self.waiters, key=lambda waiter: waiter.ticket)

    @property
    def is_measured(self) -> bool:
        """Whether `size` is valid for the first waiter."""
        known = self.measured_for
        return self.size is not None and known is not None and known.same_load(self.waiters[0])

    @property
    def is_removable(self) -> bool:
        """Whether no state is left to keep."""
        return self.state is State.ABSENT and not self.waiters and not self.in_use and not self.n_crashed_loads

    @property
    def stopping(self) -> bool:
        """Whether it is being unloaded, or will be once it is unused."""
        return self.state is State.STOPPING or any(w.purpose is Purpose.UNLOAD for w in self.waiters)

    def reset(self) -> None:
        """The process has ended: frees the reservation."""
        self.state, self.process, self.size, self.size_bytes = State.ABSENT, None, None, 0

    def serves(self, waiter: Waiter) -> bool:
        """Whether the loaded model has the files and overrides that `waiter` needs; else it is loaded again."""
        if waiter.entry.digest != self.entry.digest or waiter.entry.files != self.entry.files:
            return False
        given = {name: value for name, value in vars(waiter.overrides).items() if value is not None}
        # A context longer than the model's own was cut: a request for the same length needs no reload.
        actual = {"n_ctx": self.ready.n_ctx, "n_batch": self.overrides.n_batch or DEFAULT_UBATCH_TOKENS}
        return all(value in (getattr(self.overrides, name), actual.get(name)) for name, value in given.items())

    def status(self, loop_time_s: float) -> LoadedModel:
        """Its current state and statistics, as last reported by its process. It must be loaded."""
        process, plan = self.process, self.ready.plan
        assert process is not None
        return LoadedModel(
            name=self.name,
            digest=self.entry.digest,
            pid=process.pid,
            n_ctx=self.ready.n_ctx,
            size_bytes=self.size_bytes,
            vram_bytes=0,
            expires=self._expires(loop_time_s),
            busy=self.exclusive_user is not None,
            stopping=self.stopping,
            queue=sum(w.purpose is not Purpose.UNLOAD for w in self.waiters),
            n_requests=self.n_requests,
            stats=process.stats,
            plan=plan,
            decisions=process.decisions,
        )

    def _expires(self, loop_time_s: float) -> datetime | None:
        left_s = self.expires_s - loop_time_s if self.expiry is not None else self.keep_alive_s
        return None if left_s == math.inf else datetime.now(UTC) + timedelta(seconds=max(0.0, left_s))
