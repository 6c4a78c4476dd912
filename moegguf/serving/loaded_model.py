"""One model as the pool sees it: who waits for it, who has it, how long it stays, and the process it is in.

Bookkeeping only: nothing here starts, awaits or ends anything. pool.py decides.
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

from moegguf.models.entry import ModelEntry
from moegguf.serving.events import Loaded, LoadOptions
from moegguf.serving.memory_budget import DEFAULT_BATCH_TOKENS, Size
from moegguf.serving.wire import Ready

if TYPE_CHECKING:
    from moegguf.serving.worker_process import Process

OPTION_KEYS = {"num_ctx": "n_ctx", "num_batch": "n_batch", "num_thread": "n_threads"}

_tickets = itertools.count(1)


class State(Enum):
    """Where a model is."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


class Purpose(Enum):
    """What somebody who waits wants: the model alone, the model beside others, or the model gone."""

    TURN = "turn"
    VISIT = "visit"
    STOP = "stop"


@dataclass(eq=False)
class Waiter:
    """Somebody who waits for a model, and who then has it. `ticket`: the order in which all of them came."""

    entry: ModelEntry
    load: LoadOptions
    keep_alive_s: float
    purpose: Purpose = Purpose.TURN
    on_share: Callable[[float], object] = lambda share: None
    ticket: int = field(default_factory=lambda: next(_tickets))
    since_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    load_s: float = 0.0  # what the load it waited for took
    granted: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def grant(self) -> None:
        if not self.granted.done():
            self.granted.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)

    def asks_the_same(self, other: Waiter) -> bool:
        """The same files, opened the same way."""
        return self.load == other.load and self.entry.files == other.entry.files


def with_own_options(entry: ModelEntry, load: LoadOptions) -> LoadOptions:
    """`load`, completed by what the model's name says of how it is opened."""
    own = {ours: entry.parameters[key] for key, ours in OPTION_KEYS.items() if entry.parameters.get(key)}
    return replace(load, **{name: value for name, value in own.items() if getattr(load, name) is None})


class ManagedModel:
    """A model that is loaded, or that somebody waits for."""

    def __init__(self, entry: ModelEntry, keep_alive_s: float) -> None:
        self.entry = entry
        self.state = State.ABSENT
        self.waiters: list[Waiter] = []
        self.holder: Waiter | None = None
        self.visitors: set[Waiter] = set()
        self.keep_alive_s = keep_alive_s
        self.expiry: asyncio.TimerHandle | None = None
        self.expires_s = math.inf  # of the event loop's clock, when `expiry` is set
        self.process: Process | None = None
        self.load = LoadOptions()  # as it was asked for
        self.ready = Ready(n_ctx=0)
        self.size: Size | None = None  # measured for `measured_for`
        self.measured_for: Waiter | None = None
        self.measuring = False
        self.size_bytes = 0  # reserved from the decision to load until the process is gone
        self.last_used_s = 0.0
        self.n_requests = 0
        self.deaths = 0  # of processes while they loaded, one after the other

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def in_use(self) -> bool:
        return self.holder is not None or bool(self.visitors)

    @property
    def idle(self) -> bool:
        """It is loaded and nobody uses it."""
        return self.state is State.READY and not self.in_use

    @property
    def oldest_waiter(self) -> Waiter:
        return min(self.waiters, key=lambda waiter: waiter.ticket)

    @property
    def is_measured(self) -> bool:
        """`size` is that of what the first one in line asks for."""
        known = self.measured_for
        return self.size is not None and known is not None and known.asks_the_same(self.waiters[0])

    def leave(self) -> None:
        """Its process is gone."""
        self.state, self.process, self.size, self.size_bytes = State.ABSENT, None, None, 0

    @property
    def forgotten(self) -> bool:
        """Nothing is left to remember."""
        return self.state is State.ABSENT and not self.waiters and not self.in_use and not self.deaths

    @property
    def stopping(self) -> bool:
        """It will leave once nobody uses it."""
        return self.state is State.STOPPING or any(w.purpose is Purpose.STOP for w in self.waiters)

    def suits(self, waiter: Waiter) -> bool:
        """It need not be loaded again: what `waiter` gives is how it was loaded, from the same files."""
        if waiter.entry.digest != self.entry.digest or waiter.entry.files != self.entry.files:
            return False
        given = {name: value for name, value in vars(waiter.load).items() if value is not None}
        # A context longer than the model's own was cut: asking for the same again changes nothing.
        actual = {"n_ctx": self.ready.n_ctx, "n_batch": self.load.n_batch or DEFAULT_BATCH_TOKENS}
        return all(value in (getattr(self.load, name), actual.get(name)) for name, value in given.items())

    def figures(self, loop_time_s: float) -> Loaded:
        """What is known of it, without asking its process. It must be loaded."""
        process, plan = self.process, self.ready.plan
        assert process is not None
        return Loaded(
            name=self.name,
            digest=self.entry.digest,
            pid=process.pid,
            n_ctx=self.ready.n_ctx,
            size_bytes=self.size_bytes,
            vram_bytes=0,
            expires=self._expires(loop_time_s),
            busy=self.holder is not None,
            stopping=self.stopping,
            queue=sum(w.purpose is not Purpose.STOP for w in self.waiters),
            n_requests=self.n_requests,
            stats=process.stats,
            plan=plan,
            decisions=process.decisions,
        )

    def _expires(self, loop_time_s: float) -> datetime | None:
        left_s = self.expires_s - loop_time_s if self.expiry is not None else self.keep_alive_s
        return None if left_s == math.inf else datetime.now(UTC) + timedelta(seconds=max(0.0, left_s))
